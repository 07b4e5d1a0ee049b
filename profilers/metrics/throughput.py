"""Throughput: what the server completed a second, whatever the latency."""

from __future__ import annotations

from kvtune.profilers.metrics.base import ScalarMetric
from kvtune.types import Goal, LoadRun


class OutputThroughput(ScalarMetric):
    """Output tokens a second, of completed requests."""

    name = "output_tokens_per_s"
    unit = "tokens/s"
    better = "higher"

    def compute(self, run: LoadRun, goal: Goal) -> float | None:
        """Tokens of completed requests over the duration."""
        return _rate(run, sum(record.output_tokens for record in run.records if record.ok))


class InputThroughput(ScalarMetric):
    """Prompt tokens a second, of completed requests, cached or not."""

    name = "input_tokens_per_s"
    unit = "tokens/s"
    better = "higher"

    def compute(self, run: LoadRun, goal: Goal) -> float | None:
        """Prompt tokens over the duration; unknown if any completed request's length is."""
        lengths = [record.input_tokens for record in run.records if record.ok]
        known = [length for length in lengths if length is not None]
        return _rate(run, sum(known)) if len(known) == len(lengths) else None


class RequestThroughput(ScalarMetric):
    """Completed requests a second."""

    name = "requests_per_s"
    unit = "requests/s"
    better = "higher"

    def compute(self, run: LoadRun, goal: Goal) -> float | None:
        """Completed requests over the duration."""
        return _rate(run, sum(record.ok for record in run.records))


def _rate(run: LoadRun, amount: float) -> float | None:
    return amount / run.duration_s if run.records and run.duration_s > 0 else None
