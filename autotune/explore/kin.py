"""Earlier studies of an alike workload, and the points of theirs that a search starts from.

Kin are studies of the same model, engine and device whose workload, pool and limits are alike. What
was best there is measured early here; nothing of theirs is believed without being measured again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from pydantic import JsonValue

from kvtune.autotune.decide import meets_goal, objective_values
from kvtune.autotune.explore.base import Observation
from kvtune.autotune.gates import Gates
from kvtune.autotune.ledger import Entry
from kvtune.autotune.space import SearchSpace, infeasible_reason, stack_from
from kvtune.autotune.standing import ranked
from kvtune.autotune.twins import pooled
from kvtune.policies.base import Context
from kvtune.policies.stack import describe
from kvtune.profilers.goal import slo_key
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow, TrialRow
from kvtune.types import (
    Goal,
    Harm,
    Histogram,
    Measurement,
    PolicyStack,
    Trial,
    WorkloadFingerprint,
)

ALIKE = 0.6
"""Studies less alike have nothing to say: of this much is one whose load alone is 1.7 times."""

MOST = 3
"""Points that a search starts from at most."""

NEWEST = 20
"""Studies that are looked at, of those that are alike."""

UNKNOWN_DISTANCE = 0.3
"""Distance of what is known of one of two studies only."""


@dataclass(frozen=True, slots=True)
class Kin:
    """An earlier study, `alike` by 0.6 to 1 (the same).

    `front` are its best feasible trials, the best first. `failed` says what did not run there.
    """

    study: StudyRow
    alike: float
    front: tuple[Trial, ...]
    failed: tuple[Observation, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """A point to measure early: trial `number` of a kin, in the space of this search."""

    kin: Kin
    number: int
    values: dict[str, JsonValue]
    stack: PolicyStack


def kin_of(study: StudyRow, store: Store) -> list[Kin]:
    """The kin of a study whose stock defaults are measured, the most alike first."""
    pool = _pool_tokens(store.trials(study))
    beside = [(distance(study, other), other) for other in store.studies_beside(study)]
    near = [(away, other) for away, other in beside if math.exp(-away) >= ALIKE]
    found = []
    for away, other in near[:NEWEST]:
        rows = store.trials(other)
        alike = math.exp(-away - _log_apart(pool, _pool_tokens(rows)))
        if alike >= ALIKE:
            found.append(_kin(store, study.goal, other, rows, alike))
    return sorted(found, key=lambda kin: -kin.alike)


def starts(kin: Iterable[Kin], space: SearchSpace, ctx: Context) -> list[Start]:
    """What to measure early in `space`, the best of the most alike first, none of it twice.

    Values that this space does not have become the nearest. What would change answers more than
    the space may, what cannot run here, and the stock defaults are left out.
    """
    knobs = {entry.knob.name for entry in space.knobs}
    found: dict[str, Start] = {}
    for one in kin:
        for trial in one.front:
            values = {**space.defaults}
            for choice in trial.stack.choices:
                values |= {n: value for n, value in choice.parameters.items() if n in knobs}
            stack = stack_from(space, values, ctx)
            # Without what changed answers there, the rest is another point, which nobody measured.
            is_lost = any(
                choice.harm is not Harm.LOSSLESS
                and not choice.arguments.items() <= stack.arguments.items()
                for choice in trial.stack.choices
            )
            if is_lost or not stack.arguments or infeasible_reason(stack, ctx):
                continue
            point = _values_of(space, stack)
            found.setdefault(describe(stack), Start(one, trial.number, point, stack))
    return list(found.values())


def told(found: Sequence[Start]) -> str:
    """The points that a search starts from, and whose they are, in one sentence."""
    parts = []
    for name, group in groupby(found, key=lambda start: start.kin.study.name):
        of_kin = list(group)
        settings = "; ".join(describe(start.stack) for start in of_kin)
        alike = f"workload {100 * of_kin[0].kin.alike:.0f}% alike"
        parts.append(f"the front of study {name} ({alike}): {settings}")
    return f"starts from {', and from '.join(parts)}"


def distance(one: StudyRow, other: StudyRow) -> float:
    """How far apart two studies are without their pools: 0 for the same, infinite for unlike goals.

    The sum of the natural logs of how many times one's lengths (the mean of p50 and p95, of inputs
    and of outputs), load and limits are those of the other, and of the difference of their reuse.
    """
    if one.goal.objective != other.goal.objective:
        return math.inf
    seen, there = one.fingerprint, other.fingerprint
    return (
        _inputs_apart(seen, there)
        + _lengths_apart(seen.output_tokens, there.output_tokens)
        + _reuse_apart(seen, there)
        + _load_apart(one, other)
        + _limits_apart(one.goal, other.goal)
    )


def _kin(store: Store, goal: Goal, other: StudyRow, rows: Sequence[TrialRow], alike: float) -> Kin:
    points = [
        Entry(row.trial, row.measurement, reused=True)
        for row in rows
        if row.trial.parent is None and row.measured and row.measurement is not None
    ]
    failed = tuple(
        Observation(
            entry.trial.stack.arguments,
            {},
            at_s=0.0,
            wall_s=entry.measurement.wall_s or 0.0,
            failure=entry.measurement.failure.failure,
            task=alike,
        )
        for entry in points
        if entry.measurement.failure is not None
    )
    return Kin(other, alike, _front(store, goal, other, points), failed)


def _front(store: Store, goal: Goal, other: StudyRow, points: Sequence[Entry]) -> tuple[Trial, ...]:
    """The best trials that meet `goal` and beat stock: what was recommended, then by objective."""
    decision = store.decision(other)
    if decision is not None and decision.recommended == 0:
        return ()
    stock = next((entry.measurement for entry in points if entry.trial.number == 0), None)
    least = _value(goal, stock) if stock is not None and meets_goal(goal, stock) else -math.inf
    worse = {row.trial for row in store.quality_reports(other) if row.report.outcome == "fail"}
    best = [
        entry.trial
        for entry in ranked(goal, pooled(points), Gates(stock, None))
        if meets_goal(goal, entry.measurement)
        and _value(goal, entry.measurement) > least
        and entry.trial.number not in worse
    ]
    chosen = None if decision is None else decision.recommended
    return tuple(sorted(best, key=lambda trial: trial.number != chosen)[:MOST])


def _value(goal: Goal, found: Measurement) -> float:
    values = objective_values(goal, found)
    return sum(values) / len(values) if values else -math.inf


def _values_of(space: SearchSpace, stack: PolicyStack) -> dict[str, JsonValue]:
    """The point of a space that a stack is, with a value for every knob that matters there."""
    values = space.defaults
    for choice in stack.choices:
        values |= {name: value for name, value in choice.parameters.items() if name in values}
    return {
        entry.knob.name: values[entry.knob.name] for entry in space.knobs if entry.is_active(values)
    }


def _pool_tokens(rows: Sequence[TrialRow]) -> float | None:
    """The size of the pool of a study's stock defaults, if it is known."""
    stock = next((row.measurement for row in rows if row.number == 0), None)
    effective = None if stock is None else stock.effective
    return None if effective is None else effective.kv_cache_size_tokens


def _log_apart(one: float | None, other: float | None) -> float:
    if one is None and other is None:
        return 0.0
    if not one or not other:
        return 0.0 if one == other else UNKNOWN_DISTANCE
    return abs(math.log(one / other))


def _inputs_apart(one: WorkloadFingerprint, other: WorkloadFingerprint) -> float:
    """Of texts only the server knows how long they are: alike for sure are only the same."""
    if one.input_tokens is None and other.input_tokens is None:
        return 0.0 if one.digest == other.digest else UNKNOWN_DISTANCE
    return _lengths_apart(one.input_tokens, other.input_tokens)


def _lengths_apart(one: Histogram | None, other: Histogram | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else UNKNOWN_DISTANCE
    return (_log_apart(one.p50, other.p50) + _log_apart(one.p95, other.p95)) / 2


def _reuse_apart(one: WorkloadFingerprint, other: WorkloadFingerprint) -> float:
    """The mean difference of the shares of reusable tokens, over block sizes."""
    shares, others = one.reusable_prefix_share, other.reusable_prefix_share
    common = sorted(set(shares) & set(others))
    if not common:
        return UNKNOWN_DISTANCE if shares or others else 0.0
    return sum(abs(shares[size] - others[size]) for size in common) / len(common)


def _load_apart(one: StudyRow, other: StudyRow) -> float:
    """How many times as many requests are in flight or arrive; loads of two kinds are unlike."""
    (kind, amount), (other_kind, other_amount) = _load(one), _load(other)
    return _log_apart(amount, other_amount) if kind == other_kind else math.inf


def _load(study: StudyRow) -> tuple[str, float | None]:
    """How requests were sent: by a fixed number in flight, or at so many a second.

    Where the load was raised as far as the goal held, it began with what says nothing of its end.
    """
    load = study.settings.get("load")
    if not isinstance(load, dict):
        load = _load_of_before(str(study.settings.get("arrivals", "")))
    kind = f"{load['kind']}, {study.settings.get('load_at', 'fixed')}"
    if "load_at" in study.settings:
        return kind, None
    if isinstance(in_flight := load.get("concurrency"), int | float):
        return kind, float(in_flight)
    rate, scale = study.fingerprint.request_rate_per_s, load.get("time_scale", 1.0)
    return kind, rate / scale if rate is not None and isinstance(scale, int | float) else None


def _load_of_before(text: str) -> dict[str, JsonValue]:
    """The load of a study that names it only in words, such as "ClosedLoop(concurrency=4)"."""
    numbers = re.findall(r"(\w+)=([\d.e+-]+)", text)
    return {"kind": text.partition("(")[0], **{name: float(value) for name, value in numbers}}


def _limits_apart(one: Goal, other: Goal) -> float:
    limits = {slo_key(slo): slo.limit_s for slo in one.slos}
    others = {slo_key(slo): slo.limit_s for slo in other.slos}
    return sum(_log_apart(limits.get(name), others.get(name)) for name in {*limits, *others})
