"""The front of several objectives: which measured trials no other one beats."""

from __future__ import annotations

from pydantic import Field

from kvtune.types.base import Interval, Stored


class FrontPoint(Stored):
    """A measured trial that no other one beats.

    `figures` has an interval for each objective of its front, by name, all measured in the search;
    `confirmed` is that of the goal's own objective over the rounds of the confirmation, on held-out
    requests. Beyond noise it is `no_better_than` those trials of the front in any objective.
    `doubt` says what is not proved of it; empty if nothing is missing.
    """

    trial: int
    figures: dict[str, Interval]
    confirmed: Interval | None = None
    no_better_than: tuple[int, ...] = ()
    doubt: str = ""


class Front(Stored):
    """The trials of a study that meet its goal and that no other one beats.

    `objectives` are the goal's own one, of which more is better, then those of which less is. The
    `points` are in the order of the first. `ends` maps an objective to the trial with the best
    figure, and the `knee` lies between them: its worst objective is the best one of all. `beaten`
    maps other trials to one that beats them, `unplaced` to why they have no place. `reasons` say
    how all this is to be read.
    """

    objectives: tuple[str, ...]
    points: tuple[FrontPoint, ...]
    ends: dict[str, int] = Field(default_factory=dict)
    knee: int | None = None
    beaten: dict[int, int] = Field(default_factory=dict)
    unplaced: dict[int, str] = Field(default_factory=dict)
    reasons: tuple[str, ...] = ()
