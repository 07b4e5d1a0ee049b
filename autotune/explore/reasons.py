"""Why a point is proposed, in a sentence for who watches a search."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtune.types import Interval


class Aim(StrEnum):
    """What a trial is for."""

    GAIN = "what it shows, of points alike too, should better the choice most"
    LOOK = "no trial should better the choice by itself, so it looks where the best may still hide"
    AGAIN = "measured before, but its noise may hide whether it is the best"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known before a trial: `measured` trials, and perhaps a simulation of its point.

    `best` is what is expected of the best point so far that meets the goal, if there is one.
    """

    measured: int
    is_simulated: bool
    best: float | None


def because(aim: Aim, expected: Interval, known: Known) -> str:
    """Why a point is tried of which so much is expected, with the range of one measurement."""
    if aim is Aim.AGAIN:
        return aim.value
    by = f"{known.measured} measurement{'' if known.measured == 1 else 's'}"
    by = f"the simulation and {by}" if known.is_simulated else by
    verb = "expect" if known.is_simulated or known.measured != 1 else "expects"
    reach = ""
    if expected.low is not None and expected.high is not None:
        reach = f" ({expected.low:.3g} to {expected.high:.3g})"
    best = "" if known.best is None else f", {known.best:.3g} of the best so far"
    return f"{aim}: {by} {verb} {expected.estimate:.3g}{reach} {expected.unit} of it{best}"
