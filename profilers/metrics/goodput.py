"""Goodput: what was served within the limits of the goal, and what failed."""

from __future__ import annotations

from kvtune.profilers.metrics.base import LatencyMetric, ScalarMetric, metrics, statistic_of
from kvtune.types import Goal, LoadRun, RequestRecord, Slo


class Goodput(ScalarMetric):
    """Good requests a second; without limits every completed request is good."""

    name = "goodput_requests_per_s"
    unit = "requests/s"
    better = "higher"

    def compute(self, run: LoadRun, goal: Goal) -> float | None:
        """Good requests over the duration."""
        if not run.records or run.duration_s <= 0:
            return None
        return sum(is_good(record, goal) for record in run.records) / run.duration_s


class GoodShare(ScalarMetric):
    """Share of all requests, failed ones included, that were good."""

    name = "good_share_ratio"
    unit = "ratio"
    better = "higher"

    def compute(self, run: LoadRun, goal: Goal) -> float | None:
        """Good requests over all requests."""
        if not run.records:
            return None
        return sum(is_good(record, goal) for record in run.records) / len(run.records)


class FailedRequests(ScalarMetric):
    """Requests that did not complete."""

    name = "failed_requests"
    unit = "requests"
    better = "lower"

    def compute(self, run: LoadRun, goal: Goal) -> float | None:
        """How many requests ended in an error or without a token."""
        return sum(not record.ok for record in run.records) if run.records else None


def is_good(record: RequestRecord, goal: Goal) -> bool:
    """Whether a request completed and kept every limit by its own values."""
    return record.ok and not any(exceeds(record, slo) for slo in goal.slos)


def exceeds(record: RequestRecord, slo: Slo) -> bool:
    """One limit on one request: its single value, or for gaps the statistic over its own gaps.

    A request without a value (no gap after a single token) has nothing that could be late.
    """
    metric = metrics()[slo.metric]()
    own = sorted(metric.samples(record)) if isinstance(metric, LatencyMetric) else []
    return bool(own) and statistic_of(own, slo.statistic) > slo.limit_s
