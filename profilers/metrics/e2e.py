"""End-to-end latency."""

from __future__ import annotations

from kvtune.profilers.metrics.base import LatencyMetric
from kvtune.types import RequestRecord


class EndToEndLatency(LatencyMetric):
    """From sending a request to the end of its answer, one value a request."""

    name = "e2e"

    def samples(self, record: RequestRecord) -> tuple[float, ...]:
        """End minus sending."""
        return (record.end_s - record.sent_s,)
