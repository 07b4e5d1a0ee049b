"""From confirmed measurements to a decision. Pure: values in, a value out.

A finalist is better than the baseline only when the interval of their ratio, from rounds that are
measured interleaved on held-out requests, lies above 1 at 95%. Of those that are better, the ones
that cannot be told from the best share the first place, and the least harmful, then the simplest
of them is recommended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtune.profilers.goal import goal_met, slo_key, slo_text
from kvtune.profilers.metrics.base import metric_of
from kvtune.profilers.statistics import mean_interval, paired_ratio_interval, separated
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


def figures_of(goal: Goal, measurement: Measurement) -> dict[str, Interval]:
    """The figures that are shown and emitted, with t intervals over the repeats."""
    names = dict.fromkeys([*REPORTED, *map(slo_key, goal.slos)])
    figures = {}
    for name in names:
        values = measurement.metrics.get(name)
        if not values:
            continue
        estimate, low, high = mean_interval(values)
        figures[name] = Interval(
            estimate=estimate,
            low=low,
            high=high,
            unit=metric_of(name).unit,
            repeats=len(values),
            method="mean and t interval over repeats",
        )
    return figures


def decide(
    goal: Goal,
    baseline: Candidate | None,
    finalists: Sequence[Candidate],
    rejected: Mapping[int, str],
) -> Decision:
    """Choose among finalists; `rejected` are the other trials with their reasons.

    A value of one candidate and the value of another at the same place are a pair: they were
    measured in the same round. With a single value each nothing can be proved, and the best so far
    is named as no more than that.
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
    feasible = [c for c in everyone if meets_goal(goal, c.measurement)]
    if not feasible:
        return _infeasible(goal, baseline, everyone, rejected)
    outcome, ties, reason = _choose(goal, baseline, feasible)
    chosen = min(ties, key=_harm_and_size)
    reasons = (reason, *_tie_reason(ties))
    return _decision(goal, outcome, chosen, baseline, ties, reasons, rejected)


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


def _choose(
    goal: Goal, baseline: Candidate | None, feasible: Sequence[Candidate]
) -> tuple[Outcome, list[Candidate], str]:
    """The outcome, the candidates that share the first place, and why."""
    best = max(feasible, key=lambda c: _mean(objective_values(goal, c.measurement)))
    if len(objective_values(goal, best.measurement)) < 2:
        reason = "the best so far: measured once, so it cannot be told from chance"
        return Outcome.NO_CLEAR_WINNER, [best], reason
    if baseline is None or not objective_values(goal, baseline.measurement):
        return _without_baseline(goal, baseline, feasible, best)
    better = [c for c in feasible if c is not baseline and _is_above(goal, c, baseline)]
    if better:
        best = max(better, key=lambda c: _mean(objective_values(goal, c.measurement)))
        reason = f"{goal.objective} is above the stock defaults' beyond noise"
        return Outcome.WINNER, _first_place(goal, best, better), reason
    if baseline not in feasible:
        reason = (
            "meets the goals where the stock defaults do not, but its "
            f"{goal.objective} is not above theirs beyond noise: measure more rounds"
        )
        return Outcome.NO_CLEAR_WINNER, _first_place(goal, best, feasible), reason
    others = [c for c in feasible if c is not baseline]
    unclear = [c for c in others if not _is_above(goal, baseline, c)]
    if unclear:
        reason = "the best settings cannot be told from the stock defaults at this noise"
        return Outcome.NO_CLEAR_WINNER, [baseline, *unclear], reason
    reason = (
        "nothing that meets the goal beats the stock defaults"
        if others
        else "the stock defaults meet the goal, and nothing else that does was confirmed"
    )
    return Outcome.KEEP_BASELINE, [baseline], reason


def _without_baseline(
    goal: Goal, baseline: Candidate | None, feasible: Sequence[Candidate], best: Candidate
) -> tuple[Outcome, list[Candidate], str]:
    failure = None if baseline is None else baseline.measurement.failure
    ties = _first_place(goal, best, feasible)
    if failure is not None and failure.failure in CANNOT_START:
        reason = f"meets every goal, and the stock defaults cannot start: {failure.message}"
        return Outcome.WINNER, ties, reason
    why = "were not measured" if failure is None else f"failed ({failure.failure})"
    reason = f"meets every goal, but the stock defaults {why}: there is nothing to compare with"
    return Outcome.NO_CLEAR_WINNER, ties, reason


def _first_place(goal: Goal, best: Candidate, among: Sequence[Candidate]) -> list[Candidate]:
    return [c for c in among if c is best or not _is_above(goal, best, c)]


def _why_not(baseline: Candidate | None) -> tuple[str, ...]:
    """Why there are no stock defaults to go by, and what to do about it."""
    failure = None if baseline is None else baseline.measurement.failure
    if failure is None:
        return ()
    said = f"the stock defaults: {failure.failure}: {failure.message}"
    return (said, f"fix: {failure.fix}") if failure.fix else (said,)


def _infeasible(
    goal: Goal,
    baseline: Candidate | None,
    measured: Sequence[Candidate],
    rejected: Mapping[int, str],
) -> Decision:
    def excess(candidate: Candidate) -> float:
        means = mean_metrics(candidate.measurement)
        return sum(max(0.0, means.get(slo_key(s), float("inf")) / s.limit_s - 1) for s in goal.slos)

    closest = min(measured, key=excess)
    means = mean_metrics(closest.measurement)
    misses = [
        f"{slo_text(slo)} is missed: measured {means[slo_key(slo)]:.3g} s"
        if slo_key(slo) in means
        else f"{slo_text(slo)} could not be measured"
        for slo in goal.slos
        if not means.get(slo_key(slo), float("inf")) <= slo.limit_s
    ]
    reasons = ("no measured trial meets every goal; this is the closest one", *misses)
    return _decision(goal, Outcome.INFEASIBLE, closest, baseline, [closest], reasons, rejected)


def _decision(
    goal: Goal,
    outcome: Outcome,
    chosen: Candidate,
    baseline: Candidate | None,
    ties: Sequence[Candidate],
    reasons: tuple[str, ...],
    rejected: Mapping[int, str],
) -> Decision:
    gain = None
    if baseline is not None and chosen.number != baseline.number:
        gain = _gain(goal, chosen, baseline)
    return Decision(
        outcome=outcome,
        recommended=chosen.number,
        baseline=None if baseline is None else baseline.number,
        ties=tuple(sorted(c.number for c in ties if c is not chosen)),
        figures=figures_of(goal, chosen.measurement),
        baseline_figures={} if baseline is None else figures_of(goal, baseline.measurement),
        gain_ratio=gain,
        reasons=reasons,
        rejected=dict(rejected),
    )


def _tie_reason(ties: Sequence[Candidate]) -> tuple[str, ...]:
    if len(ties) < 2:
        return ()
    numbers = ", ".join(str(c.number) for c in sorted(ties, key=lambda c: c.number))
    return (
        f"trials {numbers} cannot be told apart; the least harmful, then simplest is recommended",
    )


def _gain(goal: Goal, chosen: Candidate, baseline: Candidate) -> Interval | None:
    pairs = _pairs(goal, chosen, baseline)
    ratio = paired_ratio_interval(pairs)
    if ratio is None:
        return None
    return Interval(
        estimate=ratio.estimate,
        low=ratio.low,
        high=ratio.high,
        unit="ratio",
        repeats=len(pairs),
        method="geometric mean of the ratios of each round, t interval on logarithms",
    )


def _is_above(goal: Goal, first: Candidate, second: Candidate) -> bool:
    """Whether the first one's objective is higher beyond noise, by the interval that is shown.

    Where a ratio does not exist (a goodput of 0), Welch's interval of the difference decides.
    """
    pairs = _pairs(goal, first, second)
    ratio = paired_ratio_interval(pairs)
    if ratio is not None:
        return ratio.low is not None and ratio.low > 1
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    return separated(ours, theirs) and _mean(ours) > _mean(theirs)


def _pairs(goal: Goal, first: Candidate, second: Candidate) -> list[tuple[float, float]]:
    return list(
        zip(
            objective_values(goal, first.measurement),
            objective_values(goal, second.measurement),
            strict=False,
        )
    )


def _harm_and_size(candidate: Candidate) -> tuple[int, int, int]:
    harm = list(Harm).index(candidate.stack.harm)
    return harm, len(candidate.stack.arguments), candidate.number


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
