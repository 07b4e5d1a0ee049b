"""What follows from the measurements of a study. Pure: a view in, values out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import JsonValue

from kvtune.autotune import objectives
from kvtune.autotune.decide import mean_metrics, objective_values
from kvtune.autotune.report.study_view import Point, Standing, StudyView, seconds_of
from kvtune.profilers.goal import slo_key, slo_text
from kvtune.profilers.statistics import mean_interval, paired_ratio_interval
from kvtune.types import Harm, Interval

MIB = 1 << 20

LEAST_TRIALS = 8
"""With fewer measured trials nothing is said of what a setting is worth by itself."""

SAME_MEMORY = 0.01
"""Pools whose sizes differ by less than this share are the same: the rest is rounding to blocks."""


# --- convergence ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """A point in the order of the search.

    `spent_s` are the seconds in which servers were started, loaded and stopped until it ended;
    pauses between are not in it. `best` is the best objective so far of those that may be shipped.
    """

    number: int
    spent_s: float
    standing: Standing
    value: float | None
    best: float | None


def progress(view: StudyView) -> list[Progress]:
    """How the best so far grew, trial by trial."""
    found: list[Progress] = []
    spent_s, best = 0.0, None
    for point in view.points:
        spent_s += sum(seconds_of(attempt) for attempt in point.row.attempts)
        if point.standing is Standing.MET and point.value is not None:
            best = point.value if best is None else max(best, point.value)
        found.append(Progress(point.number, spent_s, point.standing, point.value, best))
    return found


# --- the confirmation -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A finalist's rounds: round number to objective, their mean, and the ratio to stock.

    `ratio` is the one that was decided by, where it is known, else that of the rounds which both
    have, measured right after each other.
    """

    trial: int
    rounds: dict[int, float]
    mean: Interval
    ratio: Interval | None


def confirmations(view: StudyView) -> list[Confirmed]:
    """What the confirmation says of each that was in it, stock first."""
    by_trial: dict[int, dict[int, float]] = {}
    for each in view.rounds:
        if each.measurement is None:
            continue
        values = objective_values(view.study.goal, each.measurement)
        if values and all(map(math.isfinite, values)):
            by_trial.setdefault(each.trial, {})[each.number] = fmean(values)
    stock = by_trial.get(0, {})
    decided = {}
    if view.decision is not None and view.decision.gain_ratio is not None:
        decided[view.decision.recommended] = view.decision.gain_ratio
    return [
        Confirmed(
            trial,
            rounds,
            _mean(list(rounds.values()), view.unit),
            (decided.get(trial) or _ratio(rounds, stock)) if trial else None,
        )
        for trial, rounds in sorted(by_trial.items())
    ]


def _mean(values: Sequence[float], unit: str) -> Interval:
    estimate, low, high = mean_interval(values)
    return Interval(
        estimate=estimate,
        low=low,
        high=high,
        unit=unit,
        repeats=len(values),
        method="mean and t interval over rounds",
    )


def _ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    pairs = [(ours[number], theirs[number]) for number in sorted(ours.keys() & theirs.keys())]
    found = paired_ratio_interval(pairs)
    if found is None:
        return None
    return Interval(
        estimate=found.estimate,
        low=found.low,
        high=found.high,
        unit="ratio",
        repeats=len(pairs),
        method="geometric mean of the ratios of each round, t interval on logarithms",
    )


# --- settings and what they are worth ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Knob:
    """An engine argument that was searched, with its value in each measured trial, by number.

    Where a trial does not set it, the value is the one that the stock server reported, else
    "default". Numbers that are equal read the same.
    """

    name: str
    values: dict[int, str]

    @property
    def levels(self) -> list[str]:
        """The different values: numbers by size, then words."""
        return sorted(set(self.values.values()), key=_size_and_word)


@dataclass(frozen=True, slots=True)
class Share:
    """How much of the variance of the objective one setting explains by itself, from 0 to 1."""

    name: str
    levels: int
    share: float


def knobs(view: StudyView) -> list[Knob]:
    """The arguments that measured trials set differently."""
    measured = view.measured
    names = dict.fromkeys(name for point in measured for name in point.row.trial.stack.arguments)
    found = [
        Knob(
            name,
            {point.number: value_text(_value(view, point, name), name) for point in measured},
        )
        for name in names
    ]
    return [knob for knob in found if len(knob.levels) > 1]


def importance(view: StudyView) -> list[Share]:
    """Main effects by a variance decomposition, one setting at a time; the largest first.

    The share is epsilon squared of a one-way analysis of variance (T. L. Kelley, 1935): the sum of
    squares between the values of a setting, less what that many groups of pure noise would have,
    over the total. Settings that were changed together share what they did, and what they only do
    together is nobody's, so shares need not add up to 1. Empty below `LEAST_TRIALS`; a setting has
    a share once two of its values were measured at least twice.
    """
    measured = {point.number: point.value for point in view.measured if point.value is not None}
    if len(measured) < LEAST_TRIALS:
        return []
    shares = []
    for knob in knobs(view):
        groups: dict[str, list[float]] = {}
        for number, value in measured.items():
            groups.setdefault(knob.values[number], []).append(value)
        often = sum(len(group) > 1 for group in groups.values())
        if often > 1 and (share := _epsilon_squared(list(groups.values()))) is not None:
            shares.append(Share(knob.name, len(groups), share))
    return sorted(shares, key=lambda each: -each.share)


def _epsilon_squared(groups: Sequence[Sequence[float]]) -> float | None:
    """The share; None where all values are the same. Some group has more than one value."""
    everything = [value for group in groups for value in group]
    total = _squares(everything)
    if total == 0:
        return None
    within = sum(_squares(group) for group in groups)
    freedom = len(everything) - len(groups)
    between = total - within
    return max(0.0, (between - (len(groups) - 1) * within / freedom) / total)


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _value(view: StudyView, point: Point, name: str) -> JsonValue:
    arguments = point.row.trial.arguments
    if name in arguments:
        return arguments[name]
    stock = view.stock
    found = None if stock is None else stock.row.measurement
    if found is None or found.effective is None:
        return None
    field = name.replace("-", "_")
    for key in (field, f"{field}_tokens", f"{field}_ratio"):
        value: JsonValue = getattr(found.effective, key, None)
        if value is not None:
            return value
    return None


def value_text(value: JsonValue, name: str = "") -> str:
    """The value of the setting of this name as a reader meets it."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:g}"
    if isinstance(value, int) and name.endswith("-bytes") and value % MIB == 0:
        return f"{value // MIB} MiB"
    return str(value)


def _size_and_word(text: str) -> tuple[bool, float, str]:
    try:
        return False, float(text.removesuffix(" MiB")), text
    except ValueError:
        return True, 0.0, text


# --- trade-offs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spot:
    """A trial between its objective and what it costs; `on_front` when nothing is better in both.

    `cost` is in bytes of KV memory, or in the unit of the quality metric. What may not be shipped
    is on no front, and beats nothing.
    """

    number: int
    value: float
    cost: float
    on_front: bool


def memory_front(view: StudyView) -> list[Spot]:
    """Objective against the memory of the KV pool; empty where all pools are of one size."""
    known = [
        (point, float(size)) for point in view.measured if (size := _pool_bytes(point)) is not None
    ]
    sizes = [size for _, size in known]
    if len(known) < 2 or max(sizes) - min(sizes) <= SAME_MEMORY * max(sizes):
        return []
    return _front(known)


def quality_front(view: StudyView) -> list[Spot]:
    """Objective against the mean KL divergence of answers from those of stock settings.

    Lossless settings stand at 0, which is their definition and no measurement. Empty until a trial
    that may change answers has one.
    """
    known = []
    for point in view.measured:
        if point.harm is Harm.LOSSLESS:
            known.append((point, 0.0))
        elif (found := divergence(view, point.number)) is not None:
            known.append((point, found.estimate))
    return _front(known) if any(point.harm is not Harm.LOSSLESS for point, _ in known) else []


def divergence(view: StudyView, number: int) -> Interval | None:
    """The mean KL divergence of a trial's answers over all of the fidelity suite, if measured."""
    row = view.report_of(number)
    found = None if row is None else objectives.divergence(row.report)
    return None if found is None else found.change


def _pool_bytes(point: Point) -> int | None:
    found, trial = point.row.measurement, point.row.trial
    return None if found is None else objectives.pool_bytes(found, trial.arguments)


def _front(known: Sequence[tuple[Point, float]]) -> list[Spot]:
    allowed = [
        (point.value or 0.0, cost) for point, cost in known if point.standing is not Standing.OUT
    ]

    def is_beaten(value: float, cost: float) -> bool:
        return any(
            other >= value and price <= cost and (other > value or price < cost)
            for other, price in allowed
        )

    return [
        Spot(
            point.number,
            value := point.value or 0.0,
            cost,
            on_front=point.standing is not Standing.OUT and not is_beaten(value, cost),
        )
        for point, cost in known
    ]


# --- limits -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Margin:
    """How near a trial came to a limit: `used` is the share of the limit, above 1 is a miss."""

    number: int
    limit: str
    value_s: float
    used: float


def margins(view: StudyView) -> list[Margin]:
    """Each measured trial beside each limit of the goal."""
    found = []
    for point in view.measured:
        means = {} if point.row.measurement is None else mean_metrics(point.row.measurement)
        for slo in view.study.goal.slos:
            value = means.get(slo_key(slo))
            if value is not None and math.isfinite(value):
                found.append(Margin(point.number, slo_text(slo), value, value / slo.limit_s))
    return found
