"""What each further step of harm bought in a study, what it cost in answers, and what failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtune.autotune.ladder import RUNGS
from kvtune.autotune.ladder import STOCK as LOWEST
from kvtune.autotune.prices import Offer, Worth, price_list
from kvtune.autotune.report.study_view import STOCK, Point, Standing, StudyView
from kvtune.policies.stack import describe
from kvtune.types import FailureClass, Price

RANK: Mapping[Standing, Worth] = {
    Standing.MET: Worth.MEETS,
    Standing.UNPROVED: Worth.UNPROVED,
    Standing.MISSED: Worth.MISSES,
    Standing.OUT: Worth.OUT,
}
"""What a measured trial is worth for its rung, by what became of it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A trial, or a round that measured one again, that gave no number, and why."""

    trial: int
    parent: int | None
    settings: str
    message: str
    fix: str
    log_excerpt: str


def rung_of(point: Point) -> str:
    """The rung of the ladder that a point stands on."""
    return LOWEST if point.number == STOCK else RUNGS[point.harm]


def prices(view: StudyView) -> tuple[Price, ...]:
    """The rungs that were measured so far, stock first; each is compared with the best below it."""
    offers = [
        Offer(
            point.number,
            point.harm,
            point.settings,
            point.value or 0.0,
            RANK[point.standing],
            None if (row := view.report_of(point.number)) is None else row.report,
        )
        for point in view.measured
    ]
    decided = {}
    decision = view.decision
    if decision and decision.recommended is not None and decision.gain_ratio is not None:
        decided[decision.recommended] = decision.gain_ratio
    rules = view.study.settings.get("quality")
    size = str(rules.get("size", "")) if isinstance(rules, dict) else ""
    goal = view.study.goal
    return price_list(goal, offers, view.confirmed(), size=size, decided=decided)


def failures(view: StudyView) -> dict[FailureClass, list[Failed]]:
    """What failed, by class; the most frequent class first."""
    found: dict[FailureClass, list[Failed]] = {}
    for row in view.rows:
        failure = None if row.measurement is None else row.measurement.failure
        if failure is None:
            continue
        found.setdefault(failure.failure, []).append(
            Failed(
                trial=row.number,
                parent=row.trial.parent,
                settings=describe(row.trial.stack),
                message=failure.message,
                fix=failure.fix,
                log_excerpt=failure.log_excerpt,
            )
        )
    return dict(sorted(found.items(), key=lambda pair: (-len(pair[1]), pair[0])))
