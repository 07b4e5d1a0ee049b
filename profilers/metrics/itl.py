"""Inter-token latency."""

from __future__ import annotations

from kvtune.profilers.metrics.base import LatencyMetric
from kvtune.types import RequestRecord


class InterTokenLatency(LatencyMetric):
    """The gaps between consecutive output tokens, all gaps of all requests pooled.

    Unlike TPOT it shows stalls inside a request, such as those of a preemption.
    """

    name = "itl"

    def samples(self, record: RequestRecord) -> tuple[float, ...]:
        """The request's gaps; none for a single token."""
        return record.gaps_s
