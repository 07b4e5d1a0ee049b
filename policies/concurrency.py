"""Which batch widths are worth trying for a load."""

from __future__ import annotations

from kvtune.policies.base import Context
from kvtune.policies.capacity import resident_requests

SMALLEST = 2


def batch_widths(ctx: Context, stock: int) -> tuple[int, ...]:
    """Return batch widths in ascending order, `stock` last; only `stock` if none binds.

    Widths step by powers of two and the value between them. A width that the load never reaches
    changes nothing, so the widest is below its concurrency; the narrowest is an eighth of what the
    KV pool holds, which is `SMALLEST` when the pool is scarce.
    """
    top = min(stock, ctx.max_concurrency or stock)
    resident = resident_requests(ctx)
    low = max(SMALLEST, min(top, top if resident is None else resident) // 8)
    steps = sorted(step << bits for bits in range(top.bit_length()) for step in (2, 3))
    return (*(width for width in steps if low <= width < top), stock)


def why_widths(ctx: Context) -> str:
    """Say what the range of `batch_widths` rests on."""
    resident = resident_requests(ctx)
    facts = []
    if ctx.max_concurrency is not None:
        facts.append(f"the load has at most {ctx.max_concurrency} requests in flight")
    if resident is not None:
        facts.append(f"the KV pool holds about {resident} of them")
    return " and ".join(facts) or "neither the load's concurrency nor the KV pool is known yet"
