"""Time to first token."""

from __future__ import annotations

from kvtune.profilers.metrics.base import LatencyMetric
from kvtune.types import RequestRecord


class TimeToFirstToken(LatencyMetric):
    """From sending a request to its first output token, one value a request."""

    name = "ttft"

    def samples(self, record: RequestRecord) -> tuple[float, ...]:
        """First token minus sending, as `vllm bench serve` counts it."""
        return () if record.first_token_s is None else (record.first_token_s - record.sent_s,)
