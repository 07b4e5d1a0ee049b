"""A curve that can only rise, from noisy values, and where it passes zero.

What a limit is missed by grows with load, and single measurements of it do not always. The nearest
rising curve (in squares) is found by pooling neighbours that fall (Ayer et al., 1955, "An empirical
distribution function for sampling with incomplete information").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def rising(values: Sequence[float], weights: Sequence[float] | None = None) -> tuple[float, ...]:
    """The values, in order, as the nearest ones that never fall; those may be infinite at the end.

    Raises:
        ValueError: there are not as many weights as values, or one is not above 0.
    """
    weights = [1.0] * len(values) if weights is None else weights
    if len(weights) != len(values) or any(weight <= 0 for weight in weights):
        raise ValueError("every value needs a weight above 0")
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            pool = _pooled(pools.pop(), pool)
        pools.append(pool)
    return tuple(value for value, _, count in pools for _ in range(count))


def crossing(places: Sequence[float], values: Sequence[float]) -> float | None:
    """Where a rising curve passes 0, by a straight line between two places of it.

    `None` where it does not, as all of it is on one side, or where it becomes infinite.
    """
    for (before, low), (after, high) in pairwise(zip(places, values, strict=True)):
        if low <= 0 < high and not math.isinf(high):
            return before + (after - before) * -low / (high - low)
    return None


def _pooled(
    first: tuple[float, float, int], second: tuple[float, float, int]
) -> tuple[float, float, int]:
    weight = first[1] + second[1]
    mean = (first[0] * first[1] + second[0] * second[1]) / weight
    return mean, weight, first[2] + second[2]
