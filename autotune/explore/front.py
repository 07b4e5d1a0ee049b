"""Which points of several objectives no other one beats, and which of those stand out.

Noise makes no one beaten: a point is beaten by one that is no worse in any objective as measured,
and better in one by more than both intervals allow. Whoever beats has the higher sum of values, so
nobody is beaten in a circle, and of any points some stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """What a point has of one objective; higher is better. `low <= value <= high`."""

    value: float
    low: float
    high: float

    def negated(self) -> Figure:
        """The same of an objective of which less is better."""
        return Figure(-self.value, -self.high, -self.low)


Figures = Sequence[Figure]
"""Those of one point, one for each objective, in the same order for all points."""


def beats(first: Figures, second: Figures) -> bool:
    """Whether `first` is no worse in any objective and, beyond noise, better in one."""
    is_no_worse = all(ours.value >= theirs.value for ours, theirs in _pairs(first, second))
    return is_no_worse and is_better_somewhere(first, second)


def is_better_somewhere(first: Figures, second: Figures) -> bool:
    """Whether `first` is better than `second` in an objective, beyond noise."""
    return any(ours.low > theirs.high for ours, theirs in _pairs(first, second))


def beaten(points: Mapping[int, Figures]) -> dict[int, int]:
    """Map the number of each point that is not on the front to the one that beats it.

    Of several it is the one with the most of the first objective, then of the next ones, then the
    one with the lowest number.
    """
    found = {}
    for number, own in points.items():
        better = [other for other, theirs in points.items() if beats(theirs, own)]
        if better:
            found[number] = min(better, key=lambda other: _rank(other, points[other]))
    return found


def ends(points: Mapping[int, Figures]) -> tuple[int, ...]:
    """Who has the most of each objective, in their order; of equals, who has most of the others."""
    count = max(map(len, points.values()), default=0)

    def leader(objective: int) -> int:
        def rank(number: int) -> tuple[float, ...]:
            own = points[number]
            return (-own[objective].value, *_rank(number, own))

        return min(points, key=rank)

    return tuple(map(leader, range(count)))


def knee(points: Mapping[int, Figures]) -> int | None:
    """The point whose worst objective is the best: of each, as a share of its range on the front.

    None where that is no more than an end has: then there is nothing between the ends.
    """
    if not points:
        return None
    values = {number: [figure.value for figure in own] for number, own in points.items()}
    columns = list(zip(*values.values(), strict=True))
    ranges = [(min(column), max(column)) for column in columns]

    def shares(number: int) -> list[float]:
        return [
            1.0 if high == low else (value - low) / (high - low)
            for value, (low, high) in zip(values[number], ranges, strict=True)
        ]

    def rank(number: int) -> tuple[float, float, int]:
        own = shares(number)
        return -min(own, default=0.0), -math.fsum(own), number

    best = min(points, key=rank)
    return None if best in ends(points) else best


def no_better_than(points: Mapping[int, Figures]) -> dict[int, tuple[int, ...]]:
    """Map each point to those that it is better than in no objective, beyond noise."""
    return {
        number: tuple(
            sorted(
                other
                for other, theirs in points.items()
                if other != number and not is_better_somewhere(own, theirs)
            )
        )
        for number, own in points.items()
    }


def _pairs(first: Figures, second: Figures) -> list[tuple[Figure, Figure]]:
    return list(zip(first, second, strict=True))


def _rank(number: int, own: Figures) -> tuple[float, ...]:
    return (*(-figure.value for figure in own), number)
