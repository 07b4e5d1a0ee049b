"""The contract of a metric, and `measure`, which computes all of them.

A new metric is one new file in this folder (or an entry point of the group `kvtune.metrics`) with a
concrete subclass of `ScalarMetric` or `LatencyMetric`; nothing else changes.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import ClassVar, Literal

from kvtune.errors import NotFound
from kvtune.profilers.statistics import sorted_percentile
from kvtune.registry import discover
from kvtune.types import Goal, LoadRun, RequestRecord

ALWAYS_REPORTED = ("p50", "p95", "p99", "mean", "max")


class Metric(ABC):
    """Something that is reported about a run. What cannot be known is left out, never 0."""

    name: ClassVar[str]
    unit: ClassVar[str]
    better: ClassVar[Literal["higher", "lower"]]

    @abstractmethod
    def measure(self, run: LoadRun, goal: Goal) -> dict[str, float]:
        """Flat name to value; a value that is not known is absent."""


class ScalarMetric(Metric):
    """A metric that is one number a run, reported under its own name."""

    @abstractmethod
    def compute(self, run: LoadRun, goal: Goal) -> float | None:
        """The value in `unit`, or `None` when the run does not tell."""

    def measure(self, run: LoadRun, goal: Goal) -> dict[str, float]:
        """The value under the metric's name."""
        value = self.compute(run, goal)
        return {} if value is None else {self.name: value}


class LatencyMetric(Metric):
    """A time that requests have one or many of, reported as statistics over all of them.

    Statistics pool the completed requests of a run: a failed request has no latency, so they mean
    nothing without `failed_requests`. Names are `<name>_<statistic>_s`; the statistics are
    `ALWAYS_REPORTED` and those the goal asks for.
    """

    unit = "s"
    better = "lower"

    @abstractmethod
    def samples(self, record: RequestRecord) -> Sequence[float]:
        """The times of one completed request, in seconds; empty when it has none."""

    def measure(self, run: LoadRun, goal: Goal) -> dict[str, float]:
        """Each statistic over the pooled samples; nothing when there are no samples."""
        ordered = sorted(
            chain.from_iterable(self.samples(record) for record in run.records if record.ok)
        )
        if not ordered:
            return {}
        asked = [slo.statistic for slo in goal.slos if slo.metric == self.name]
        return {
            f"{self.name}_{statistic}_s": statistic_of(ordered, statistic)
            for statistic in dict.fromkeys([*ALWAYS_REPORTED, *asked])
        }


def statistic_of(ordered: Sequence[float], statistic: str) -> float:
    """A statistic ("p95", "mean", "max") of sorted values; percentiles interpolate linearly.

    Raises:
        ValueError: there are no values, or the statistic is unknown.
    """
    if statistic == "mean":
        return fmean(ordered)
    if statistic == "max":
        return ordered[-1]
    return sorted_percentile(ordered, float(statistic.removeprefix("p")))


def metrics() -> dict[str, type[Metric]]:
    """All metrics by name."""
    return discover("kvtune.profilers.metrics", Metric, group="kvtune.metrics")


def measure(run: LoadRun, goal: Goal) -> dict[str, float]:
    """Every metric of a run under its flat name ("ttft_p95_s", "goodput_requests_per_s")."""
    return {
        name: value
        for metric in metrics().values()
        for name, value in metric().measure(run, goal).items()
    }


def metric_of(flat_name: str) -> type[Metric]:
    """The metric behind a flat name, for its unit and direction.

    Raises:
        NotFound: no metric reports that name.
    """
    known = metrics()
    metric = known.get(flat_name) or known.get(flat_name.rsplit("_", 2)[0])
    if metric is None:
        near = difflib.get_close_matches(flat_name, known, n=1, cutoff=0.3)
        raise NotFound(
            f"no metric reports {flat_name!r}",
            f"{f'did you mean {near[0]!r}? ' if near else ''}metrics are {', '.join(known)}",
        )
    return metric
