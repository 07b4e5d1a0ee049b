"""From confirmed measurements to a decision. Pure: values in, a value out.

A finalist is better than the baseline only when their repeats, taken interleaved on held-out
requests, are separated at 95% (Welch). Finalists that cannot be told from the best one tie with
it, and the least harmful, then the simplest of them is recommended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtune.profilers.goal import goal_met, slo_key, slo_text
from kvtune.profilers.metrics.base import metric_of
from kvtune.profilers.statistics import mean_interval, paired_ratio_interval, separated
from kvtune.types import Decision, Goal, Harm, Interval, Measurement, Outcome, PolicyStack, Status

OBJECTIVE_METRIC: Mapping[str, str] = {
    "goodput": "goodput_requests_per_s",
    "throughput": "output_tokens_per_s",
}
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
    return measurement.metrics.get(OBJECTIVE_METRIC[goal.objective], ())


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
    """Choose among confirmed finalists; `rejected` are the other trials with their reasons."""
    measured = [c for c in finalists if objective_values(goal, c.measurement)]
    everyone = [*measured, *([baseline] if baseline is not None else [])]
    everyone = [c for c in everyone if objective_values(goal, c.measurement)]
    if not everyone:
        return Decision(
            outcome=Outcome.NOTHING_MEASURED,
            recommended=None,
            baseline=None if baseline is None else baseline.number,
            reasons=("no trial produced a measurement",),
            rejected=dict(rejected),
        )
    feasible = [c for c in everyone if meets_goal(goal, c.measurement)]
    if not feasible:
        return _infeasible(goal, baseline, everyone, rejected)
    best = max(feasible, key=lambda c: _mean(objective_values(goal, c.measurement)))
    ties = [c for c in feasible if c is best or not _differ(goal, c, best)]
    chosen = min(ties, key=_harm_and_size)
    outcome, reason = _compare(goal, chosen, baseline, feasible)
    return _decision(goal, outcome, chosen, baseline, ties, (reason, *_tie_reason(ties)), rejected)


def _compare(
    goal: Goal, chosen: Candidate, baseline: Candidate | None, feasible: Sequence[Candidate]
) -> tuple[Outcome, str]:
    if baseline is None or not objective_values(goal, baseline.measurement):
        return Outcome.WINNER, "meets every goal; the stock defaults could not be measured"
    if chosen.number == baseline.number:
        if len(feasible) == 1 or all(_differ(goal, c, chosen) for c in feasible if c is not chosen):
            return Outcome.KEEP_BASELINE, "nothing that meets the goal beats the stock defaults"
        return (
            Outcome.NO_CLEAR_WINNER,
            "the best settings cannot be told from the stock defaults at this noise",
        )
    ours = objective_values(goal, chosen.measurement)
    theirs = objective_values(goal, baseline.measurement)
    if separated(ours, theirs) and _mean(ours) > _mean(theirs):
        return Outcome.WINNER, f"{goal.objective} is above the stock defaults' beyond noise"
    if not meets_goal(goal, baseline.measurement):
        return (
            Outcome.NO_CLEAR_WINNER,
            f"meets the goals where the stock defaults do not, but {goal.objective} is not "
            "separated from theirs: measure more repeats",
        )
    return (
        Outcome.NO_CLEAR_WINNER,
        f"{goal.objective} is not separated from the stock defaults': measure more repeats",
    )


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
        pairs = list(
            zip(
                objective_values(goal, chosen.measurement),
                objective_values(goal, baseline.measurement),
                strict=False,
            )
        )
        ratio = paired_ratio_interval(pairs)
        if ratio is not None:
            gain = Interval(
                estimate=ratio.estimate,
                low=ratio.low,
                high=ratio.high,
                unit="ratio",
                repeats=len(pairs),
                method="geometric mean of interleaved pairs, t interval on logarithms",
            )
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


def _differ(goal: Goal, first: Candidate, second: Candidate) -> bool:
    return separated(
        objective_values(goal, first.measurement), objective_values(goal, second.measurement)
    )


def _harm_and_size(candidate: Candidate) -> tuple[int, int, int]:
    harm = list(Harm).index(candidate.stack.harm)
    return harm, len(candidate.stack.arguments), candidate.number


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
