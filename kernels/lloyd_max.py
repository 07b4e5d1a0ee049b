"""Lloyd-Max codebooks: the scalar quantizers with the least mean squared error.

For a density f, the levels c_i and the borders e_i between them are optimal when each border is
midway between its levels and each level is the mean of its cell (Lloyd, 1982; Max, 1960). Both
densities here are symmetric and log-concave, so that there is exactly one such codebook
(Fleischer, 1964). It is found by Newton's method on c_i - mean of cell i, which is tridiagonal and
takes a dozen steps where the fixed-point iteration takes 100,000 at 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

_TOLERANCE = 1e-12
_MOST_STEPS = 100

SMALLEST_SPHERE_DIM = 4
"""At 3 dimensions the density is uniform, below that it is no longer log-concave."""


@dataclass(frozen=True, slots=True)
class Codebook:
    """The optimal levels for a variable of mean 0 and variance 1.

    Attributes:
        bits: log2 of the number of levels.
        dim: of the sphere whose coordinates (times sqrt(dim)) are meant; None is N(0, 1).
        centroids: 2^bits ascending levels, symmetric about 0.
        distortion: expected squared error; the ratio of error to signal, as the variance is 1.
    """

    bits: int
    dim: int | None
    centroids: tuple[float, ...]
    distortion: float

    def tensor(self, device: torch.device | str = "cpu", scale: float = 1.0) -> Tensor:
        """Return the levels times `scale`, (2^bits,) float32: 1 / sqrt(d) for unit vectors."""
        scaled = [level * scale for level in self.centroids]
        return torch.tensor(scaled, dtype=torch.float32, device=device)


@lru_cache
def lloyd_max(bits: int, dim: int | None = None) -> Codebook:
    """Return the codebook of 2^bits levels.

    Args:
        bits: 1 to 8.
        dim: None for N(0, 1). An integer d means sqrt(d) times a coordinate of a uniform point on
            the sphere in R^d, whose density is proportional to (1 - t²/d)^((d-3)/2): what a
            rotated vector's channels follow exactly (TurboQuant, 2504.19874).

    Raises:
        ValueError: `bits` is not 1 to 8, or `dim` is below 4.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 to 8 but got {bits}")
    if dim is not None and dim < SMALLEST_SPHERE_DIM:
        raise ValueError(f"dim must be at least {SMALLEST_SPHERE_DIM} but got {dim}")
    half = 1 << (bits - 1)
    if dim is None:
        levels, mass = _solve(_companded(half), _normal_cells, _normal_density, math.inf)
    else:
        levels, mass = _solve(
            math.sqrt(dim) * np.tanh(_companded(half) / math.sqrt(dim)),
            partial(_sphere_cells, dim),
            partial(_sphere_density, dim),
            math.sqrt(dim),
        )
    centroids = np.concatenate((-levels[::-1], levels))
    distortion = 1 - 2 * float(np.sum(mass * levels**2))
    return Codebook(bits, dim, tuple(centroids.tolist()), distortion)


def nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """Return the index of the nearest centroid of each value; midway goes to the lower one.

    Args:
        x: any shape, any float dtype; compared in float32.
        centroids: (levels,) ascending, at most 256.

    Returns:
        x's shape, uint8.

    Raises:
        ValueError: there are more than 256 centroids.
    """
    if centroids.numel() > 256:
        raise ValueError(f"a code has 8 bits but there are {centroids.numel()} centroids")
    levels = centroids.float()
    borders = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(x.float().contiguous(), borders).to(torch.uint8)


def _solve(
    levels: Array,
    cells: Callable[[Array], tuple[Array, Array]],
    density: Callable[[Array], Array],
    end: float,
) -> tuple[Array, Array]:
    """Return the positive levels and the probability of each of their cells.

    Args:
        levels: start, ascending and positive.
        cells: from borders 0 = e_0 < ... < e_n to each cell's probability and first moment.
        density: f at finite borders.
        end: where the density ends.
    """
    for _ in range(_MOST_STEPS):
        inner = (levels[1:] + levels[:-1]) / 2
        mass, moment = cells(np.concatenate(([0.0], inner, [end])))
        means = moment / mass
        gap = levels - means
        if float(np.max(np.abs(gap))) < _TOLERANCE:
            return levels, mass
        f = density(inner)
        upper = f * (inner - means[:-1]) / mass[:-1] / 2  # How a mean follows the border above it,
        lower = f * (means[1:] - inner) / mass[1:] / 2  # and the one below, half per level.
        slope = np.eye(len(levels))
        slope[:-1, :-1] -= np.diag(upper)
        slope[1:, 1:] -= np.diag(lower)
        slope -= np.diag(upper, 1) + np.diag(lower, -1)
        step = np.linalg.solve(slope, gap).astype(np.float64)
        levels = _ordered_step(levels, step, end)
    raise ArithmeticError(f"no Lloyd-Max codebook of {2 * len(levels)} levels was found")


def _ordered_step(levels: Array, step: Array, end: float) -> Array:
    """Return levels - step, shortened until the levels stay ascending and inside the density."""
    while True:
        moved = levels - step
        if moved[0] > 0 and moved[-1] < end and bool(np.all(np.diff(moved) > 0)):
            return moved
        step = step / 2


def _companded(half: int) -> Array:
    """Return nearly optimal positive levels: quantiles of density^(1/3) (Panter, Dite, 1951)."""
    ranks = 0.5 + (np.arange(half) + 0.5) / (2 * half)
    return np.array([math.sqrt(3) * NormalDist().inv_cdf(rank) for rank in ranks])


def _normal_density(t: Array) -> Array:
    return np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)


def _normal_cells(borders: Array) -> tuple[Array, Array]:
    # Differences of upper tails keep their relative accuracy far out; those of erf do not.
    tails = np.array([math.erfc(border / math.sqrt(2)) / 2 for border in borders])
    return -np.diff(tails), -np.diff(_normal_density(borders))


def _sphere_density(dim: int, t: Array) -> Array:
    peak = math.exp(math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2)) / math.sqrt(math.pi * dim)
    return peak * np.maximum(1 - t**2 / dim, 0.0) ** ((dim - 3) / 2)


def _sphere_cells(dim: int, borders: Array) -> tuple[Array, Array]:
    # With t = sqrt(d) sin(a) the density becomes cos(a)^(d-2), smooth up to the end of the range.
    angles = np.arcsin(borders / math.sqrt(dim))
    nodes, weights = _quadrature(64 + dim // 4)
    middle, reach = (angles[1:] + angles[:-1]) / 2, np.diff(angles) / 2
    at = middle[:, None] + reach[:, None] * nodes
    peak = float(_sphere_density(dim, np.zeros(1))[0]) * math.sqrt(dim)
    values = peak * np.cos(at) ** (dim - 2) * weights * reach[:, None]
    return values.sum(-1), (values * math.sqrt(dim) * np.sin(at)).sum(-1)


@lru_cache
def _quadrature(points: int) -> tuple[Array, Array]:
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return nodes.astype(np.float64), weights.astype(np.float64)
