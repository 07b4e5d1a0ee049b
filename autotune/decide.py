"""From confirmed measurements to a decision. Pure: values in, a value out.

A finalist is better than the baseline only when the interval of their ratio, from rounds that are
measured interleaved on held-out requests, lies above 1 (`comparing` says at which confidence). Of
those that are better, the ones that cannot be told from the best share the first place, and the
least harmful, then the simplest of them is recommended: the one that takes the least memory, then
that with the fewest arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvtune.autotune.comparing import MATTERS, Finding, Value, at_last, contrast_of
from kvtune.autotune.rounds import ALPHA, looks
from kvtune.autotune.words import duration
from kvtune.profilers.goal import goal_met, goal_violations, slo_key, slo_text
from kvtune.profilers.metrics.base import metric_of
from kvtune.profilers.statistics import mean_interval
from kvtune.types import (
    Decision,
    FailureClass,
    Goal,
    Harm,
    Interval,
    Measurement,
    Outcome,
    PolicyStack,
    Status,
    Workload,
)

CANNOT_START = (FailureClass.DOES_NOT_FIT, FailureClass.BAD_ARGUMENT)
REPORTED = (
    "goodput_requests_per_s",
    "output_tokens_per_s",
    "requests_per_s",
    "good_share_ratio",
    "ttft_p50_s",
    "ttft_p95_s",
    "itl_p50_s",
    "itl_p95_s",
    "tpot_p50_s",
    "e2e_p50_s",
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A measured trial that may be shipped. The baseline is the candidate with an empty stack."""

    number: int
    stack: PolicyStack
    measurement: Measurement


def objective_values(goal: Goal, measurement: Measurement) -> tuple[float, ...]:
    """The objective of each repeat; empty when nothing was measured."""
    if measurement.status is not Status.OK:
        return ()
    return measurement.metrics.get(goal.objective_metric, ())


def rounds_of(goal: Goal, measurement: Measurement) -> tuple[Value, ...]:
    """The objective of each repeat, with how many requests were good if it counts those."""
    values = objective_values(goal, measurement)
    shares = measurement.metrics.get("good_share_ratio", ())
    of = measurement.requests_per_repeat
    if goal.objective != "goodput" or not of or len(shares) != len(values):
        return tuple(map(Value, values))
    return tuple(Value(value, share * of, of) for value, share in zip(values, shares, strict=True))


def mean_metrics(measurement: Measurement) -> dict[str, float]:
    """Each metric's mean over the repeats."""
    return {
        name: sum(values) / len(values) for name, values in measurement.metrics.items() if values
    }


def meets_goal(goal: Goal, measurement: Measurement) -> bool:
    """Whether every limit holds on the mean of the repeats; an unknown metric does not hold."""
    return measurement.status is Status.OK and all(
        met is True for met in goal_met(goal, mean_metrics(measurement)).values()
    )


def missed_by(goal: Goal, measurement: Measurement) -> float:
    """By what shares of them the limits are exceeded, added up: 0 where all of them hold.

    Infinite where one has no value.
    """
    if measurement.status is not Status.OK:
        return math.inf
    found = goal_violations(goal, mean_metrics(measurement)).values()
    return sum(math.inf if by is None else max(0.0, by) for by in found)


def figures_of(goal: Goal, measurement: Measurement) -> dict[str, Interval]:
    """The figures that are shown and emitted, with t intervals over the repeats.

    None of them can be negative, and no share above 1, so that their intervals end there.
    """
    names = dict.fromkeys([*REPORTED, *map(slo_key, goal.slos)])
    figures = {}
    for name in names:
        values = measurement.metrics.get(name)
        if not values:
            continue
        estimate, low, high = mean_interval(values)
        unit = metric_of(name).unit
        most = 1.0 if unit == "ratio" else math.inf
        figures[name] = Interval(
            estimate=estimate,
            low=None if low is None else max(low, 0.0),
            high=None if high is None else min(high, most),
            unit=unit,
            repeats=len(values),
            method="mean and t interval over repeats",
        )
    return figures


def decide(
    goal: Goal,
    baseline: Candidate | None,
    finalists: Sequence[Candidate],
    rejected: Mapping[int, str],
    *,
    rounds: int = 0,
    is_confirmed: bool = True,
    bound_by: Callable[[int], str] = lambda number: "",
) -> Decision:
    """Choose among finalists; `rejected` are the other trials with their reasons.

    A value of one candidate and the value of another at the same place are a pair: they were
    measured in the same round. With a single value each nothing can be proved, and the best so far
    is named as no more than that; so it is where nothing `is_confirmed`, as repeats on one server
    do not show by how much servers differ. `rounds` is how many were planned at most, where fewer
    may have been enough. `bound_by` says in words what limited the run of a trial, if it is known.
    """
    everyone = [*finalists, *([baseline] if baseline is not None else [])]
    everyone = [c for c in everyone if objective_values(goal, c.measurement)]
    if not everyone:
        return Decision(
            outcome=Outcome.NOTHING_MEASURED,
            recommended=None,
            baseline=None if baseline is None else baseline.number,
            reasons=("no trial produced a measurement", *_why_not(baseline)),
            rejected=dict(rejected),
        )
    field = _Field(goal, baseline, everyone, rounds, is_confirmed=is_confirmed)
    feasible = [c for c in everyone if meets_goal(goal, c.measurement)]
    if not feasible:
        outcome, ties, reasons = _infeasible(goal, everyone, bound_by)
    else:
        outcome, ties, reasons = _choose(field, feasible)
    chosen = min(ties, key=_harm_and_cost)
    return Decision(
        outcome=outcome,
        recommended=chosen.number,
        baseline=None if baseline is None else baseline.number,
        ties=tuple(sorted(c.number for c in ties if c is not chosen)),
        figures=figures_of(goal, chosen.measurement),
        baseline_figures={} if baseline is None else figures_of(goal, baseline.measurement),
        gain_ratio=field.gain(chosen),
        reasons=(*reasons, *_tie_reason(ties)),
        rejected=dict(rejected),
    )


def doubts(workload: Workload, concurrency: int | None, *, is_confirmed: bool) -> list[str]:
    """What a reader of a decision should know about the requests behind it.

    `concurrency` is how many requests are in flight, where that is fixed.
    """
    if not is_confirmed:
        return ["nothing was confirmed: each configuration was measured on its own"]
    if not workload.heldout:
        return ["confirmed on the requests of the search: none were held out"]
    if concurrency is not None and len(workload.heldout) < 2 * concurrency:
        return [
            f"confirmed on {len(workload.heldout)} held-out requests, fewer than two for "
            f"each of the {concurrency} in flight: a lighter load than the search's"
        ]
    return []


class _Field:
    """All that were measured, beside each other."""

    def __init__(
        self,
        goal: Goal,
        baseline: Candidate | None,
        everyone: Sequence[Candidate],
        rounds: int,
        *,
        is_confirmed: bool,
    ) -> None:
        self.goal = goal
        self.baseline = baseline
        self.values = {c.number: rounds_of(goal, c.measurement) for c in everyone}
        if not is_confirmed:
            self.values = {n: (_mean(own),) for n, own in self.values.items()}
        self._most = max(rounds, *map(len, self.values.values()))
        self.findings: Mapping[int, Finding] = {}
        if baseline is not None and baseline.number in self.values:
            self.findings = at_last(self.values, baseline.number, self._most)

    def best(self, among: Sequence[Candidate]) -> Candidate:
        """The one with the highest objective, beside the baseline where all were beside it."""
        if all(c.number in self.findings for c in among):
            return max(among, key=lambda c: self.findings[c.number].gain)
        return max(among, key=lambda c: fmean(one.value for one in self.values[c.number]))

    def first_place(self, among: Sequence[Candidate]) -> list[Candidate]:
        """The best one and those that cannot be told from it."""
        best = self.best(among)
        return [c for c in among if c is best or not self._is_above(best, c)]

    def _is_above(self, first: Candidate, second: Candidate) -> bool:
        found = contrast_of(self.values, first.number, second.number)
        return found is not None and found[0].bounds(ALPHA)[0] > 0

    def gain(self, chosen: Candidate) -> Interval | None:
        """How many times the baseline's objective it has; `None` where that is no ratio."""
        if (found := self.findings.get(chosen.number)) is None:
            return self._single_gain(chosen)
        if (ratio := found.ratio) is None:
            return None
        method = (
            "geometric mean of the ratios of each round, t interval on logarithms"
            if found.is_ratio
            else "ratio of the means, as few requests were good in some rounds, interval by "
            "Fieller's theorem"
        )
        return Interval(
            estimate=ratio.estimate,
            low=ratio.low,
            high=ratio.high,
            unit="ratio",
            confidence=1 - 2 * found.level,
            repeats=found.rounds,
            method=f"{method} with the noise of all rounds, for {len(self.findings)} finalists and "
            f"{len(looks(self._most))} looks together",
        )

    def _single_gain(self, chosen: Candidate) -> Interval | None:
        """From one measurement each there is a ratio, and no bounds of it."""
        stock = self.baseline and self.values.get(self.baseline.number)
        ours = self.values[chosen.number][0].value
        if not stock or chosen is self.baseline or min(ours, stock[0].value) <= 0:
            return None
        return Interval(
            estimate=ours / stock[0].value,
            low=None,
            high=None,
            unit="ratio",
            repeats=1,
            method="ratio of one measurement each",
        )


def _mean(values: Sequence[Value]) -> Value:
    """All repeats on one server as one value."""
    return Value(fmean(one.value for one in values))


_Choice = tuple[Outcome, list[Candidate], tuple[str, ...]]
"""The outcome, the candidates that share the first place, and why."""


def _choose(field: _Field, feasible: Sequence[Candidate]) -> _Choice:
    objective, baseline = field.goal.objective, field.baseline
    others = [c for c in feasible if c is not baseline]
    if not others:
        reason = "the stock defaults meet the goal, and nothing else that does was confirmed"
        return Outcome.KEEP_BASELINE, list(feasible), (reason,)
    best = field.best(feasible)
    if len(field.values[best.number]) < 2:
        reason = "the best so far: measured on one server, so it cannot be told from chance"
        return Outcome.NO_CLEAR_WINNER, [best], (reason,)
    if baseline is None or baseline.number not in field.values:
        return _without_baseline(field, feasible)
    told = {c.number: field.findings[c.number] for c in others if c.number in field.findings}
    better = [c for c in others if c.number in told and told[c.number].is_above]
    if better:
        reason = f"{objective} is above the stock defaults' beyond noise"
        return Outcome.WINNER, field.first_place(better), (reason,)
    if baseline not in feasible:
        reason = (
            "meets the goals where the stock defaults do not, but its "
            f"{objective} is not above theirs beyond noise: measure more rounds"
        )
        return Outcome.NO_CLEAR_WINNER, field.first_place(others), (reason,)
    unclear = [c for c in others if c.number not in told or not told[c.number].is_below]
    if unclear:
        reason = "the best settings cannot be told from the stock defaults at this noise"
        most_gain = max(
            (told[c.number].most_gain for c in unclear if c.number in told), default=math.inf
        )
        return Outcome.NO_CLEAR_WINNER, [baseline, *unclear], (reason, *_excluded(most_gain))
    reason = "nothing that meets the goal beats the stock defaults"
    return Outcome.KEEP_BASELINE, [baseline], (reason,)


def _without_baseline(field: _Field, feasible: Sequence[Candidate]) -> _Choice:
    failure = None if field.baseline is None else field.baseline.measurement.failure
    ties = field.first_place(feasible)
    if failure is not None and failure.failure in CANNOT_START:
        reason = f"meets every goal, and the stock defaults cannot start: {failure.message}"
        return Outcome.WINNER, ties, (reason,)
    why = "were not measured" if failure is None else f"failed ({failure.failure})"
    reason = f"meets every goal, but the stock defaults {why}: there is nothing to compare with"
    return Outcome.NO_CLEAR_WINNER, ties, (reason,)


def _excluded(most_gain: float) -> tuple[str, ...]:
    """Which gain would have been seen."""
    if math.isinf(most_gain):
        return ()
    if most_gain < MATTERS:
        return (f"a gain above {MATTERS:.0%} is excluded",)
    return (f"a gain of up to {most_gain:.0%} is not excluded",)


def _why_not(baseline: Candidate | None) -> tuple[str, ...]:
    """Why there are no stock defaults to go by, and what to do about it."""
    failure = None if baseline is None else baseline.measurement.failure
    if failure is None:
        return ()
    said = f"the stock defaults: {failure.failure}: {failure.message}"
    return (said, f"fix: {failure.fix}") if failure.fix else (said,)


def _infeasible(
    goal: Goal, measured: Sequence[Candidate], bound_by: Callable[[int], str]
) -> _Choice:
    """The measured point that is closest to the goal, what it misses, and what limits it."""
    closest = min(measured, key=lambda c: missed_by(goal, c.measurement))
    means = mean_metrics(closest.measurement)
    misses = [
        f"{slo_text(slo)} is missed: measured {duration(means[slo_key(slo)])}"
        if slo_key(slo) in means
        else f"{slo_text(slo)} could not be measured"
        for slo in goal.slos
        if not means.get(slo_key(slo), math.inf) <= slo.limit_s
    ]
    found = goal_violations(goal, means).items()
    excesses = {text: math.inf if by is None else by for text, by in found}
    worst, by = max(excesses.items(), key=lambda excess: excess[1])
    limit = f"what limits it is {worst}"
    if by <= 2:
        limit += f", which it exceeds by {by:.0%}"
    elif by < math.inf:
        limit += f": it takes {1 + by:.3g} times as long"
    if said := bound_by(closest.number):
        limit += f"; its run: {said}"
    reasons = ("no measured trial meets every goal; this is the closest one", *misses, limit)
    return Outcome.INFEASIBLE, [closest], reasons


def _tie_reason(ties: Sequence[Candidate]) -> tuple[str, ...]:
    if len(ties) < 2:
        return ()
    numbers = ", ".join(str(c.number) for c in sorted(ties, key=lambda c: c.number))
    return (
        f"trials {numbers} cannot be told apart; the least harmful, then simplest is recommended",
    )


def _harm_and_cost(candidate: Candidate) -> tuple[int, tuple[int, int], int]:
    harm = list(Harm).index(candidate.stack.harm)
    return harm, candidate.stack.cost, candidate.number
