"""What is believed of a response at every point, from a few noisy measurements and a prior mean.

A Gaussian process on how far measurements are from the prior: a sum of one effect for each knob,
plus one joint effect, over the places of values in their ranges, plus what is special to a point
and says nothing of its neighbours (simulations err like that). The prior itself counts by a
factor that is learnt. Scales, smoothness, noise and drift are not fitted but averaged over a grid,
each cell weighed by how well it explains the measurements (a fit has too little to go by in the
first ten trials). Whole functions are drawn by Matheron's rule (Wilson et al., 2021,
arXiv 2011.04026): a draw of the prior, moved by what the measurements are off from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

DRAWS = 256
LENGTHS = (0.25, 0.7, 2.0)
"""Over how much of its range the effect of a knob stays alike."""

JOINT = (0.05, 0.3, 0.7)
"""Share of the joint effect."""

SIZES = (0.05, 0.1, 0.2, 0.5, 1.2)
"""How far points are from the prior, in natural logs for a response of `scale` 1."""

OWNS = (0.0, 0.08, 0.2)
"""How far a point is from what all others say of it, in natural logs."""

NOISES = (0.8, 1.6, 3.2)
"""How many times noisier measurements are than was thought."""

LOUDER = 0.5
"""Spread of that factor, in natural logs: what is noise and what is special to a point is told
apart by repeats alone, so what is known of the noise before counts."""

DRIFTS = (0.01, 0.1)
"""How far the machine's speed wanders, in natural logs."""

DRIFT_S = 3600.0
"""After which time it has mostly forgotten what it was."""

OTHER = 0.3
"""How alike the effects of two values are that have no order."""

FACTOR, FACTOR_SPREAD = 0.9, 0.3
"""How much of what the prior says is true, before anything was measured."""

OFFSET = 0.5
_JITTER = 1e-6
_LEAST_WEIGHT = 0.01


@dataclass(frozen=True, slots=True)
class Field:
    """Points, how alike they are, and draws of functions over them before anything is measured.

    `additive` and `joint` are (lengths, points, points), their draws (lengths, DRAWS, points).
    """

    additive: Floats
    joint: Floats
    additive_draws: Floats
    joint_draws: Floats


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

    `linked` (watched, points) is the covariance of some points with all. None of it holds the drift
    of the machine. `noise` is the variance of one more measurement.
    """

    mean: Floats
    variance: Floats
    draws: Floats
    linked: Floats
    noise: float


@dataclass(frozen=True, slots=True)
class _Cells:
    """Cells of the grid, each field (cells,): place of the length, share, sizes, noise, drift."""

    length: Ints
    joint: Floats
    size: Floats
    own: Floats
    louder: Floats
    drift: Floats

    def only(self, kept: Ints) -> _Cells:
        """These cells alone, in this order."""
        return _Cells(
            self.length[kept],
            self.joint[kept],
            self.size[kept],
            self.own[kept],
            self.louder[kept],
            self.drift[kept],
        )


def field_over(places: Floats, ordered: Sequence[bool], seed: int) -> Field:
    """Prepare points.

    Args:
        places: (points, knobs) where each value lies in its range; at least one knob.
        ordered: (knobs,) whether places of a knob say how far its values are from each other.
        seed: of the draws.
    """
    apart = np.abs(places[:, None, :] - places[None, :, :])
    additive, joint = [], []
    for length in LENGTHS:
        alike = np.where(ordered, np.exp(-apart / length), np.where(apart > 0, OTHER, 1.0))
        additive.append(alike.mean(axis=2))
        joint.append(alike.prod(axis=2))
    rng = np.random.default_rng(seed)
    both = np.stack(additive), np.stack(joint)
    return Field(*both, *(_drawn(one, rng) for one in both))


def fit(
    field: Field,
    samples: Samples,
    prior: Floats,
    *,
    scale: float,
    noise: float,
    centre: float,
    watched: Ints,
    seed: int,
) -> Beliefs:
    """Learn a response.

    Args:
        field: the points.
        samples: what was measured; may be empty.
        prior: (points,) what is expected of the response, up to a constant and a factor.
        scale: how large differences of the response are beside those of a log rate.
        noise: the variance of one whole measurement, as far as it is known.
        centre: the likeliest size of what the prior misses, in the unit of `SIZES`.
        watched: points whose covariance with all is wanted.
        seed: of the draws.
    """
    rows = samples.rows
    base = FACTOR * prior
    off = samples.values - base[rows]
    middle = float(np.median(off)) if len(rows) else 0.0
    cells = _grid(scale)
    inside = _alike(field, cells, rows, rows) + _trend(prior, rows, rows, scale)
    inside += _disturbed(samples, cells)
    log_weights = _log_likelihood(inside, off - middle)
    log_weights -= 0.5 * np.log(cells.size / (scale * centre)) ** 2
    log_weights -= 0.5 * (np.log(cells.louder) / LOUDER) ** 2
    weights = np.exp(log_weights - log_weights.max())
    kept = np.flatnonzero(weights > _LEAST_WEIGHT)
    weights, cells, inside = weights[kept] / weights[kept].sum(), cells.only(kept), inside[kept]

    everywhere = np.arange(len(prior))
    across = _alike(field, cells, rows, everywhere) + _trend(prior, rows, everywhere, scale)
    gain = np.asarray(np.linalg.solve(inside, across), dtype=np.float64)
    means = base + middle + np.einsum("cnp,n->cp", gain, off - middle)
    before = (cells.size**2 + cells.own**2)[:, None]
    before = before + (FACTOR_SPREAD * prior) ** 2 + (OFFSET * scale) ** 2
    after = np.maximum(before - np.einsum("cnp,cnp->cp", gain, across), 0.0)
    mean = weights @ means
    linked = _alike(field, cells, watched, everywhere) + _trend(prior, watched, everywhere, scale)
    linked -= across[:, :, watched].transpose(0, 2, 1) @ gain

    # Each draw is of one cell, and cells have draws by their weights.
    turn = np.searchsorted(np.cumsum(weights), (np.arange(DRAWS) + 0.5) / DRAWS)
    turn = np.minimum(turn, len(weights) - 1)
    rng = np.random.default_rng(seed)
    functions = _functions(field, cells.only(turn), prior, scale, rng)
    disturbances = _disturbances(samples, cells.only(turn), rng)
    surprise = off - middle - functions[:, rows] - disturbances
    draws = functions + _matched(gain, turn, surprise)
    return Beliefs(
        mean=mean,
        variance=weights @ (after + (means - mean) ** 2),
        draws=draws + base + middle,
        linked=np.einsum("c,cwp->wp", weights, linked)
        + (means - mean)[:, watched].T @ (weights[:, None] * (means - mean)),
        noise=noise * float(weights @ cells.louder**2),
    )


def main_effects(places: Floats, mean: Floats) -> Floats:
    """What part of the differences of `mean` (points,) each knob explains alone; (knobs,).

    Args:
        places: (points, knobs) as in `field_over`.
        mean: what is believed at each point.
    """
    total = float(np.var(mean))
    shares = np.zeros(places.shape[1])
    for knob in range(places.shape[1]) if total > 0 else ():
        values, group = np.unique(places[:, knob], return_inverse=True)
        sizes = np.bincount(group, minlength=len(values))
        middles = np.bincount(group, weights=mean, minlength=len(values)) / sizes
        shares[knob] = float(np.average((middles - mean.mean()) ** 2, weights=sizes)) / total
    return shares


def _grid(scale: float) -> _Cells:
    cells = list(product(range(len(LENGTHS)), JOINT, SIZES, OWNS, NOISES, DRIFTS))
    length, joint, size, own, louder, drift = zip(*cells, strict=True)
    return _Cells(
        np.array(length),
        np.array(joint),
        np.array(size) * scale,
        np.array(own) * scale,
        np.array(louder),
        np.array(drift),
    )


def _alike(field: Field, cells: _Cells, rows: Ints, columns: Ints) -> Floats:
    """Covariance of what the prior misses, (cells, rows, columns)."""
    pick = np.ix_(np.arange(len(LENGTHS)), rows, columns)
    additive, joint = field.additive[pick][cells.length], field.joint[pick][cells.length]
    share, own = cells.joint[:, None, None], cells.own[:, None, None]
    shared = cells.size[:, None, None] ** 2 * ((1 - share) * additive + share * joint)
    found: Floats = shared + own**2 * (rows[:, None] == columns[None, :])
    return found


def _trend(prior: Floats, rows: Ints, columns: Ints, scale: float) -> Floats:
    """Covariance of the prior's factor and of the constant, (rows, columns)."""
    factor: Floats = FACTOR_SPREAD**2 * prior[rows][:, None] * prior[columns][None, :]
    return factor + (OFFSET * scale) ** 2


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


def _disturbed(samples: Samples, cells: _Cells) -> Floats:
    """Covariance of drift and noise, (cells, measurements, measurements)."""
    drift, louder = cells.drift[:, None, None], cells.louder[:, None, None]
    found: Floats = drift**2 * _wander(samples) + louder**2 * np.diag(samples.variance)
    return found


def _disturbances(samples: Samples, cells: _Cells, rng: np.random.Generator) -> Floats:
    """Draws of drift and noise, (DRAWS, measurements); `cells` has one for each."""
    count = len(samples.rows)
    wander = rng.standard_normal((DRAWS, count)) @ np.linalg.cholesky(_wander(samples)).T
    noise = rng.standard_normal((DRAWS, count)) * np.sqrt(samples.variance)
    found: Floats = cells.drift[:, None] * wander + cells.louder[:, None] * noise
    return found


def _log_likelihood(inside: Floats, missing: Floats) -> Floats:
    """Of each cell, (cells,), up to a constant."""
    root = np.linalg.cholesky(inside)
    whitened = np.linalg.solve(root, np.broadcast_to(missing[:, None], (*inside.shape[:2], 1)))
    log_root = np.log(np.diagonal(root, axis1=1, axis2=2)).sum(axis=1)
    found: Floats = -0.5 * (whitened**2).sum(axis=(1, 2)) - log_root
    return found


def _functions(
    field: Field, cells: _Cells, prior: Floats, scale: float, rng: np.random.Generator
) -> Floats:
    """Draws of what the prior misses, (DRAWS, points); `cells` has one for each."""
    each = np.arange(DRAWS)
    share = cells.joint[:, None]
    additive = field.additive_draws[cells.length, each]
    joint = field.joint_draws[cells.length, each]
    missed = cells.size[:, None] * (np.sqrt(1 - share) * additive + np.sqrt(share) * joint)
    missed += cells.own[:, None] * rng.standard_normal((DRAWS, len(prior)))
    factor, offset = rng.standard_normal((2, DRAWS, 1))
    found: Floats = missed + FACTOR_SPREAD * factor * prior + OFFSET * scale * offset
    return found


def _matched(gain: Floats, turn: Ints, surprise: Floats) -> Floats:
    """By how much each draw moves to meet the measurements, (DRAWS, points)."""
    moved = np.empty((len(turn), gain.shape[2]))
    for cell in range(len(gain)):
        own = turn == cell
        moved[own] = surprise[own] @ gain[cell]
    return moved


def _drawn(covariances: Floats, rng: np.random.Generator) -> Floats:
    """Draws with each covariance, (lengths, DRAWS, points)."""
    count = covariances.shape[1]
    roots = np.linalg.cholesky(covariances + _JITTER * np.eye(count))
    return np.stack([rng.standard_normal((DRAWS, count)) @ root.T for root in roots])
