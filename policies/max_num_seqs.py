"""How many requests are computed in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.concurrency import SMALLEST, batch_widths, why_widths
from kvtune.policies.settings import base_settings
from kvtune.types import Choice, Harm


class MaxNumSeqs(Policy):
    """Bound the batch: fewer requests share the KV pool, so fewer are preempted and recomputed."""

    name: ClassVar[str] = "max_num_seqs"
    title: ClassVar[str] = "requests in a batch"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "preemption"
    arguments: ClassVar[tuple[str, ...]] = ("max-num-seqs",)

    def supports(self, ctx: Context) -> Support:
        """Refuse where the load never fills a batch."""
        fixed = super().supports(ctx)
        if fixed.ok and ctx.max_concurrency is not None and ctx.max_concurrency <= SMALLEST:
            return Support.no(f"the load has at most {ctx.max_concurrency} requests in flight")
        return fixed

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer the widths below the load's concurrency."""
        stock = base_settings(ctx).max_num_seqs
        widths = batch_widths(ctx, stock)
        if len(widths) == 1:
            return ()
        return (
            Knob.choice(self.name, widths, default=stock, unit="requests", because=why_widths(ctx)),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set `max-num-seqs`."""
        values = self.complete(parameters, ctx)
        stock = base_settings(ctx).max_num_seqs
        width = values.get(self.name, stock)
        if width == stock:
            return self.make_choice(values, {}, f"the engine's own batch of up to {stock} requests")
        because = (
            f"at most {width} requests share the KV pool, so that they are not preempted and "
            f"computed again: {why_widths(ctx)}"
        )
        return self.make_choice(values, {"max-num-seqs": width}, because)
