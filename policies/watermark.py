"""How much of the KV pool is kept free when a request is admitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.capacity import pool_of
from kvtune.types import Choice, Harm

RATIOS = (0.02, 0.05, 0.1, 0.2)


class Watermark(Policy):
    """Admit a request only if some of the pool stays free, so that running ones can still grow."""

    name: ClassVar[str] = "watermark"
    title: ClassVar[str] = "share of the KV pool kept free at admission"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "preemption"
    arguments: ClassVar[tuple[str, ...]] = ("watermark",)

    def supports(self, ctx: Context) -> Support:
        """Refuse where no request is ever admitted beside another."""
        fixed = super().supports(ctx)
        if fixed.ok and ctx.max_concurrency == 1:
            return Support.no("one request at a time is always admitted")
        return fixed

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer the shares that are different numbers of whole blocks."""
        ratios = _distinct_ratios(ctx)
        if not ratios:
            return ()
        return (
            Knob.choice(
                self.name,
                (0.0, *ratios),
                default=0.0,
                because="free blocks at admission are what running requests grow into",
            ),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set `watermark`."""
        values = self.complete(parameters, ctx)
        ratio = values.get(self.name, 0.0)
        if ratio == 0.0:
            return self.make_choice(values, {}, "no block is kept free, as by default")
        because = f"{ratio:.0%} of the KV pool stays free at admission for running requests to grow"
        return self.make_choice(values, {"watermark": ratio}, because)


def _distinct_ratios(ctx: Context) -> tuple[float, ...]:
    """The engine keeps whole blocks, so in a small pool several shares are the same or none."""
    pool = pool_of(ctx.base_arguments, ctx)
    if pool is None:
        return RATIOS
    by_blocks: dict[int, float] = {}
    for ratio in RATIOS:
        by_blocks.setdefault(int(ratio * pool.blocks), ratio)
    return tuple(ratio for blocks, ratio in by_blocks.items() if blocks)
