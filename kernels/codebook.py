"""Non-uniform codebooks from data: weighted k-means of numbers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

_STARTS = 256  # Cells of each of the two grids that the start is optimal on.


def weighted_kmeans(values: Tensor, weights: Tensor, k: int, iterations: int = 50) -> Tensor:
    """Return k centroids that minimise the weighted squared distance (KVQuant, 2401.18079).

    Numbers on a line need no random start: dynamic programming finds the best clusters of a coarse
    grid, and Lloyd's iterations refine them on all values. With up to 256 distinct values the
    start is already the optimum. Every result is the same on every device.

    Args:
        values: (n,) numbers, any float dtype; worked on in float64 on the CPU.
        weights: (n,) at least 0, such as squared gradients; values of weight 0 have no say.
        k: at least 1.
        iterations: the most refinements; they end early when nothing moves.

    Returns:
        (k,) ascending, float32 (float64 for float64 values), on the device of `values`. With fewer
        than k distinct values the largest is repeated.

    Raises:
        ValueError: shapes differ, `k` is below 1, a weight is negative, all are 0, or a number is
            not finite.
    """
    if values.shape != weights.shape or values.dim() != 1:
        raise ValueError(
            f"values and weights must be two equal rows but are {tuple(values.shape)} "
            f"and {tuple(weights.shape)}"
        )
    if k < 1:
        raise ValueError(f"k must be at least 1 but got {k}")
    points, mass = _distinct(values, weights)
    centre = float(np.average(points, weights=mass))
    # Sums of squares lose fewer digits about the mean.
    centroids = _refined(points - centre, mass, _start(points - centre, mass, k), iterations)
    padded = np.pad(centroids + centre, (0, k - len(centroids)), mode="edge")
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.from_numpy(padded).to(values.device, dtype)


def _distinct(values: Tensor, weights: Tensor) -> tuple[Array, Array]:
    """Return the ascending distinct values that weigh something, and their total weights."""
    raw = values.detach().double().cpu().numpy()
    raw_mass = weights.detach().double().cpu().numpy()
    if not (np.isfinite(raw).all() and np.isfinite(raw_mass).all()):
        raise ValueError("values and weights must be finite")
    if (raw_mass < 0).any():
        raise ValueError("weights must be at least 0")
    weighing = raw_mass > 0
    if not weighing.any():
        raise ValueError("at least one weight must be above 0")
    points, index = np.unique(raw[weighing], return_inverse=True)
    return points, np.bincount(index, raw_mass[weighing]).astype(np.float64)


def _start(points: Array, mass: Array, k: int) -> Array:
    """Return the best centroids, at most k, of clusters that are made of whole grid cells."""
    edges = _grid(points, mass)
    sums = _prefix_sums(points, mass)
    w, wx, wxx = (np.diff(total[edges]) for total in sums)
    cost = _segment_costs(w, wx, wxx)
    cells = len(w)
    clusters = min(k, cells)
    best = cost[0]
    cuts = np.zeros((clusters, cells), dtype=np.int64)
    for cluster in range(1, clusters):
        # Ends at cell j with this cluster starting at cell i: the best before i, plus i to j.
        before = np.concatenate(([np.inf], best[:-1]))
        candidates = before[:, None] + cost
        cuts[cluster] = candidates.argmin(axis=0)
        best = candidates.min(axis=0)
    starts = np.zeros(clusters, dtype=np.int64)
    end = cells - 1
    for cluster in range(clusters - 1, 0, -1):
        starts[cluster] = cuts[cluster, end]
        end = int(starts[cluster]) - 1
    cluster_mass = np.add.reduceat(w, starts)
    return np.asarray(np.add.reduceat(wx, starts) / cluster_mass)


def _grid(points: Array, mass: Array) -> NDArray[np.int64]:
    """Return the borders of cells as indices of `points`, all of them where there are few.

    Half the cells hold equal weight and half are equally wide, so that neither the bulk nor a far
    and light outlier shares one cell with everything near it.
    """
    n = len(points)
    if n <= _STARTS:
        return np.arange(n + 1)
    total = np.cumsum(mass)
    by_mass = np.searchsorted(total, np.linspace(0, total[-1], _STARTS + 1)[1:-1])
    by_width = np.searchsorted(points, np.linspace(points[0], points[-1], _STARTS + 1)[1:-1])
    return np.unique(np.concatenate(([0], by_mass, by_width, [n])))


def _segment_costs(w: Array, wx: Array, wxx: Array) -> Array:
    """Return (cells, cells): the weighted squared error of one cluster from cell i to cell j."""
    sums = (np.concatenate(([0.0], np.cumsum(part))) for part in (w, wx, wxx))
    mass, first, second = (total[None, 1:] - total[:-1, None] for total in sums)
    upward = np.triu(np.ones_like(mass, dtype=bool))
    safe_mass = np.where(upward, mass, 1.0)
    return np.where(upward, np.maximum(second - first**2 / safe_mass, 0.0), np.inf)


def _refined(points: Array, mass: Array, centroids: Array, iterations: int) -> Array:
    total_mass, total_first, _ = _prefix_sums(points, mass)
    for _ in range(iterations):
        borders = (centroids[1:] + centroids[:-1]) / 2
        edges = np.concatenate(([0], np.searchsorted(points, borders), [len(points)]))
        cluster_mass = np.diff(total_mass[edges])
        filled = cluster_mass > 0
        safe_mass = np.where(filled, cluster_mass, 1.0)
        moved = np.where(filled, np.diff(total_first[edges]) / safe_mass, centroids)
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    return centroids


def _prefix_sums(points: Array, mass: Array) -> tuple[Array, Array, Array]:
    """Return sums of weight, weight·x and weight·x² before each index, n + 1 long."""
    parts = (mass, mass * points, mass * points**2)
    weight, first, second = (np.concatenate(([0.0], np.cumsum(part))) for part in parts)
    return weight, first, second
