"""How much memory the KV pool gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.capacity import memory_to_set
from kvtune.types import Choice, Harm

MIB = 1 << 20
BYTES = "kv-cache-memory-bytes"
SHARE = "gpu-memory-utilization"
STOCK_SHARE_RATIO = 0.92
SHARES = (0.85, 0.88, 0.9, STOCK_SHARE_RATIO, 0.95)


class KvMemory(Policy):
    """Give the KV pool its memory: exactly the user's limit, or a share of the GPU to be found.

    A smaller pool never serves more, so a limit is not searched: every stack uses all of it.
    """

    name: ClassVar[str] = "kv_memory"
    title: ClassVar[str] = "memory for the KV pool"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "capacity"
    arguments: ClassVar[tuple[str, ...]] = (BYTES, SHARE)

    def supports(self, ctx: Context) -> Support:
        """Offer it to enforce a limit, else on a GPU whose share the user left open."""
        if ctx.fixed("num-gpu-blocks-override"):
            return Support.no(
                "num-gpu-blocks-override is fixed by --engine-args and sizes the pool"
            )
        if memory_to_set(ctx) is not None:
            return Support.yes()
        fixed = super().supports(ctx)
        if not fixed.ok:
            return fixed
        if ctx.platform == "cpu":
            return Support.no(
                f"on a CPU the engine takes {STOCK_SHARE_RATIO:.0%} of the memory by itself and a "
                "smaller pool serves no more; set a memory limit to share the machine"
            )
        return Support.yes()

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer the share of GPU memory when there is no limit in bytes."""
        if memory_to_set(ctx) is not None:
            return ()
        return (
            Knob.choice(
                "gpu_memory_utilization",
                SHARES,
                default=STOCK_SHARE_RATIO,
                because="a larger share holds more requests until the engine runs out of memory",
            ),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set the limit in bytes, or the share of GPU memory."""
        values = self.complete(parameters, ctx)
        limit = memory_to_set(ctx)
        if limit is not None:
            size = f"{limit / MIB:,.1f} MiB a device"
            because = f"the KV pool is limited to {size}, and a smaller one serves less"
            return self.make_choice(values, {BYTES: limit}, because)
        share = values.get("gpu_memory_utilization", STOCK_SHARE_RATIO)
        if share == STOCK_SHARE_RATIO:
            return self.make_choice(values, {}, "the engine's own share of GPU memory")
        because = (
            f"{share:.0%} of GPU memory instead of {STOCK_SHARE_RATIO:.0%} changes the KV pool"
        )
        return self.make_choice(values, {SHARE: share}, because)
