"""Draws of the settings of a model by how well each explains what was measured.

A sequential Monte Carlo sampler (Del Moral, Doucet and Jasra, 2006, JRSS B 68(3)): draws of what is
thought before, which are made to fit the measurements in steps. At each step those that fit better
are doubled in the place of those that do not, and then all are moved by Metropolis's rule. Settings
take one of a few values each, so what they cost to try is known before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtune.autotune.explore.likeness import LIKELY, Floats, Ints

SIZES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""How far points are from the prior by what each knob does alone, and as far by what they do
together, in natural logs for a response of `scale` 1. What is known of the one says nothing of the
other: a search that met no interaction so far may not have been where it is."""

WIDE = 1.0
"""Spread of that size around its likeliest, in natural logs."""

OWNS, OWN_CHANCES = (0.0, 0.03, 0.1, 0.3), (3.0, 2.0, 1.0, 0.3)
"""How far a point is from what all others say of it, in natural logs, and how likely each is."""

LOUDS = (0.5, 0.8, 1.25, 2.0, 3.2)
"""How many times noisier measurements are than was thought."""

LOUDER = 0.5
"""Spread of that factor, in natural logs: what is noise and what is special to a point is told
apart by repeats alone, so what is known of the noise before counts."""

DRIFTS = (0.01, 0.03, 0.1)
"""How far the machine's speed wanders, in natural logs."""

DOUBTS = (0.2, 0.5, 1.2)
"""Spread of the factor by which a part of the prior counts."""

PARTICLES = 48
STEPS = (0.05, 0.2, 0.5, 1.0)
"""How much of what the measurements say counts at each step."""

MOVES = 4
"""Of each draw at each step."""

Likelihood = Callable[["Cells"], Floats]


@dataclass(frozen=True, slots=True)
class Cells:
    """Settings of a model, several at once: all are (cells,), but for three.

    `length` is (cells, knobs); it and `smooth` are as in `Field.alike`. `doubt` of the two parts of
    the prior is (cells, 2). `places` are those of the values among what each setting may be.
    """

    length: Ints
    smooth: Ints
    alone: Floats
    joint: Floats
    own: Floats
    louder: Floats
    drift: Floats
    doubt: Floats
    places: Ints

    def only(self, kept: Ints) -> Cells:
        """These cells alone, in this order."""
        return Cells(*(getattr(self, name)[kept] for name in self.__slots__))

    def distinct(self) -> tuple[Cells, Ints]:
        """Those that differ, and how often each is there."""
        _, first, counts = np.unique(self.places, axis=0, return_index=True, return_counts=True)
        return self.only(first), counts


def drawn_cells(
    likelihood: Likelihood,
    knobs: int,
    *,
    scale: float,
    centre: float,
    count: int,
    rng: np.random.Generator,
) -> Cells:
    """Draw settings.

    Args:
        likelihood: the log likelihood of the measurements under each cell, (cells,).
        knobs: how many there are.
        scale: how large differences of the response are beside those of a log rate.
        centre: the likeliest size of what the prior misses, in the unit of `SIZES`.
        count: how many are wanted; some may be equal.
        rng: where draws come from.
    """
    chances = _chances(knobs, centre)
    cumulated = [np.cumsum(one) for one in chances]
    places = np.stack([_picked(one, rng.random(PARTICLES)) for one in cumulated], axis=1)
    fits = likelihood(cells_at(places, knobs, scale))
    before = 0.0
    for step in STEPS:
        weights = np.exp((step - before) * (fits - fits.max()))
        kept = _resampled(weights, PARTICLES, rng)
        places, fits, before = places[kept], fits[kept], step
        for _ in range(MOVES):
            moved = places.copy()
            column = rng.integers(len(chances), size=(PARTICLES))
            at = rng.random(PARTICLES)
            for own in np.unique(column):
                mine = column == own
                moved[mine, own] = _picked(cumulated[own], at[mine])
            found = likelihood(cells_at(moved, knobs, scale))
            is_taken = np.log(rng.random(PARTICLES)) < step * (found - fits)
            places = np.where(is_taken[:, None], moved, places)
            fits = np.where(is_taken, found, fits)
    return cells_at(places[_resampled(np.ones(PARTICLES), count, rng)], knobs, scale)


def _chances(knobs: int, centre: float) -> list[Floats]:
    """How likely each value of each setting is before anything was measured."""
    near = -0.5 * (np.log(np.array(SIZES) / centre) / WIDE) ** 2
    calm = -0.5 * (np.log(np.array(LOUDS)) / LOUDER) ** 2
    logs = [
        *(np.log(np.array(LIKELY)) for _ in range(knobs)),
        np.zeros(2),
        near,
        near,
        np.log(np.array(OWN_CHANCES)),
        calm,
        np.zeros(len(DRIFTS)),
        np.zeros(len(DOUBTS)),
        np.zeros(len(DOUBTS)),
    ]
    return [np.exp(one) / np.exp(one).sum() for one in logs]


def cells_at(places: Ints, knobs: int, scale: float) -> Cells:
    """Settings by the places of their values: (cells, knobs + 8), in the order of `Cells`.

    Args:
        places: those of `length` first, one for each knob; those of `doubt` last.
        knobs: how many there are.
        scale: how large differences of the response are beside those of a log rate.
    """
    smooth, alone, joint, own, louder, drift, *doubt = places[:, knobs:].T
    return Cells(
        places[:, :knobs],
        smooth,
        np.array(SIZES)[alone] * scale,
        np.array(SIZES)[joint] * scale,
        np.array(OWNS)[own] * scale,
        np.array(LOUDS)[louder],
        np.array(DRIFTS)[drift],
        np.array(DOUBTS)[np.stack(doubt, axis=1)],
        places,
    )


def _picked(cumulated: Floats, at: Floats) -> Ints:
    return np.minimum(np.searchsorted(cumulated, at), len(cumulated) - 1)


def _resampled(weights: Floats, count: int, rng: np.random.Generator) -> Ints:
    """Draw by weights, as evenly as can be (systematic resampling)."""
    at = (np.arange(count) + rng.random()) / count
    return _picked(np.cumsum(weights / weights.sum()), at)
