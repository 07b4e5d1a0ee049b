"""What is believed of a response at every point, from a few noisy measurements and a prior mean.

A Gaussian process on how far measurements are from the prior: a sum of one effect for each knob,
plus one joint effect, over the places of values in their ranges, plus what is special to a point
and says nothing of its neighbours (simulations err like that). Of the prior, what each knob does
alone and what they do together count by a factor each, which are learnt: a forecast is often right
in the one and noise in the other. Lengths, smoothness, sizes, noise and drift are not fitted but
averaged over draws of them, as a fit has too little to go by in the first ten trials. Whole
functions are drawn by Matheron's rule (Wilson et al., 2021, arXiv 2011.04026): a draw of the prior,
moved by what the measurements are off from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtune.autotune.explore.cells import Cells, drawn_cells
from kvtune.autotune.explore.likeness import Field, Floats, Ints

DRAWS = 256
CELLS = 16
"""Draws of the settings of a model that are averaged."""

DRIFT_S = 3600.0
"""After which time it has mostly forgotten what it was."""

FACTOR = 0.9
"""How much of what the prior says is true, before anything was measured."""

OFFSET = 0.5
_JITTER = 1e-6


@dataclass(frozen=True, slots=True)
class Samples:
    """Measurements of one response, in any order.

    `rows` are the points that were measured, `values` what came of each, `variance` how noisy that
    is, and `at_s` when it was. All are (measurements,).
    """

    rows: Ints
    values: Floats
    variance: Floats
    at_s: Floats


@dataclass(frozen=True, slots=True)
class Beliefs:
    """What is believed of a response: `mean` and `variance` (points,), `draws` (DRAWS, points).

    `links` gives the covariance of some points with all, (some, points). None of it holds the drift
    of the machine. `noise` is the variance of one more measurement.
    """

    mean: Floats
    variance: Floats
    draws: Floats
    links: Callable[[Ints], Floats]
    noise: float


def fit(
    field: Field,
    samples: Samples,
    prior: Floats,
    *,
    scale: float,
    noise: float,
    centre: float,
    seed: int,
) -> Beliefs:
    """Learn a response.

    Args:
        field: the points.
        samples: what was measured; may be empty.
        prior: (points,) what is expected of the response, up to a constant and a factor.
        scale: how large differences of the response are beside those of a log rate.
        noise: the variance of one whole measurement, as far as it is known.
        centre: the likeliest size of what the prior misses, as in `drawn_cells`.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    rows = samples.rows
    base = FACTOR * prior
    off = samples.values - base[rows]
    middle = float(np.median(off)) if len(rows) else 0.0
    alone = field.alone(prior)
    model = _Model(field, samples, np.stack((alone, prior - alone)), scale)
    cells = drawn_cells(
        lambda cells: _log_likelihood(model.inside(cells), off - middle),
        field.knobs,
        scale=scale,
        centre=centre,
        count=CELLS,
        rng=rng,
    )
    cells, counts = cells.distinct()
    weights = counts / counts.sum()

    everywhere = np.arange(len(prior))
    inside, across = model.inside(cells), model.between(cells, rows, everywhere)
    gain = np.asarray(np.linalg.solve(inside, across), dtype=np.float64)
    means = base + middle + np.einsum("cnp,n->cp", gain, off - middle)
    before = (cells.alone**2 + cells.joint**2 + cells.own**2 + (OFFSET * scale) ** 2)[:, None]
    before = before + cells.doubt**2 @ model.parts**2
    after = np.maximum(before - np.einsum("cnp,cnp->cp", gain, across), 0.0)
    mean = weights @ means

    def links(some: Ints) -> Floats:
        inner = model.between(cells, some, everywhere)
        inner -= across[:, :, some].transpose(0, 2, 1) @ gain
        apart = means - mean
        found: Floats = np.einsum("c,cwp->wp", weights, inner)
        found += apart[:, some].T @ (weights[:, None] * apart)
        return found

    return Beliefs(
        mean=mean,
        variance=weights @ (after + (means - mean) ** 2),
        draws=model.drawn(cells, weights, gain, off - middle, rng) + base + middle,
        links=links,
        noise=noise * float(weights @ cells.louder**2),
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """Covariances of what the prior misses; arguments are those of `fit`.

    `parts` (2, points) of the prior are what each knob does alone and what they do together.
    """

    field: Field
    samples: Samples
    parts: Floats
    scale: float

    def between(self, cells: Cells, rows: Ints, columns: Ints) -> Floats:
        """Of points, (cells, rows, columns)."""
        additive, joint = self.field.alike(cells.length, cells.smooth, rows, columns)
        alone, both, own = (one[:, None, None] for one in (cells.alone, cells.joint, cells.own))
        found: Floats = alone**2 * additive + both**2 * joint
        found += own**2 * (rows[:, None] == columns[None, :])
        for part, doubt in zip(self.parts, cells.doubt.T, strict=True):
            found += doubt[:, None, None] ** 2 * (part[rows][:, None] * part[columns][None, :])
        return found + (OFFSET * self.scale) ** 2

    def inside(self, cells: Cells) -> Floats:
        """Of measurements, with drift and noise, (cells, measurements, measurements)."""
        rows = self.samples.rows
        drift, louder = cells.drift[:, None, None], cells.louder[:, None, None]
        found = self.between(cells, rows, rows) + drift**2 * _wander(self.samples)
        found += louder**2 * np.diag(self.samples.variance)
        return found

    def drawn(
        self, cells: Cells, weights: Floats, gain: Floats, off: Floats, rng: np.random.Generator
    ) -> Floats:
        """Draws of what the prior misses that fit to the measurements, (DRAWS, points).

        Each draw is of one cell, and cells have draws by their `weights` (cells,).
        """
        turn = np.searchsorted(np.cumsum(weights), (np.arange(DRAWS) + 0.5) / DRAWS)
        turn = np.minimum(turn, len(weights) - 1)
        wander = np.linalg.cholesky(_wander(self.samples)).T
        found = np.empty((DRAWS, self.field.points))
        for cell in range(len(weights)):
            mine = turn == cell
            functions = self._functions(cells, cell, int(mine.sum()), rng)
            shape = len(functions), len(off)
            slow = cells.drift[cell] * rng.standard_normal(shape) @ wander
            noise = cells.louder[cell] * rng.standard_normal(shape) * np.sqrt(self.samples.variance)
            surprise = off - functions[:, self.samples.rows] - slow - noise
            found[mine] = functions + surprise @ gain[cell]
        return found

    def _functions(self, cells: Cells, cell: int, count: int, rng: np.random.Generator) -> Floats:
        """Draws of what the prior misses before anything is measured, (count, points)."""
        additive, joint = self.field.functions(cells.length[cell], cells.smooth[cell], count, rng)
        found = cells.alone[cell] * additive + cells.joint[cell] * joint
        found += cells.own[cell] * rng.standard_normal(found.shape)
        found += OFFSET * self.scale * rng.standard_normal((count, 1))
        found += (cells.doubt[cell] * rng.standard_normal((count, 2))) @ self.parts
        return np.asarray(found, dtype=np.float64)


def _wander(samples: Samples) -> Floats:
    """Covariance of the drift, for one that wanders by 1, (measurements, measurements).

    It is told from its mean over all measurements: what is believed of points is meant for the
    machine as it was on average.
    """
    apart_s = np.abs(samples.at_s[:, None] - samples.at_s[None, :])
    found = np.exp(-apart_s / DRIFT_S)
    if len(found):
        found = found - found.mean(axis=0) - found.mean(axis=1)[:, None] + found.mean()
    return np.asarray(found + _JITTER * np.eye(len(found)), dtype=np.float64)


def _log_likelihood(inside: Floats, missing: Floats) -> Floats:
    """Of each cell, (cells,), up to a constant."""
    count = len(missing)
    if not count:
        return np.zeros(len(inside))
    # The last row of the root of a matrix with one row more is what is missing, whitened.
    whole = np.empty((len(inside), count + 1, count + 1))
    whole[:, :count, :count] = inside
    whole[:, count, :count] = whole[:, :count, count] = missing
    least = np.diagonal(inside, axis1=1, axis2=2).min(axis=1)
    whole[:, count, count] = 1e6 * (1 + missing @ missing) * np.maximum(1.0, 1 / least)
    root = np.linalg.cholesky(whole)
    log_root = np.log(np.diagonal(root[:, :count, :count], axis1=1, axis2=2)).sum(axis=1)
    found: Floats = -0.5 * (root[:, count, :count] ** 2).sum(axis=1) - log_root
    return found
