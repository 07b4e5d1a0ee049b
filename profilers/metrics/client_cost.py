"""What the load client itself cost."""

from __future__ import annotations

from kvtune.profilers.metrics.base import ScalarMetric
from kvtune.types import Goal, LoadRun


class ClientCost(ScalarMetric):
    """CPU seconds of the load client a request; a busy client delays what it measures."""

    name = "client_cpu_s_per_request"
    unit = "s"
    better = "lower"

    def compute(self, run: LoadRun, goal: Goal) -> float | None:
        """CPU time of the client over the requests sent."""
        return run.client_cpu_s / len(run.records) if run.records else None
