"""How many requests are computed in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.concurrency import SMALLEST, batch_widths, why_widths
from kvtune.policies.settings import base_settings, read_count
from kvtune.types import Choice, Harm


class MaxNumSeqs(Policy):
    """Bound the batch: fewer requests in it are preempted less, more in it wait less."""

    name: ClassVar[str] = "max_num_seqs"
    title: ClassVar[str] = "requests in a batch"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "preemption"
    arguments: ClassVar[tuple[str, ...]] = ("max-num-seqs",)

    def supports(self, ctx: Context) -> Support:
        """Refuse where the load never fills a batch."""
        fixed = super().supports(ctx)
        if fixed.ok and ctx.max_concurrency is not None and ctx.max_concurrency <= SMALLEST:
            return Support.no(f"the load never has more than {ctx.max_concurrency} in flight")
        return fixed

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer widths up to the load's concurrency."""
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
        width = read_count(values.get(self.name)) or stock
        if width == stock:
            return self.make_choice(values, {}, f"the engine's own batch of up to {stock} requests")
        effect = (
            "so that fewer are preempted and computed again"
            if width < stock
            else f"instead of {stock}, so that fewer wait for a place in the batch"
        )
        because = f"at most {width} requests share the KV pool, {effect}: {why_widths(ctx)}"
        return self.make_choice(values, {"max-num-seqs": width}, because)
