"""The way from the first server to the decision, one step after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from kvtune.autotune.decide import objective_values
from kvtune.autotune.quality import words
from kvtune.autotune.report.forecast_words import COLUMNS
from kvtune.autotune.report.study_prices import rung_of
from kvtune.autotune.report.study_view import (
    STOCK,
    Point,
    Standing,
    StudyView,
    begun_at,
    name_of,
    seconds_between,
)
from kvtune.autotune.words import amount, percent, verdict_text
from kvtune.profilers.goal import goal_text
from kvtune.store.rows import AttemptRow, AttemptStatus, TrialRow
from kvtune.types import Harm, Status

Kind = Literal[
    "begin",
    "forecast",
    "trial",
    "verdict",
    "quality",
    "rung",
    "unlock",
    "note",
    "stop",
    "finalists",
    "confirm",
    "decide",
    "emit",
]


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happened `at_s` after the study began.

    `rung` is that of the trial it is about, if it is about one.
    """

    at_s: float
    kind: Kind
    says: str
    trial: int | None = None
    rung: str = ""


def trail(view: StudyView) -> list[Step]:
    """All steps in the order of time: what its search said, and what the store shows besides."""
    said = {row.step for row in view.steps}
    timed = [
        *_said(view),
        *(() if "unlock" in said else _unlock(view)),
        *_trials(view),
        *(() if "verdict" in said else _verdict(view)),
        *_quality(view),
        *_confirmation(view),
        *_decision(view),
    ]
    began = min([view.study.created_at, *(at for at, _ in timed)])
    study = view.study
    steps = [Step(0.0, "begin", f"{goal_text(study.goal)}, workload: {study.workload_name}")]
    # Sorting is stable: what was noted at the same time stays in the order above.
    steps += [
        replace(step, at_s=seconds_between(began, at))
        for at, step in sorted(timed, key=lambda pair: pair[0])
    ]
    return steps


Timed = tuple[str, Step]


def _decision(view: StudyView) -> Iterator[Timed]:
    if (decision := view.decision) is not None:
        named = "" if decision.recommended is None else f": trial {decision.recommended}"
        says = f"{decision.outcome.replace('-', ' ')}{named}; {'; '.join(decision.reasons)}"
        yield view.decided_at, Step(0.0, "decide", says, decision.recommended)
    for row in reversed(view.emitted):
        files = ", ".join(f"{name} (SHA-256 {digest[:12]})" for name, digest in row.files.items())
        says = f"{row.format} written to {row.directory}: {files}"
        yield row.created_at, Step(0.0, "emit", says, row.trial)


def _said(view: StudyView) -> Iterator[Timed]:
    """What the search itself said when it said it."""
    for row in view.steps:
        if row.step not in get_args(Kind):
            continue  # Of a newer kvtune.
        trial = row.trial
        if row.step == "verdict":
            trial = STOCK
        elif row.step == "unlock":
            harmful = (each for each in view.points if each.harm is not Harm.LOSSLESS)
            later = (each for each in harmful if begun_at(each.row) >= row.created_at)
            trial = next((each.number for each in later if each.row.attempts), None)
        point = view.point(trial)
        rung = "" if point is None else rung_of(point)
        yield row.created_at, Step(0.0, cast(Kind, row.step), row.says, trial, rung)


def _trials(view: StudyView) -> Iterator[Timed]:
    for point in view.points:
        rung = rung_of(point)
        if point.row.attempts and (told := _told(view, point)):
            yield begun_at(point.row), Step(0.0, "forecast", told, point.number, rung)
        for attempt in point.row.attempts:
            says = f"{point.settings}: {_outcome(view, point, attempt)}"
            at = attempt.ended_at or attempt.started_at
            yield at, Step(0.0, "trial", says, point.number, rung)
    for row in view.repeats:
        for attempt in row.attempts:
            says = f"trial {row.trial.parent} measured again: {_result(view, row)}"
            yield attempt.ended_at or attempt.started_at, Step(0.0, "trial", says, row.number)


def _outcome(view: StudyView, point: Point, attempt: AttemptRow) -> str:
    if attempt.status is AttemptStatus.RUNNING:
        return "begun, and has not ended"
    if attempt.status is AttemptStatus.STOPPED:
        return "stopped before there was an outcome"
    if attempt.measurement_id != point.row.measurement_id:
        return "measured, and again later"
    known = ", known from before" if attempt.status is AttemptStatus.REUSED else ""
    if point.value is None:
        return f"{point.standing}{known}" + (f": {point.why}" if point.why else "")
    if point.harm is not Harm.LOSSLESS and view.report_of(point.number) is not None:
        # What its answers are worth was found later, and is a step of its own.
        return f"{_objective(view, point.value)}{known}"
    why = f" ({point.why})" if point.why else ""
    return f"{_objective(view, point.value)}, {point.standing}{why}{known}"


def _objective(view: StudyView, value: float) -> str:
    return f"{view.study.goal.objective} {amount(value, view.unit)}"


def _result(view: StudyView, row: TrialRow) -> str:
    found = row.measurement
    if found is None:
        return "no outcome"
    if found.failure is not None:
        return f"failed: {found.failure.failure}: {found.failure.message}"
    values = objective_values(view.study.goal, found)
    if not values:
        return "stopped" if found.status is Status.STOPPED else "no objective"
    return _objective(view, sum(values) / len(values))


def _told(view: StudyView, point: Point) -> str:
    """What was forecast of a trial before it was measured, of what could be."""
    own = [told for told in view.forecasts if told.arguments == point.row.trial.arguments]
    changes = {told.metric: told.ratio.estimate for told in own if told.ratio is not None}
    parts = [f"{COLUMNS[name]} {percent(changes[name])}" for name in COLUMNS if name in changes]
    return f"{point.settings}: {', '.join(parts)}" if parts else ""


def _verdict(view: StudyView) -> Iterator[Timed]:
    if view.profile is not None:
        verdict = view.profile.profile.verdict
        says = f"{verdict_text(verdict)}: {verdict.summary}"
        yield view.profile.created_at, Step(0.0, "verdict", says, STOCK, "L0")


def _quality(view: StudyView) -> Iterator[Timed]:
    for row in view.reports:
        said = words.summary(row.report).removeprefix(words.SUMMARY_START)
        says = f"answers beside stock's {row.report.outcome}, {said}"
        yield row.created_at, Step(0.0, "quality", says, row.trial)


def _unlock(view: StudyView) -> Iterator[Timed]:
    """When the first trial that may change answers came, and how the lossless ones stood then.

    For studies of an older kvtune, which did not keep why it was allowed.
    """
    for index, point in enumerate(view.points):
        if point.harm is Harm.LOSSLESS or not point.row.attempts:
            continue
        before = [each for each in view.points[:index] if each.is_measured]
        met = sum(each.standing is Standing.MET for each in before)
        stood = f"{met} of {len(before)} lossless trials met the goal by then"
        why = "asked for, or nothing lossless was left" if met else "the goal was missed so far"
        yield (
            begun_at(point.row),
            Step(
                0.0,
                "unlock",
                f"settings that may change answers are tried from here on: {stood} ({why})",
                point.number,
                rung_of(point),
            ),
        )
        return


def _confirmation(view: StudyView) -> Iterator[Timed]:
    tried = [each for each in view.rounds if each.row.attempts]
    if not tried:
        return
    numbers = sorted({each.trial for each in tried})
    names = ", ".join(map(name_of, numbers))
    says = f"measured again in turns, on held-out requests where there are any: {names}"
    yield begun_at(tried[0].row), Step(0.0, "finalists", says)
    for each in tried:
        says = f"round {each.number}, {name_of(each.trial)}: {_result(view, each.row)}"
        last = each.row.attempts[-1]
        yield last.ended_at or last.started_at, Step(0.0, "confirm", says, each.row.number)
