"""A front in words, the same in the terminal and on pages."""

from __future__ import annotations

from kvtune.autotune.words import digits, interval
from kvtune.types import Decision, Front, FrontPoint, Interval

MIB = 1 << 20


def figure_text(figure: Interval) -> str:
    """A figure in few characters: bytes in MiB, what is exact without its interval."""
    if figure.unit == "bytes":
        return f"{digits(figure.estimate / MIB)} MiB"
    return "0" if figure.unit == "nats" and figure.estimate == 0 else interval(figure)


def roles(point: FrontPoint, front: Front, recommended: int | None) -> str:
    """What a point is among all of its front; empty if it is just one of them."""
    found = ["recommended"] if point.trial == recommended else []
    found += [f"best {name}" for name, trial in front.ends.items() if trial == point.trial]
    found += ["knee"] if point.trial == front.knee else []
    return ", ".join(found)


def unlike_text(point: FrontPoint) -> str:
    """Which others a point is no better than in anything, beyond noise; empty if there are none."""
    named = ", ".join(map(str, point.no_better_than))
    return f"beyond noise no better than {named}" if named else ""


def remarks(front: Front, decision: Decision) -> list[str]:
    """What is to be known of a front as a whole."""
    chosen = decision.recommended
    by = None if chosen is None else front.beaten.get(chosen)
    found = []
    if by is not None:
        own = front.objectives[0]
        found.append(f"trial {chosen} is recommended by {own} alone: trial {by} beats it")
    found += [f"trial {n} has no place: {why}" for n, why in sorted(front.unplaced.items())]
    return [*found, *front.reasons]
