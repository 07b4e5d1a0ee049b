"""How alike points are: by each knob alone, and by all of them together.

How fast a knob's values cease to be alike is a matter of its own (automatic relevance
determination, Neal, 1996): over a long length a knob changes nothing. Functions are either rough
or smooth: Matern's covariance of order 1/2 or 5/2 over the places of values in their ranges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

LENGTHS = (0.15, 0.35, 0.8, 2.0, 6.0, 20.0)
LIKELY = (1.0, 1.5, 1.5, 1.2, 0.5, 0.3)
"""Over how much of its range the effect of a knob stays alike; from the fifth on it has hardly any.
Values without an order are as far from each other as the ends of a range."""

USUAL_AT = 2
"""Place of the usual length."""

ROUGH, SMOOTH = 0, 1

GRID = 50_000
"""Combinations of values up to which functions are drawn over all of them."""

_JITTER = 1e-6


@dataclass(frozen=True, slots=True)
class Field:
    """Points, by the values of their knobs.

    `codes` are (knobs, points): which of the knob's values a point has. `tables` has for each knob
    how alike its values are, (smoothness, lengths, values, values).
    """

    codes: Ints
    tables: tuple[Floats, ...]

    @property
    def points(self) -> int:
        """How many there are."""
        return int(self.codes.shape[1])

    @property
    def knobs(self) -> int:
        """How many there are."""
        return len(self.tables)

    def alike(
        self, lengths: Ints, smooth: Ints, rows: Ints, columns: Ints
    ) -> tuple[Floats, Floats]:
        """The mean over knobs, and the product, of how alike points are; (cells, rows, columns).

        Args:
            lengths: (cells, knobs) places in `LENGTHS`.
            smooth: (cells,) `ROUGH` or `SMOOTH`.
            rows: points.
            columns: points.
        """
        shape = len(lengths), len(rows) * len(columns)
        total, product = np.zeros(shape), np.ones(shape)
        for knob, table in enumerate(self.tables):
            count = table.shape[2]
            pairs = self.codes[knob, rows][:, None] * count + self.codes[knob, columns][None, :]
            chosen = table[smooth, lengths[:, knob]].reshape(len(lengths), count * count)
            one = np.take(chosen, pairs.ravel(), axis=1)
            total += one
            product *= one
        whole = len(lengths), len(rows), len(columns)
        return (total / self.knobs).reshape(whole), product.reshape(whole)

    def alone(self, values: Floats) -> Floats:
        """The part of values that is a sum of one effect for each knob, (points,)."""
        marks = [code[:, None] == np.arange(code.max() + 1) for code in self.codes]
        columns = np.hstack(marks).astype(np.float64)
        effects = np.linalg.lstsq(columns, values, rcond=None)[0]
        return np.asarray(columns @ effects, dtype=np.float64)

    def functions(
        self, lengths: Ints, smooth: int, count: int, rng: np.random.Generator
    ) -> tuple[Floats, Floats]:
        """Draws of functions as alike as the mean over knobs, and as the product, says.

        Both are (count, points). The product is drawn over the whole grid of values, one knob
        after the other, or, where that is too large, over the points.

        Args:
            lengths: (knobs,) places in `LENGTHS`.
            smooth: `ROUGH` or `SMOOTH`.
            count: how many draws.
            rng: where they come from.
        """
        roots = [
            root_of(table[smooth, length])
            for table, length in zip(self.tables, lengths, strict=True)
        ]
        total = np.zeros((count, self.points))
        for root, code in zip(roots, self.codes, strict=True):
            total += (rng.standard_normal((count, len(root))) @ root.T)[:, code]
        shape = tuple(len(root) for root in roots)
        if math.prod(shape) > GRID:
            everywhere = np.arange(self.points)
            _, alike = self.alike(lengths[None], np.array([smooth]), everywhere, everywhere)
            product = rng.standard_normal((count, self.points)) @ root_of(alike[0]).T
        else:
            grid = rng.standard_normal((count, *shape))
            for root in roots:
                # The first knob goes last, so that after all of them the order is as before.
                grid = np.asarray(np.tensordot(grid, root, axes=(1, 1)), dtype=np.float64)
            product = grid[(slice(None), *self.codes)]
        return total / math.sqrt(self.knobs), product


def field_over(places: Floats, ordered: Sequence[bool]) -> Field:
    """Prepare points.

    Args:
        places: (points, knobs) where each value lies in its range; at least one knob.
        ordered: (knobs,) whether places of a knob say how far its values are from each other.
    """
    codes, tables = [], []
    for knob, has_order in enumerate(ordered):
        values, code = np.unique(places[:, knob], return_inverse=True)
        apart = np.abs(values[:, None] - values[None, :])
        apart = apart if has_order else (apart > 0).astype(np.float64)
        codes.append(code)
        tables.append(np.stack([_rough(apart), _smooth(apart)]))
    return Field(np.array(codes, dtype=np.intp), tuple(tables))


def _rough(apart: Floats) -> Floats:
    """Matern's covariance of order 1/2, (lengths, ...)."""
    return np.stack([np.exp(-apart / length) for length in LENGTHS])


def _smooth(apart: Floats) -> Floats:
    """Matern's covariance of order 5/2, (lengths, ...)."""
    far = [math.sqrt(5) * apart / length for length in LENGTHS]
    return np.stack([(1 + one + one**2 / 3) * np.exp(-one) for one in far])


def root_of(covariance: Floats) -> Floats:
    """Its lower Cholesky root."""
    count = len(covariance)
    return np.asarray(np.linalg.cholesky(covariance + _JITTER * np.eye(count)), dtype=np.float64)
