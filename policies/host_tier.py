"""Host memory behind the prefix cache: the tiers of kvtune's plugin for vLLM.

vLLM's own offload runs on GPUs only. Here too what comes back is what was computed, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context
from kvtune.policies.capacity import pool_bytes
from kvtune.policies.plugin_arguments import HOST_BYTES
from kvtune.policies.plugin_lever import PluginLever
from kvtune.policies.prefix_caching import REUSE_RATIO, reuse_ratio
from kvtune.policies.settings import GIB, read_count
from kvtune.types import Bottleneck, Harm

KNOB = "tier_host_bytes"
SHARES = (0.125, 0.25)
"""Of the memory that the pool leaves; the model and all else on the machine live there too."""

MOST_POOLS = 16
"""More than so many pools are not tried: a server takes all of it when it starts."""

STEP_BYTES = 64 << 20
"""Sizes are multiples of this, so that a few bytes less of memory are no other point."""

MAY_LOSE_PREFIXES = (Bottleneck.KV_CAPACITY, Bottleneck.PREFIX_THRASH, Bottleneck.ABSTAIN)
_ALONE = {
    "enable-lora": "tiers know an adapter by its name only, and enable-lora is fixed",
    "data-parallel-size": "tiers were never tried with data parallelism, which is fixed",
}


class HostTier(PluginLever):
    """Keep computed pages in host memory, for prompts that begin alike after the pool lost them."""

    name: ClassVar[str] = "host_tier"
    title: ClassVar[str] = "host memory behind the prefix cache"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "prefill"
    arguments: ClassVar[tuple[str, ...]] = (HOST_BYTES,)
    part: ClassVar[str] = "tiers"
    called: ClassVar[str] = "tiers are"
    knob_name: ClassVar[str] = KNOB
    unit: ClassVar[str] = "bytes"
    off: ClassVar[JsonValue] = 0

    def wanted(self, ctx: Context) -> tuple[JsonValue, ...]:
        """Shares of the memory that the pool leaves, if larger than it.

        They are at most several pools, and at most what the user allows.
        """
        total, pool = ctx.device.memory_bytes, pool_bytes(ctx.base_arguments, ctx)
        if total is None or pool is None:
            return ()
        allowed = total if ctx.max_host_bytes is None else ctx.max_host_bytes
        most = min(MOST_POOLS * pool, allowed)
        shares = (min(int((total - pool) * share), most) for share in SHARES)
        sizes = {size // STEP_BYTES * STEP_BYTES for size in shares}
        return tuple(sorted(size for size in sizes if size > pool))

    def unneeded(self, ctx: Context) -> str:
        """Refuse where few prompts begin alike, or where something else binds."""
        if ctx.max_host_bytes == 0:
            return "--max-host-memory 0 lets no setting take host memory"
        for argument, reason in _ALONE.items():
            value = ctx.base_arguments.get(argument)
            if value is True or (read_count(value) or 1) > 1:
                return reason
        if (reuse := reuse_ratio(ctx)) is None:
            return "it is not known how much prompts share"
        if reuse < REUSE_RATIO:
            return f"{reuse:.0%} of prompt tokens could be reused, too few to keep them for"
        verdict = ctx.verdict
        if (
            verdict is not None
            and verdict.confidence == "high"
            and verdict.bottleneck not in MAY_LOSE_PREFIXES
        ):
            return f"the workload is bound by {verdict.bottleneck.value}, not by lost prefixes"
        if self.wanted(ctx):
            return ""
        if ctx.max_host_bytes is not None and self.wanted(replace(ctx, max_host_bytes=None)):
            return (
                f"--max-host-memory lets it take {ctx.max_host_bytes / GIB:.2f} GiB, and the pool "
                "has as much itself"
            )
        return "the pool leaves no memory that is known to be larger than itself: set --kv-memory"

    def because(self, ctx: Context) -> str:
        """Say how much could come back."""
        return (
            f"{reuse_ratio(ctx) or 0:.0%} of prompt tokens could be reused, and those that fall "
            "out of the pool are computed again"
        )

    def takes_bytes(self, parameters: Mapping[str, JsonValue]) -> int:
        """All of it is taken when the server starts."""
        return read_count(parameters.get(KNOB, self.off)) or 0

    def says(self, value: JsonValue) -> str:
        """Say what is kept where."""
        if not isinstance(value, int) or value == self.off:
            return "what falls out of the pool is computed again"
        return f"{value / GIB:.2f} GiB of host memory give back prefixes that fall out of the pool"
