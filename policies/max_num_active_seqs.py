"""How many requests are admitted, with the engine's buffers left as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.concurrency import SMALLEST, batch_widths, why_widths
from kvtune.policies.settings import base_settings
from kvtune.types import Choice, Harm


class MaxNumActiveSeqs(Policy):
    """Admit fewer requests than the buffers and CUDA graphs are made for.

    It bounds the batch like `max-num-seqs`, so the two are never set together: this one is active
    while that one is at its default.
    """

    name: ClassVar[str] = "max_num_active_seqs"
    title: ClassVar[str] = "requests admitted at once"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "preemption"
    arguments: ClassVar[tuple[str, ...]] = ("max-num-active-seqs",)

    def supports(self, ctx: Context) -> Support:
        """Refuse where `max_num_seqs` is offered and does just the same."""
        fixed = super().supports(ctx)
        if not fixed.ok:
            return fixed
        if ctx.max_concurrency is not None and ctx.max_concurrency <= SMALLEST:
            return Support.no(f"the load never has more than {ctx.max_concurrency} in flight")
        if ctx.platform == "cpu" and not ctx.fixed("max-num-seqs"):
            return Support.no(
                "a CPU has no CUDA graphs for it to spare, so it would repeat max_num_seqs"
            )
        return Support.yes()

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer widths below the batch's."""
        width = base_settings(ctx).max_num_seqs
        widths = [active for active in batch_widths(ctx, width) if active <= width]
        if len(widths) == 1:
            return ()
        return (
            Knob.choice(
                self.name,
                widths,
                default=width,
                unit="requests",
                because=why_widths(ctx),
                active_when={"max_num_seqs": (width,)},
            ),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set `max-num-active-seqs`."""
        values = self.complete(parameters, ctx)
        width = base_settings(ctx).max_num_seqs
        active = values.get(self.name, width)
        if active == width:
            return self.make_choice(values, {}, f"as many requests as the batch holds, {width}")
        because = (
            f"at most {active} requests are admitted at once while buffers stay sized for {width}: "
            f"{why_widths(ctx)}"
        )
        return self.make_choice(values, {"max-num-active-seqs": active}, because)
