"""All that the history knows of one study, put together for a reader. The store is the only source.

Trials of the search are points; what measures a point again (a round of the confirmation, a repeat)
hangs on it by its number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from kvtune.autotune.canary_gate import Canary
from kvtune.autotune.confirm import merged
from kvtune.autotune.decide import mean_metrics, meets_goal, objective_values
from kvtune.autotune.handover import serving_config
from kvtune.autotune.ledger import RUNG_CONFIRM
from kvtune.autotune.quality import words
from kvtune.autotune.words import duration
from kvtune.errors import NotFound
from kvtune.policies.stack import describe
from kvtune.profilers.goal import slo_key, slo_text
from kvtune.profilers.metrics.base import metric_of
from kvtune.profilers.quality import traffic
from kvtune.store.database import Store
from kvtune.store.rows import (
    AttemptRow,
    AttemptStatus,
    EmittedRow,
    ProfileRow,
    QualityReportRow,
    StepRow,
    StudyRow,
    TrialRow,
)
from kvtune.types import Decision, Forecast, Harm, Measurement, ServingConfig, Status

STOCK = 0
"""The number of the trial that measures the stock defaults."""


class Standing(StrEnum):
    """What became of a point."""

    MET = "meets the goal"
    UNPROVED = "meets the goal, answers not proved"
    MISSED = "misses the goal"
    OUT = "may not be shipped"
    CUT = "given up early"
    FAILED = "failed"
    STOPPED = "was stopped"
    RUNNING = "is being measured, or its search was killed"
    PLANNED = "was not begun"


@dataclass(frozen=True, slots=True)
class Point:
    """A trial of the search. `value` is its objective, the mean of its repeats, if it has one.

    `why` says what failed, or what speaks against shipping it.
    """

    row: TrialRow
    settings: str
    standing: Standing
    value: float | None
    why: str = ""

    @property
    def number(self) -> int:
        """The number of the trial."""
        return self.row.number

    @property
    def harm(self) -> Harm:
        """How much its settings may change answers."""
        return self.row.trial.stack.harm

    @property
    def name(self) -> str:
        """The trial in two words."""
        return name_of(self.number)

    @property
    def is_measured(self) -> bool:
        """Whether it has a number, good or bad."""
        return self.value is not None


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of a finalist, in round `number` (from 1) of the confirmation."""

    number: int
    trial: int
    row: TrialRow

    @property
    def measurement(self) -> Measurement | None:
        """What it gave; None when it was cut off."""
        return self.row.measurement if self.row.measured else None


@dataclass(frozen=True, slots=True)
class StudyView:
    """A study with everything that was stored of it.

    `points` are in the order in which they were begun. `forecasts` are those that its trials
    measured, `profile` is that of its baseline. `steps` are what its search said, none where an
    older kvtune searched. `config` is what would be emitted now; None where
    nothing is recommended.
    """

    study: StudyRow
    points: tuple[Point, ...]
    rounds: tuple[Round, ...] = ()
    repeats: tuple[TrialRow, ...] = ()
    decision: Decision | None = None
    decided_at: str = ""
    steps: tuple[StepRow, ...] = ()
    profile: ProfileRow | None = None
    forecasts: tuple[Forecast, ...] = ()
    reports: tuple[QualityReportRow, ...] = ()
    emitted: tuple[EmittedRow, ...] = ()
    config: ServingConfig | None = None

    @property
    def metric(self) -> str:
        """The name of the objective's metric."""
        return self.study.goal.objective_metric

    @property
    def unit(self) -> str:
        """The unit of the objective."""
        return metric_of(self.metric).unit

    @property
    def objective_text(self) -> str:
        """The objective with its unit, as figures name their axis."""
        return f"{self.study.goal.objective}, {self.unit}"

    @property
    def measured(self) -> tuple[Point, ...]:
        """The points that have a number."""
        return tuple(point for point in self.points if point.is_measured)

    @property
    def stock(self) -> Point | None:
        """The stock defaults, if they were begun."""
        return self.point(STOCK)

    @property
    def engine_text(self) -> str:
        """The engine's distribution and version."""
        engine = self.study.engine
        return f"{engine.distribution or engine.name} {engine.version}"

    @property
    def rows(self) -> tuple[TrialRow, ...]:
        """Every trial, confirmations included."""
        found = [point.row for point in self.points] + [each.row for each in self.rounds]
        return tuple(sorted([*found, *self.repeats], key=lambda row: row.number))

    def point(self, number: int | None) -> Point | None:
        """The point of this number."""
        return next((point for point in self.points if point.number == number), None)

    def confirmed(self) -> dict[int, Measurement]:
        """What complete rounds say of each finalist: one measurement with a value a round."""
        parts: dict[int, list[Measurement]] = {}
        for each in self.rounds:
            if each.measurement is not None:
                parts.setdefault(each.trial, []).append(each.measurement)
        return {number: merged(found) for number, found in parts.items()}

    def report_of(self, number: int) -> QualityReportRow | None:
        """The newest quality report of a trial."""
        return next((row for row in self.reports if row.trial == number), None)


def study_view(store: Store, study: StudyRow) -> StudyView:
    """Read all that the store knows of a study."""
    rows = store.trials(study)
    decided = store.decision_row(study)
    reports = tuple(store.quality_reports(study))
    stock = next((row.measurement for row in rows if row.number == STOCK), None)
    points = [_point(study, row, stock, reports) for row in rows if row.trial.parent is None]
    try:
        config = serving_config(store, study)
    except NotFound:
        config = None
    return StudyView(
        study=study,
        points=tuple(sorted(points, key=lambda point: (begun_at(point.row), point.number))),
        rounds=_rounds(rows),
        repeats=tuple(
            row for row in rows if row.trial.parent is not None and row.rung != RUNG_CONFIRM
        ),
        decision=None if decided is None else decided.decision,
        decided_at="" if decided is None else decided.created_at,
        steps=tuple(store.steps(study)),
        profile=None if stock is None else _profile(store, study, stock),
        forecasts=tuple(told for told in store.forecasts() if told.study == study.name),
        reports=reports,
        emitted=tuple(store.emitted(study)),
        config=config,
    )


def name_of(trial: int) -> str:
    """A trial in two words."""
    return "stock" if trial == STOCK else f"trial {trial}"


def begun_at(row: TrialRow) -> str:
    """When a trial was first begun; what never was comes last."""
    return row.attempts[0].started_at if row.attempts else "~"


def seconds_of(attempt: AttemptRow) -> float:
    """How long an attempt took; 0 for one that only took over what was known, or has no end."""
    if attempt.status is AttemptStatus.REUSED or attempt.ended_at is None:
        return 0.0
    return seconds_between(attempt.started_at, attempt.ended_at)


def seconds_between(begin: str, end: str) -> float:
    """The time between two times as the store writes them."""
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def basis(view: StudyView, measurements: Sequence[Measurement], what: str) -> str:
    """What a figure rests on: how many numbers, how cold the caches were, and which engine.

    `what` names one measurement, such as "trial".
    """
    good = [found for found in measurements if found.status is Status.OK]
    plural = "" if len(good) == 1 else "s"
    requests = sorted({found.requests_per_repeat for found in good if found.requests_per_repeat})
    said = f"n = {len(good)} {what}{plural}"
    if requests:
        sent = " or ".join(f"{count:,}" for count in requests)
        said += f" of {sent} request{'' if requests == [1] else 's'} each"
    caches: Counter[str] = Counter(found.cache for found in good)
    starts: Counter[str] = Counter(
        found.effective.start_kind
        for found in good
        if found.effective is not None and found.effective.start_kind is not None
    )
    parts = [said]
    if caches:
        parts.append(f"prefix cache {_mixed(caches)} at the start")
    if starts:
        parts.append(f"servers started {_mixed(starts)}")
    return "; ".join([*parts, view.engine_text]) + "."


def _mixed(found: Mapping[str, int]) -> str:
    if len(found) == 1:
        return next(iter(found))
    return " and ".join(f"{name} ({count})" for name, count in sorted(found.items()))


def _point(
    study: StudyRow,
    row: TrialRow,
    stock: Measurement | None,
    reports: Sequence[QualityReportRow],
) -> Point:
    settings = describe(row.trial.stack)
    found = row.measurement
    if found is None:
        standing = Standing.RUNNING if row.attempts else Standing.PLANNED
        if row.attempts and row.attempts[-1].status is AttemptStatus.STOPPED:
            standing = Standing.STOPPED
        return Point(row, settings, standing, None)
    if found.failure is not None:
        why = f"{found.failure.failure}: {found.failure.message}"
        return Point(row, settings, Standing.FAILED, None, why)
    if found.cut:
        return Point(row, settings, Standing.CUT, None, found.cut)
    values = objective_values(study.goal, found)
    if not values:
        is_stopped = found.status is Status.STOPPED
        standing = Standing.STOPPED if is_stopped else Standing.FAILED
        why = "" if is_stopped else f"it gave no {study.goal.objective}"
        return Point(row, settings, standing, None, why)
    value = sum(values) / len(values)
    if not math.isfinite(value):
        return Point(row, settings, Standing.FAILED, None, f"its {study.goal.objective} is {value}")
    if why := _objection(row, found, stock, reports):
        return Point(row, settings, Standing.OUT, value, why)
    if not meets_goal(study.goal, found):
        return Point(row, settings, Standing.MISSED, value, missed_limits(study, found))
    if row.trial.stack.harm is Harm.LOSSLESS or _is_proved(study, row, reports):
        return Point(row, settings, Standing.MET, value)
    return Point(row, settings, Standing.UNPROVED, value)


def _objection(
    row: TrialRow,
    found: Measurement,
    stock: Measurement | None,
    reports: Sequence[QualityReportRow],
) -> str:
    """Why a measured trial may not be shipped, whatever its figures are; empty when it may."""
    reason = Canary(stock).objection(row.trial.stack, found) or traffic.objection(found, stock)
    if reason is not None:
        return reason
    newest = next((each.report for each in reports if each.trial == row.number), None)
    return words.summary(newest) if newest is not None and newest.outcome == "fail" else ""


def _is_proved(study: StudyRow, row: TrialRow, reports: Sequence[QualityReportRow]) -> bool:
    """Whether all that the study asks of answers which may change was shown, and at its size."""
    newest = next((each.report for each in reports if each.trial == row.number), None)
    rules = study.settings.get("quality")
    if newest is None:
        return rules is None
    return newest.outcome == "pass" and (
        not isinstance(rules, dict) or newest.size == rules.get("size", newest.size)
    )


def missed_limits(study: StudyRow, found: Measurement) -> str:
    """The limits that a measurement misses, each with what was measured."""
    means = mean_metrics(found)
    missed = []
    for slo in study.goal.slos:
        value = means.get(slo_key(slo))
        if value is None:
            missed.append(f"{slo_text(slo)}: not measured")
        elif value > slo.limit_s:
            missed.append(f"{slo_text(slo)}: {duration(value)}")
    return "; ".join(missed)


def _rounds(rows: Sequence[TrialRow]) -> tuple[Round, ...]:
    """The measurements of the confirmation in the order in which they were begun.

    Each round has a seed of its own, which grows with the rounds.
    """
    found = [row for row in rows if row.trial.parent is not None and row.rung == RUNG_CONFIRM]
    seeds = sorted({row.trial.seed for row in found})
    return tuple(
        Round(seeds.index(row.trial.seed) + 1, row.trial.parent, row)
        for row in sorted(found, key=lambda row: (begun_at(row), row.number))
        if row.trial.parent is not None
    )


def _profile(store: Store, study: StudyRow, stock: Measurement) -> ProfileRow | None:
    """The profile that the search made of the load that measured the stock defaults.

    A search that goes on makes another one of the same load; the first one is taken.
    """
    same = [
        row
        for row in store.profiles()
        if row.profile.model == study.model
        and row.profile.metrics
        and row.profile.metrics == stock.metrics
    ]
    return same[-1] if same else None
