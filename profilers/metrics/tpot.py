"""Time per output token."""

from __future__ import annotations

from kvtune.profilers.metrics.base import LatencyMetric
from kvtune.types import RequestRecord


class TimePerOutputToken(LatencyMetric):
    """A request's mean time between output tokens, one value a request, so each weighs the same."""

    name = "tpot"

    def samples(self, record: RequestRecord) -> tuple[float, ...]:
        """(end - first token) / (output tokens - 1); none for a single token."""
        if record.first_token_s is None or record.output_tokens < 2:
            return ()
        return ((record.end_s - record.first_token_s) / (record.output_tokens - 1),)
