"""What each further step of harm bought in a study, what it cost in answers, and what failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtune.autotune.quality import words
from kvtune.autotune.report.study_findings import Confirmed, confirmations, divergence
from kvtune.autotune.report.study_view import STOCK, Point, Standing, StudyView
from kvtune.policies.stack import describe
from kvtune.types import FailureClass, Harm, Interval

RUNGS: Mapping[Harm, str] = {Harm.LOSSLESS: "L1", Harm.NEAR_LOSSLESS: "L2", Harm.LOSSY: "L3"}
"""The rung of the ladder that each class of harm is on; stock defaults alone are L0."""

RANK = (Standing.MET, Standing.UNPROVED, Standing.MISSED, Standing.OUT)
"""Which trial speaks for a step: one that may be shipped, before one that may not."""


@dataclass(frozen=True, slots=True)
class Price:
    """The best measured trial of one rung. `gain` is its ratio to trial `over`, the rung's below.

    `gain` has bounds only where both were confirmed in the same rounds. `costs` are in words, from
    measurements alone.
    """

    rung: str
    harm: Harm
    trial: int
    settings: str
    standing: Standing
    value: float
    over: int | None
    gain: Interval | None
    costs: tuple[str, ...]


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
    return "L0" if point.number == STOCK else RUNGS[point.harm]


def prices(view: StudyView) -> list[Price]:
    """The steps that were measured, stock first; each is compared with the best below it."""
    found: list[Price] = []
    below: Point | None = None
    confirmed = {each.trial: each for each in confirmations(view)}
    for rung in ("L0", *RUNGS.values()):
        points = [point for point in view.measured if rung_of(point) == rung]
        if not points:
            continue
        best = min(points, key=lambda point: (RANK.index(point.standing), -_value(point)))
        found.append(
            Price(
                rung=rung,
                harm=best.harm,
                trial=best.number,
                settings=best.settings,
                standing=best.standing,
                value=_value(best),
                over=None if below is None else below.number,
                gain=None if below is None else _gain(best, below, confirmed),
                costs=_costs(view, best),
            )
        )
        if best.standing is not Standing.OUT and (below is None or _value(best) > _value(below)):
            below = best
    return found


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


def _value(point: Point) -> float:
    return 0.0 if point.value is None else point.value


def _gain(best: Point, below: Point, confirmed: Mapping[int, Confirmed]) -> Interval | None:
    ours, theirs = confirmed.get(best.number), confirmed.get(below.number)
    if ours is not None and theirs is not None and (found := ours.beside(theirs)) is not None:
        return found
    if _value(below) <= 0:
        return None
    return Interval(
        estimate=_value(best) / _value(below),
        low=None,
        high=None,
        unit="ratio",
        repeats=1,
        method="ratio of the two trials of the search, measured apart",
    )


def _costs(view: StudyView, point: Point) -> tuple[str, ...]:
    if point.number == STOCK:
        return ()
    if point.harm is Harm.LOSSLESS:
        return ("nothing: answers are computed as before",)
    row = view.report_of(point.number)
    if row is None:
        return (words.NOT_ASKED,)
    costs = []
    if (kl := divergence(view, point.number)) is not None:
        costs.append(f"KL {words.change(kl, 'nats')} nats")
    costs += [
        f"{words.name(each)} {words.change(each.change, each.unit)} "
        f"{words.unit_of_change(each.unit)}".rstrip()
        for each in row.report.figures
        if each.suite == "needle" and not each.category and each.metric == "recall"
    ]
    proved = {"pass": "proved", "fail": "too much", "unclear": "not proved"}[row.report.outcome]
    return (*costs, f"{proved}: {words.summary(row.report)}")
