"""How much memory the KV pool gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.types import Choice, Harm

SHARE = "gpu-memory-utilization"
STOCK_SHARE_RATIO = 0.92
SHARES = (0.85, 0.88, 0.9, STOCK_SHARE_RATIO, 0.95)


SIZED_BY = ("num-gpu-blocks-override", "kv-cache-memory-bytes")
"""Arguments of the user that size the pool, whatever its share."""


class KvMemory(Policy):
    """Give the KV pool a share of the GPU's memory, to be found.

    Memory that the user gives it in bytes is all used: a smaller pool never serves more.
    """

    name: ClassVar[str] = "kv_memory"
    title: ClassVar[str] = "memory for the KV pool"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "capacity"
    arguments: ClassVar[tuple[str, ...]] = (SHARE,)

    def supports(self, ctx: Context) -> Support:
        """Offer it on a GPU whose share the user left open."""
        fixed = super().supports(ctx)
        if not fixed.ok:
            return fixed
        for argument in SIZED_BY:
            if ctx.fixed(argument):
                return Support.no(f"{argument} is fixed by --engine-args and sizes the pool")
        if ctx.platform == "cpu":
            return Support.no(
                f"on a CPU the engine takes {STOCK_SHARE_RATIO:.0%} of the memory by itself and a "
                "smaller pool serves no more; set --kv-memory to share the machine"
            )
        return Support.yes()

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer shares of GPU memory."""
        return (
            Knob.choice(
                "gpu_memory_utilization",
                SHARES,
                default=STOCK_SHARE_RATIO,
                because="a larger share holds more requests until the engine runs out of memory",
            ),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set the share of GPU memory."""
        values = self.complete(parameters, ctx)
        share = values.get("gpu_memory_utilization", STOCK_SHARE_RATIO)
        if share == STOCK_SHARE_RATIO:
            return self.make_choice(values, {}, "the engine's own share of GPU memory")
        because = (
            f"{share:.0%} of GPU memory instead of {STOCK_SHARE_RATIO:.0%} changes the KV pool"
        )
        return self.make_choice(values, {SHARE: share}, because)
