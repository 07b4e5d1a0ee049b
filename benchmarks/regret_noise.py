"""What a search meets on a surface by its seed, whichever search it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from surface_bench import Surface
from surface_spec import Point


def noise_of(surface: Surface, seed: int) -> Callable[[Point], Random]:
    """The n-th measurement of a point is drawn with the same numbers in all searches."""
    times: Counter[Point] = Counter()

    def noise(point: Point) -> Random:
        times[point] += 1
        return Random(f"{surface.name} {seed} {point} {times[point] - 1}")

    return noise


def begin_s(seed: int) -> float:
    """Where in the recording's time the search begins, so that each meets another drift."""
    return Random(f"begin {seed}").random() * 3600
