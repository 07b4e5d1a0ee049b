"""What a configuration's answers are worth beside the baseline's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvtune.types.base import Interval, Stored


class QualityFigure(Stored):
    """One metric of a suite in one category, candidate against baseline on the same items.

    `candidate` and `baseline` are means, `change` is the mean of the paired differences with its
    interval, and `floor` the same for the baseline against itself. `broken` items were fine with
    the baseline and are not now, `mended` ones the other way round. `items_needed` is how many
    items could support the limit; `None` when these do, or no number would. The report's outcome is
    made of those that `decides`; the others only inform.
    """

    suite: str
    category: str
    metric: str
    unit: str
    better: Literal["higher", "lower"]
    kind: Literal["difference", "level"]
    limit: float
    items: int
    candidate: float
    baseline: float
    change: Interval
    floor: Interval | None = None
    broken: int = 0
    mended: int = 0
    items_needed: int | None = None
    decides: bool = True
    outcome: Literal["pass", "fail", "unclear"]
    because: str


class NegativeSample(Stored):
    """An item that was fine with the baseline and is broken now, with both answers."""

    suite: str
    category: str
    item: str
    asked: str
    candidate: str
    baseline: str
    detail: str = ""


class QualityPoint(Stored):
    """What an item's headline metric was, and where the item stands on the axes of its map.

    `again` is that of the baseline's second run, where there was one.
    """

    suite: str
    category: str
    item: str
    place: dict[str, float] = Field(default_factory=dict)
    candidate: float
    baseline: float
    again: float | None = None


class QualityReport(Stored):
    """What a configuration's answers are worth beside the baseline's, by suite and category.

    The outcome is the worst figure's. `skipped` says of suites that were not run why. `candidate`
    and `baseline` say what answered: engine arguments, or a stack of methods. `unanswered` counts
    the items that one of them gave no answer to, which another time it may.
    """

    outcome: Literal["pass", "fail", "unclear"]
    figures: tuple[QualityFigure, ...]
    samples: tuple[NegativeSample, ...] = ()
    points: tuple[QualityPoint, ...] = ()
    skipped: dict[str, str] = Field(default_factory=dict)
    unanswered: int = 0
    model: str = ""
    baseline: str = ""
    candidate: str = ""
    size: str = ""
    seed: int = 0
    wall_s: float | None = None
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    measured_at: str = ""
