"""What is wanted of a configuration beside the goal's own objective, as it was measured."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

from pydantic import JsonValue

from kvtune.autotune.decide import meets_goal, objective_values
from kvtune.autotune.explore.front import (
    Figure,
    beaten,
    ends,
    knee,
    no_better_than,
)
from kvtune.autotune.forecast.noise import BETWEEN_SERVERS
from kvtune.autotune.gates import Gates
from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import Also
from kvtune.autotune.quality.trials import TrialQuality
from kvtune.autotune.space import SearchSpace
from kvtune.autotune.standing import rejected
from kvtune.policies.base import policies
from kvtune.policies.kv_memory import SHARE, SIZED_BY
from kvtune.policies.plugin_arguments import asked_by
from kvtune.policies.unscored import why_unscored
from kvtune.profilers.metrics.base import metric_of
from kvtune.profilers.quality import traffic
from kvtune.profilers.statistics import t_quantile
from kvtune.types import (
    Front,
    FrontPoint,
    Goal,
    Harm,
    Interval,
    Measurement,
    QualityFigure,
    QualityReport,
    Status,
    Trial,
)

ASSUMED_RATIO, LEAST_FREEDOM = 0.05, 3
"""Standard deviation of one measurement, as a share of it, and the degrees of freedom from which on
what was measured more than once says it better."""

SURE = 0.95
SAME_MEMORY = 0.01
"""Pools that differ by less than this share differ by what a start happened to find free."""

BY_BLOCKS = ("block-size", "kv-cache-dtype")
"""Arguments that size the pool where the number of its blocks is fixed."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far one measurement of the goal's objective is from the next, as a share of it.

    `freedom`: how many degrees of freedom it was estimated with; None: it is assumed.
    """

    ratio: float
    freedom: int | None = None

    def interval(self, values: Sequence[float], unit: str) -> Interval:
        """The mean of measurements of one configuration, with what noise leaves open."""
        level = 0.5 + SURE / 2
        sure = (
            NormalDist().inv_cdf(level) if self.freedom is None else t_quantile(level, self.freedom)
        )
        factor = math.exp(sure * self.ratio / math.sqrt(len(values)))
        mean = fmean(values)
        how = "assumed" if self.freedom is None else "of all that was measured more than once"
        return Interval(
            estimate=mean,
            low=mean / factor,
            high=mean * factor,
            unit=unit,
            confidence=SURE,
            repeats=len(values),
            method=f"mean, with a noise of {self.ratio:.1%} a measurement, {how}",
        )


def noise_of(goal: Goal, measurements: Iterable[Measurement]) -> Noise:
    """The noise of the objective, from all configurations that were measured more than once."""
    squares, freedom = 0.0, 0
    for values in (objective_values(goal, one) for one in measurements):
        if len(values) > 1 and min(values) > 0:
            squares += variance([math.log(value) for value in values]) * (len(values) - 1)
            freedom += len(values) - 1
    if freedom < LEAST_FREEDOM:
        return Noise(ASSUMED_RATIO)
    return Noise(math.sqrt(squares / freedom), freedom)


@dataclass(frozen=True, slots=True)
class Objectives:
    """The goal's own objective, and those of which less is better: nothing else than `also`."""

    goal: Goal
    also: tuple[Also, ...] = ()
    quality: TrialQuality | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of all objectives, the goal's own first."""
        return (self.goal.objective, *self.also)

    def costs(self, entry: Entry, floor: Interval | None = None) -> dict[str, Interval]:
        """What a measured trial has of each further objective, as far as it is known.

        `floor` is how far the stock answers are from themselves.
        """
        if entry.measurement.status is not Status.OK:
            return {}
        known = {
            one: self._kl(entry, floor) if one is Also.QUALITY else _memory(entry)
            for one in self.also
        }
        return {name: cost for name, cost in known.items() if cost is not None}

    def front(
        self, points: Sequence[Entry], gates: Gates, confirmed: Mapping[int, Measurement]
    ) -> Front:
        """Who of the measured trials no other one beats.

        Only those count that meet the goal and that nothing is known against. They are compared as
        the search measured them, all on the same requests; what was `confirmed`, by number, on
        other ones is compared once more among itself.
        """
        noise = noise_of(self.goal, [*(e.measurement for e in points), *confirmed.values()])
        # Rounds measured in turns do not show by how much trials far apart in time differ.
        apart = max(noise, Noise(BETWEEN_SERVERS), key=lambda one: one.ratio)
        able = self._able(points, gates, confirmed)
        floor = self._floor(points)
        figures = {
            entry.trial.number: {
                self.goal.objective: self._gained(entry.measurement, apart),
                **self.costs(entry, floor),
            }
            for entry in able
        }
        placed = {n: own for n, own in figures.items() if len(own) == len(self.names)}
        out = beaten(self._compared(placed))
        again = {n: self._gained(confirmed[n], noise) for n in placed if n in confirmed}
        anew = {n: {**placed[n], self.goal.objective: again[n]} for n in again if n not in out}
        out |= beaten(self._compared(anew))
        members = self._compared({n: own for n, own in placed.items() if n not in out})
        worse = no_better_than(members)
        doubts = {e.trial.number: gates.unproved(e) or "" for e in able}
        told = [
            FrontPoint(
                trial=number,
                figures=placed[number],
                confirmed=again.get(number),
                no_better_than=worse[number],
                doubt=doubts[number],
            )
            for number in sorted(members, key=lambda n: (-members[n][0].value, n))
        ]
        return Front(
            objectives=self.names,
            points=tuple(told),
            ends=dict(zip(self.names, ends(members), strict=False)),
            knee=knee(members),
            beaten=out,
            unplaced={
                entry.trial.number: _why_unplaced(entry.trial, missing)
                for entry in able
                if (missing := set(self.names) - set(figures[entry.trial.number]))
            },
            reasons=self._reasons(apart, floor, is_empty=not members),
        )

    def outstanding(self, points: Sequence[Entry], gates: Gates) -> list[int]:
        """The trials at the ends of the front, in the order of objectives, and at its knee."""
        if not self.also:
            return []
        found = self.front(points, gates, {})
        middle = [] if found.knee is None else [found.knee]
        return list(dict.fromkeys([*found.ends.values(), *middle]))

    # --- the parts ---

    def _able(
        self, points: Sequence[Entry], gates: Gates, confirmed: Mapping[int, Measurement]
    ) -> list[Entry]:
        out = rejected(points, gates)
        for number, found in confirmed.items():
            if not meets_goal(self.goal, found):
                out[number] = "it missed the goal at the confirmation"
            elif reason := traffic.objection(found, confirmed.get(0)):
                out[number] = reason
        return [
            entry
            for entry in points
            if entry.trial.number not in out and meets_goal(self.goal, entry.measurement)
        ]

    def _gained(self, measurement: Measurement, noise: Noise) -> Interval:
        unit = metric_of(self.goal.objective_metric).unit
        return noise.interval(objective_values(self.goal, measurement), unit)

    def _compared(
        self, points: Mapping[int, Mapping[str, Interval]]
    ) -> dict[int, tuple[Figure, ...]]:
        return {
            number: tuple(
                _figure(own[name]) if name == self.goal.objective else _figure(own[name]).negated()
                for name in self.names
            )
            for number, own in points.items()
        }

    def _kl(self, entry: Entry, floor: Interval | None) -> Interval | None:
        trial = entry.trial
        if trial.stack.harm is Harm.LOSSLESS:
            return Interval(
                estimate=0.0,
                low=0.0,
                high=0.0 if floor is None else max(floor.high or floor.estimate, 0.0),
                unit="nats",
                method="0 by definition: answers are computed as before, up to the noise floor",
            )
        if _unscored(trial):
            return None
        found = self._divergence(trial.number if trial.parent is None else trial.parent)
        return None if found is None else found.change

    def _floor(self, points: Sequence[Entry]) -> Interval | None:
        """How far the stock answers are from themselves, by the report that asked the most."""
        known = [
            found.floor
            for entry in points
            if (found := self._divergence(entry.trial.number)) is not None and found.floor
        ]
        return max(known, key=lambda one: one.repeats, default=None)

    def _divergence(self, number: int) -> QualityFigure | None:
        report = None if self.quality is None else self.quality.report(number)
        return None if report is None else divergence(report)

    def _reasons(self, noise: Noise, floor: Interval | None, *, is_empty: bool) -> tuple[str, ...]:
        how = "assumed" if noise.freedom is None else f"with {noise.freedom} degrees of freedom"
        found = [
            "a trial is beaten by one that has no worse figure in any objective and a better one, "
            f"beyond the {SURE:.0%} intervals of both, in at least one; noise of one measurement "
            f"of {self.goal.objective}: {noise.ratio:.1%}, {how}"
        ]
        if Also.QUALITY in self.also:
            told = "" if floor is None else f": stock differs from itself by {floor.estimate:.2g}"
            found.append(
                "quality is the mean KL divergence of answers from stock ones in nats; lossless "
                f"settings have 0 by definition, which means the noise floor{told}"
            )
        if Also.MEMORY in self.also:
            found.append("memory is that of the KV pool on each device, as the engine reports it")
        if is_empty:
            found.append("no measured trial meets every goal and may be shipped")
        return tuple(found)


def _unscored(trial: Trial) -> str:
    """Why scores of given texts do not tell how far a trial's answers diverge; empty if they do."""
    return why_unscored(asked_by(trial.arguments), asked_by(trial.base_arguments))


def _why_unplaced(trial: Trial, missing: Collection[str]) -> str:
    said = f"its {' and '.join(sorted(missing))} was not measured"
    why = _unscored(trial) if Also.QUALITY in missing else ""
    return f"{said}: {why}" if why else said


def divergence(report: QualityReport) -> QualityFigure | None:
    """How far answers are from stock ones over all of the fidelity suite; None if it was not asked.

    Its figure is the mean KL divergence, in nats.
    """
    return next(
        (
            each
            for each in report.figures
            if each.suite == "fidelity" and each.metric == "kl" and not each.category
        ),
        None,
    )


def pool_bytes(found: Measurement, arguments: Mapping[str, JsonValue]) -> int | None:
    """The bytes of the KV pool on each device that a trial with `arguments` ran with, if known."""
    effective = found.effective
    if effective is None:
        return None
    if effective.kv_cache_memory_bytes is not None and "num-gpu-blocks-override" not in arguments:
        return effective.kv_cache_memory_bytes
    each = found.kv_bytes_per_token_observed or found.kv_bytes_per_token_predicted
    tokens = effective.kv_cache_size_tokens
    return None if each is None or tokens is None else round(each * tokens)


def why_same_memory(space: SearchSpace, base: Mapping[str, JsonValue]) -> str:
    """Why no setting that is searched changes the memory of the KV pool; empty if one does.

    `base` are the arguments that the user fixed.
    """
    known = policies()
    searched = {name for entry in space.knobs for name in known[entry.policy].arguments}
    if searched & {SHARE, *SIZED_BY}:
        return ""
    if "num-gpu-blocks-override" in base and searched & {*BY_BLOCKS}:
        return ""
    return space.refusals.get("kv_memory", "the engine gives it the same under all settings")


def _memory(entry: Entry) -> Interval | None:
    size = pool_bytes(entry.measurement, entry.trial.arguments)
    if size is None:
        return None
    half = size * SAME_MEMORY / 2
    return Interval(
        estimate=size,
        low=size - half,
        high=size + half,
        unit="bytes",
        method="reported by the engine, give or take what a start happens to find free",
    )


def _figure(found: Interval) -> Figure:
    value = found.estimate
    low = value if found.low is None else min(found.low, value)
    high = value if found.high is None else max(found.high, value)
    return Figure(value, low, high)
