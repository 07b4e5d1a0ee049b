"""The engine that a simulation runs: its pool and its limits under engine arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue

from kvtune.autotune.forecast.replay import System
from kvtune.engines.simulated.scheduler import Limits
from kvtune.policies.base import Context
from kvtune.policies.capacity import DTYPE_BYTES, Pool, pool_of
from kvtune.policies.settings import read_count, settings_of
from kvtune.policies.stack import RULES

MODELLED = frozenset(
    {
        "block-size",
        "enable-prefix-caching",
        "kv-cache-dtype",
        "kv-cache-memory-bytes",
        "kv-offloading-size",
        "long-prefill-token-threshold",
        "max-num-active-seqs",
        "max-num-batched-tokens",
        "max-num-seqs",
        "num-gpu-blocks-override",
        "prefix-caching-hash-algo",
        "scheduler-reserve-full-isl",
        "watermark",
    }
)
"""The arguments whose effect the simulation knows; the time to hash a block counts as none."""

SAME = 0.01
"""How far the blocks that a model's bytes give may be from those that the engine reports."""


def as_reported(ctx: Context) -> Context:
    """The same, with what the engine says of its number formats and limits among the arguments.

    A server that kvtune attached to may have been started with arguments that nobody named.
    """
    seen = ctx.baseline
    if seen is None:
        return ctx
    reported: dict[str, JsonValue] = {
        "kv-cache-dtype": seen.kv_cache_dtype,
        "dtype": seen.model_dtype,
        "long-prefill-token-threshold": seen.long_prefill_token_threshold_tokens,
        "scheduler-reserve-full-isl": seen.scheduler_reserve_full_isl,
        "watermark": seen.watermark_ratio,
    }
    if seen.max_num_active_seqs != seen.max_num_seqs:
        reported["max-num-active-seqs"] = seen.max_num_active_seqs
    known = {name: value for name, value in reported.items() if value is not None}
    return replace(ctx, base_arguments={**ctx.base_arguments, **known})


def system_of(arguments: Mapping[str, JsonValue], ctx: Context) -> System | None:
    """The engine under `arguments`, those of `as_reported(ctx)` included; None: pool not known."""
    now = settings_of(arguments, ctx)
    pool = _pool(arguments, ctx)
    if pool is None:
        return None
    watermark = arguments.get("watermark")
    tier, block_bytes = arguments.get("kv-offloading-size"), _block_bytes(pool, arguments, ctx)
    return System(
        blocks=pool.blocks,
        block_tokens=pool.block_tokens,
        limits=Limits(
            token_budget=now.max_num_batched_tokens,
            max_active=now.max_num_active_seqs,
            long_prefill_tokens=now.long_prefill_tokens,
            chunked_prefill=now.chunked_prefill,
            reserve_full_prompt=arguments.get("scheduler-reserve-full-isl") is not False,
            watermark_ratio=float(watermark) if isinstance(watermark, int | float) else 0.0,
            prefix_caching=now.prefix_caching,
        ),
        tier_blocks=int(tier * (1 << 30) / block_bytes)
        if isinstance(tier, int | float) and block_bytes
        else 0,
    )


def token_bytes(ctx: Context) -> float | None:
    """Bytes of the pool a token of it, on the baseline; None where nothing says it."""
    seen, memory = ctx.baseline, pool_bytes(ctx)
    if seen is None or memory is None or not seen.num_gpu_blocks or not seen.block_size_tokens:
        return None
    return memory / (seen.num_gpu_blocks * seen.block_size_tokens)


def _block_bytes(pool: Pool, arguments: Mapping[str, JsonValue], ctx: Context) -> float | None:
    each = token_bytes(ctx)
    if each is None:
        return None
    larger = _element_bytes(arguments, ctx) / _element_bytes(ctx.base_arguments, ctx)
    return each * larger * pool.block_tokens


def pool_bytes(ctx: Context) -> int | None:
    """Bytes of the pool of the baseline; None where nothing says it."""
    asked = read_count(ctx.base_arguments.get("kv-cache-memory-bytes"))
    if asked is not None or ctx.baseline is None:
        return asked
    return ctx.baseline.kv_cache_memory_bytes


def _pool(arguments: Mapping[str, JsonValue], ctx: Context) -> Pool | None:
    """The pool by the model's bytes if they explain the baseline's, else in proportion to it."""
    seen = ctx.baseline
    exact = pool_of(arguments, ctx)
    if seen is None or seen.num_gpu_blocks is None or seen.block_size_tokens is None:
        return exact
    base = pool_of(ctx.base_arguments, ctx)
    if base is not None and abs(base.blocks / seen.num_gpu_blocks - 1) <= SAME:
        return exact
    block_tokens = settings_of(arguments, ctx).block_tokens
    if (override := read_count(arguments.get("num-gpu-blocks-override"))) is not None:
        return Pool(override, block_tokens)
    memory, asked = pool_bytes(ctx), read_count(arguments.get("kv-cache-memory-bytes"))
    if asked is not None and memory is None:
        return None
    more = 1.0 if asked is None or memory is None else asked / memory
    smaller = _element_bytes(ctx.base_arguments, ctx) / _element_bytes(arguments, ctx)
    # Up to one block's memory was left over, which other blocks may use: half of it is expected.
    tokens = (seen.num_gpu_blocks + 0.5) * seen.block_size_tokens * more * smaller
    return Pool(int(tokens / block_tokens), block_tokens)


def _element_bytes(arguments: Mapping[str, JsonValue], ctx: Context) -> int:
    cached = str(arguments.get("kv-cache-dtype", "auto"))
    served = str(arguments.get("dtype", "auto"))
    own = ctx.model.dtype_bytes if ctx.model else 2
    return DTYPE_BYTES.get(cached, DTYPE_BYTES.get(served, own))


def refusal(arguments: Mapping[str, JsonValue], ctx: Context) -> str:
    """Why the engine would not start under `arguments`; empty when it would."""
    now = settings_of(arguments, ctx)
    broken = (rule.reason for rule in RULES if rule.effect == "refused" and rule.broken(now))
    return next(broken, "")
