"""Several objectives as one: a random weight for each, another one for every trial.

With one weight after another, the points that are best by them lie all over the front. What points
cost is known by arithmetic (memory) or by those that answer alike (quality), unlike what they gain,
which is for the model to learn.

The sum is the augmented Chebyshev scalarisation of Steuer and Choo (1983), drawn anew for each
trial as in ParEGO (Knowles, 2006).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from pydantic import JsonValue

from kvtune.autotune.explore.candidates import Candidate, key_of
from kvtune.autotune.explore.likeness import Floats, Ints
from kvtune.autotune.limits import Also
from kvtune.policies.base import Context
from kvtune.policies.capacity import kv_bytes_per_token, pool_of
from kvtune.policies.kv_memory import SHARE, STOCK_SHARE_RATIO
from kvtune.types import Harm

AUGMENTED = 0.05
"""How much all that is lost counts beside the worst of it: of points with the same worst loss, the
one that loses less elsewhere is better (Knowles, 2006)."""

LEAST_SPREAD = 0.1
"""Share of the goal's own objective: where the cheapest point has nearly as much as any, what is
left to lose is no reason to give everything else up for it."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """One weight for each objective.

    `weights` are (1 + costs,) and add up to 1, that of the goal's own objective first: `most` of it
    loses nothing, and `most - spread` all that there is to lose on the front. `losses` are (costs,
    points): 0 for the cheapest point, 1 for the one with the most of the goal's own objective.
    """

    weights: Floats
    most: float
    spread: float
    losses: Floats

    def of(self, objective: Floats, rows: Ints | None = None) -> Floats:
        """What points with these objectives are worth, at least 0; more is better.

        Args:
            objective: (..., points), or (..., rows, any) of the points in `rows` alone.
            rows: which points.
        """
        weighted = self.weights[1:, None] * self.losses
        worst, total = weighted.max(axis=0), weighted.sum(axis=0)
        if rows is not None:
            worst, total = worst[rows, None], total[rows, None]
        own = self.weights[0] * (self.most - objective) / self.spread
        found = 1 + AUGMENTED - np.maximum(own, worst) - AUGMENTED * (own + total)
        return np.asarray(np.maximum(found, 0.0))


def weighing_of(
    also: Sequence[Also],
    points: Sequence[Candidate],
    known: Sequence[tuple[int, Mapping[str, float]]],
    ctx: Context,
    *,
    expected: Floats,
    seed: Sequence[int],
) -> Weighing:
    """Draw a weighing; objectives count by how far they are apart at the ends of the front.

    Args:
        also: the objectives beside the goal's own one.
        points: the points of a region.
        known: rows of measured points with what each costs, by objective.
        ctx: what is known once the baseline was measured.
        expected: (points,) what is expected of the goal's own objective; not 0 everywhere.
        seed: of the weights.
    """
    weights = np.random.default_rng(list(seed)).dirichlet(np.ones(1 + len(also)))
    costs = [_costs(one, points, known, ctx) for one in also]
    fastest = int(expected.argmax())
    most = float(expected[fastest])
    least = min((float(expected[own == own.min()].max()) for own in costs), default=most)
    losses = np.array([_shares(own, fastest) for own in costs])
    return Weighing(weights, most, max(most - least, LEAST_SPREAD * most), losses)


def _costs(
    also: Also,
    points: Sequence[Candidate],
    known: Sequence[tuple[int, Mapping[str, float]]],
    ctx: Context,
) -> Floats:
    """What each point costs, (points,); of what nobody knows, the least that is known.

    So settings of a kind that was never measured are tried sooner rather than never.
    """
    measured: dict[str, list[float]] = {}
    for row, costs in known:
        if also in costs:
            measured.setdefault(_kind(also, points[row]), []).append(costs[also])
    means = {kind: fmean(values) for kind, values in measured.items()}
    found = [_cost(also, point, means, ctx) for point in points]
    least = min((cost for cost in found if cost is not None), default=0.0)
    return np.array([least if cost is None else cost for cost in found], dtype=np.float64)


def _cost(also: Also, point: Candidate, means: Mapping[str, float], ctx: Context) -> float | None:
    if also is Also.QUALITY and point.stack.harm is Harm.LOSSLESS:
        return 0.0
    if (kind := _kind(also, point)) in means:
        return means[kind]
    if also is Also.MEMORY:
        return foretold_bytes({**ctx.base_arguments, **point.stack.arguments}, ctx)
    return None


def _kind(also: Also, point: Candidate) -> str:
    """Equal for points that cost the same: answers depend on nothing but what may change them."""
    if also is Also.MEMORY:
        return point.key
    changing = [one for one in point.stack.choices if one.harm is not Harm.LOSSLESS]
    return key_of({name: value for one in changing for name, value in one.arguments.items()})


def foretold_bytes(arguments: Mapping[str, JsonValue], ctx: Context) -> float | None:
    """The bytes of the KV pool on each device under `arguments`; None where they are not known.

    What a larger share of a device's memory gives the engine goes to the pool.
    """
    if "num-gpu-blocks-override" in arguments:
        pool, each = pool_of(arguments, ctx), kv_bytes_per_token(arguments, ctx)
        return None if pool is None or each is None else float(pool.tokens * each)
    base = None if ctx.baseline is None else ctx.baseline.kv_cache_memory_bytes
    if base is None or ctx.device.memory_bytes is None:
        return None
    share, before = (one.get(SHARE, STOCK_SHARE_RATIO) for one in (arguments, ctx.base_arguments))
    if not isinstance(share, int | float) or not isinstance(before, int | float):
        return None
    return base + (share - before) * ctx.device.memory_bytes


def _shares(costs: Floats, fastest: int) -> Floats:
    """Each cost beside the least one, as a share of what the fastest point costs beside it.

    Where that costs no more, as a share of the range of all.
    """
    beside = costs - costs.min()
    spread = float(beside[fastest]) or float(beside.max())
    found: Floats = beside / spread if spread > 0 else beside
    return found
