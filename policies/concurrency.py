"""Which batch widths are worth trying for a load."""

from __future__ import annotations

from itertools import count, takewhile

from kvtune.policies.base import Context
from kvtune.policies.capacity import resident_requests

SMALLEST = 2


def batch_widths(ctx: Context, stock: int) -> tuple[int, ...]:
    """Return batch widths in ascending order, `stock` among them; only `stock` if none binds.

    Widths step by powers of two and the value between them. A width above what the load reaches
    changes nothing, so the widest is the first that covers the load's concurrency, or what the KV
    pool holds. What it holds is an estimate, so widths go from an eighth to eight times of it.
    """
    load = ctx.max_concurrency or stock
    resident = resident_requests(ctx)
    useful = load if resident is None else min(load, resident)
    low = max(SMALLEST, min(stock, useful) // 8)
    binding = min(stock, load, 8 * useful + 1)
    narrower = {step for step in _steps(below=binding) if step >= low}
    wider = {step for step in _covering(useful) if useful > stock and step > stock}
    return tuple(sorted({*narrower, stock, *wider}))


def why_widths(ctx: Context) -> str:
    """Say what the range of `batch_widths` rests on."""
    resident = resident_requests(ctx)
    facts = []
    if ctx.max_concurrency is not None:
        facts.append(f"the load never has more than {ctx.max_concurrency} requests in flight")
    if resident is not None:
        facts.append(f"the KV pool holds about {resident} requests")
    return " and ".join(facts) or "neither the load's concurrency nor the KV pool is known yet"


def _steps(below: int) -> list[int]:
    """Return 2, 3, 4, 6, 8, 12, ... below a bound."""
    every = ((2 + index % 2) << index // 2 for index in count())
    return list(takewhile(lambda step: step < below, every))


def _covering(width: int) -> list[int]:
    """Return the steps up to the first one that is at least `width`."""
    below = _steps(below=width)
    return _steps(below=2 * width + 3)[: len(below) + 1]
