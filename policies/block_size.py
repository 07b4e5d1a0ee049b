"""How many tokens a KV block holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy
from kvtune.policies.settings import base_settings, read_count
from kvtune.types import Choice, Harm

# The CPU kernels take multiples of 32 only and refuse to start with anything else.
SIZES = {"cpu": (32, 64, 128, 256), "cuda": (16, 32, 64, 128)}


class BlockSize(Policy):
    """Choose the KV block: the unit in which memory is given out and prefixes are matched.

    Smaller blocks strand fewer tokens at the end of each request and match longer prefixes; larger
    blocks mean fewer table look-ups.
    """

    name: ClassVar[str] = "block_size"
    title: ClassVar[str] = "tokens in a KV block"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "capacity"
    arguments: ClassVar[tuple[str, ...]] = ("block-size",)

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer the sizes of the platform; how many of them fit depends on other levers too."""
        stock = base_settings(ctx).block_tokens
        unit = read_count(ctx.base_arguments.get("prefix-match-unit")) or 1
        sizes = sorted({*(size for size in SIZES[ctx.platform] if size % unit == 0), stock})
        if len(sizes) == 1:
            return ()
        return (
            Knob.choice(
                self.name,
                sizes,
                default=stock,
                unit="tokens",
                because="small blocks waste less of the KV pool at the end of each request"
                + _reuse(ctx),
            ),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set `block-size`."""
        values = self.complete(parameters, ctx)
        stock = base_settings(ctx).block_tokens
        size = read_count(values.get(self.name)) or stock
        if size == stock:
            return self.make_choice(values, {}, f"the engine's own block of {stock} tokens")
        effect = (
            "less of the KV pool is wasted at the end of a request"
            if size < stock
            else "fewer blocks are looked up and hashed"
        )
        because = f"blocks of {size} tokens instead of {stock}: {effect}{_reuse(ctx)}"
        return self.make_choice(values, {"block-size": size}, because)


def _reuse(ctx: Context) -> str:
    """Say how the reusable share of prompt tokens depends on the block, where that is known."""
    shares = ctx.fingerprint.reusable_prefix_share if ctx.fingerprint else {}
    shown = [f"{shares[size]:.0%} at {size}" for size in sorted(shares)]
    if not shown or max(shares.values()) - min(shares.values()) < 0.01:
        return ""
    return f"; reusable share of prompt tokens by block size: {', '.join(shown)}"
