"""Whether computed prefixes are kept for later requests, and how they are recognised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.settings import STOCK_HASH_ALGO, base_settings
from kvtune.types import Choice, Harm

ENABLE = "enable-prefix-caching"
HASH = "prefix-caching-hash-algo"
HASH_ALGOS = (STOCK_HASH_ALGO, "sha256_cbor")
REUSE_RATIO = 0.05
"""From this reusable share of prompt tokens on, turning the cache off is not worth a trial."""

NEEDS_XXHASH = (
    "needs the package xxhash beside the engine, which cannot be asked without starting it, and is "
    "not collision-safe between tenants"
)


class PrefixCaching(Policy):
    """Keep computed KV blocks for requests that start alike, or save the hashing when none do."""

    name: ClassVar[str] = "prefix_caching"
    title: ClassVar[str] = "reuse of shared prompt prefixes"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "prefill"
    arguments: ClassVar[tuple[str, ...]] = (ENABLE, HASH)

    def supports(self, ctx: Context) -> Support:
        """Refuse where the cache is off for good, or the user fixed all there is to choose."""
        if not base_settings(ctx).prefix_caching:
            who = "--engine-args" if ctx.fixed(ENABLE) else "the engine for this model"
            return Support.no(f"prefix caching is turned off by {who}")
        if all(ctx.fixed(argument) for argument in self.arguments):
            return Support.no(f"{ENABLE} and {HASH} are fixed by --engine-args")
        return Support.yes()

    def refused_values(self, ctx: Context) -> dict[str, str]:
        """Name the hash algorithms that are left out."""
        if ctx.fixed(HASH):
            return {}
        return {
            f"prefix_caching_hash_algo={algo}": NEEDS_XXHASH for algo in ("xxhash", "xxhash_cbor")
        }

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer to turn the cache off unless prompts share prefixes; else only the hash."""
        knobs = []
        reuse = reuse_ratio(ctx)
        if not ctx.fixed(ENABLE) and (reuse is None or reuse < REUSE_RATIO):
            because = (
                "how much prompts share is not known"
                if reuse is None
                else f"{reuse:.0%} of prompt tokens could be reused, too few to count on"
            )
            knobs.append(Knob.flag("enable_prefix_caching", default=True, because=because))
        if not ctx.fixed(HASH):
            knobs.append(
                Knob.choice(
                    "prefix_caching_hash_algo",
                    HASH_ALGOS,
                    default=STOCK_HASH_ALGO,
                    because="each full block is hashed once, and the two differ in CPU time",
                    active_when={"enable_prefix_caching": (True,)},
                )
            )
        return tuple(knobs)

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set `no-enable-prefix-caching`, or the hash algorithm."""
        values = self.complete(parameters, ctx)
        algo = values.get("prefix_caching_hash_algo", STOCK_HASH_ALGO)
        if values.get("enable_prefix_caching", True) is False:
            because = "prompts share too little for the hashing of every block to pay"
            return self.make_choice(values, {ENABLE: False}, because)
        if algo != STOCK_HASH_ALGO:
            because = f"{algo} recognises the same prefixes, serialised as CBOR instead of pickle"
            return self.make_choice(values, {HASH: algo}, because)
        return self.make_choice(values, {}, "prefixes are cached as the engine does by itself")


def reuse_ratio(ctx: Context) -> float | None:
    """Return the reusable share of prompt tokens at the block size in force, or the nearest one."""
    shares = ctx.fingerprint.reusable_prefix_share if ctx.fingerprint else {}
    if not shares:
        return None
    block = base_settings(ctx).block_tokens
    return shares[min(shares, key=lambda size: (abs(size - block), size))]
