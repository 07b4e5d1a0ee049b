"""The engine that a simulation runs: its pool and its limits under engine arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from pydantic import JsonValue

from kvtune.autotune.forecast.replay import System
from kvtune.autotune.forecast.sparse_reads import sparse_reads
from kvtune.engines.simulated.scheduler import Limits
from kvtune.errors import BadInput
from kvtune.policies.base import Context
from kvtune.policies.capacity import (
    DTYPE_BYTES,
    SKIP,
    Pool,
    kv_bytes_per_token,
    pool_of,
    skipped_layers,
)
from kvtune.policies.footprint import stored_bytes
from kvtune.policies.kv_dtype import FP8
from kvtune.policies.kv_memory import SHARE, SIZED_BY, STOCK_SHARE_RATIO
from kvtune.policies.method import LayerShape
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.plugin_arguments import (
    EVICTION_SHARE,
    HOST_BYTES,
    OPTION,
    QUEST_TOKENS,
    STORE_FORMAT,
    WINDOW_TOKENS,
    asked_by,
    kv_format,
)
from kvtune.policies.plugin_config import SECTION, PluginConfig, plugin_config
from kvtune.policies.settings import read_count, settings_of
from kvtune.policies.stack import RULES
from kvtune.policies.store_bytes import cell_bytes

MODELLED = frozenset(
    {
        "block-size",
        "enable-prefix-caching",
        SHARE,
        "kv-cache-dtype",
        SKIP,
        "kv-cache-memory-bytes",
        "kv-offloading-size",
        EVICTION_SHARE,
        HOST_BYTES,
        QUEST_TOKENS,
        STORE_FORMAT,
        WINDOW_TOKENS,
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
"""The arguments whose effect the simulation knows; the time to hash a block counts as none. What a
share of memory does is known on a GPU only."""

PLUGIN_PARTS = frozenset(
    {
        *("schema_version", "protect", "quest", "streaming_llm"),
        *("page_eviction", "store", "tiers"),
    }
)
"""What the simulation knows of kvtune's plugin, but for what `_of_plugin` leaves out."""

ONCE = frozenset({"chunkkv", "snapkv"})
"""Methods of page eviction by which pages leave once, when a prompt is computed."""

FORMATS: Mapping[str, str] = {
    "fp8": "vllm-fp8",
    "fp8_per_token_head": "vllm-fp8-per-token-head",
    "int8_per_token_head": "vllm-int8-per-token-head",
    "int4_per_token_head": "vllm-int4-per-token-head",
    "turboquant_k8v4": "vllm-turboquant:preset=k8v4",
    "turboquant_4bit_nc": "vllm-turboquant:preset=4bit_nc",
    "turboquant_k3v4_nc": "vllm-turboquant:preset=k3v4_nc",
    "turboquant_3bit_nc": "vllm-turboquant:preset=3bit_nc",
}
"""vLLM's number formats and the methods that account for them."""

FULL = frozenset({"auto", *(dtype for dtype, size in DTYPE_BYTES.items() if size > 1)})
"""Number formats that are no smaller than what a model computes in. All others are."""

NAME_CHECKPOINT = "name the checkpoint with --model"

SAME = 0.01
"""How far the blocks that a model's bytes give may be from those that the engine reports."""


def as_reported(ctx: Context) -> Context:
    """The same, with what the engine says of its formats, limits and plugin among the arguments.

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
    if seen.plugin is not None:
        # One that says what this kvtune does not know is for nobody here to simulate.
        with suppress(BadInput):
            plugin_config({SECTION: seen.plugin})
            reported[OPTION] = {SECTION: seen.plugin}
    known = {name: value for name, value in reported.items() if value is not None}
    return replace(ctx, base_arguments={**ctx.base_arguments, **known})


def system_of(arguments: Mapping[str, JsonValue], ctx: Context) -> System | None:
    """The engine under `arguments`, those of `as_reported(ctx)` included; None: pool not known."""
    now = settings_of(arguments, ctx)
    pool = _pool(arguments, ctx)
    if pool is None:
        return None
    watermark = arguments.get("watermark")
    tier_bytes, block_bytes = _tier_bytes(arguments), _block_bytes(pool, arguments, ctx)
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
        tier_blocks=int(tier_bytes / block_bytes) if block_bytes else 0,
        reads=sparse_reads(now, ctx.model),
        longest_tokens=now.max_model_len_tokens,
        in_flight_tokens=now.in_flight_tokens,
    )


def _tier_bytes(arguments: Mapping[str, JsonValue]) -> float:
    """Bytes of host memory behind the pool: vLLM's own offload, or the plugin's tiers."""
    tiers, offload = asked_by(arguments).tiers, arguments.get("kv-offloading-size")
    if tiers is not None:
        return tiers.host_bytes
    return offload * (1 << 30) if isinstance(offload, int | float) else 0


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
    smaller = _smaller(arguments, ctx)
    return None if smaller is None else each / smaller * pool.block_tokens


def pool_bytes(ctx: Context) -> int | None:
    """Bytes of the pool of the baseline; None where nothing says it."""
    asked, seen = read_count(ctx.base_arguments.get("kv-cache-memory-bytes")), ctx.baseline
    if asked is not None or seen is None:
        return asked
    if seen.kv_cache_memory_bytes is not None or ctx.platform == "cpu":
        return seen.kv_cache_memory_bytes
    # A pool that a share of a GPU's memory sizes is reported in blocks alone.
    each = kv_bytes_per_token(ctx.base_arguments, ctx)
    if each is None or seen.num_gpu_blocks is None or seen.block_size_tokens is None:
        return None
    return seen.num_gpu_blocks * seen.block_size_tokens * each


def base_share(ctx: Context) -> float | None:
    """Share of a GPU's memory that the baseline takes for all it holds; None: it takes none.

    None too for a server of which nobody said it.
    """
    sized = any(ctx.fixed(argument) for argument in SIZED_BY)
    asked = ctx.base_arguments.get(SHARE)
    if sized or ctx.platform == "cpu":
        return None
    if asked is None:
        attached = ctx.baseline is not None and ctx.baseline.start_kind == "attached"
        return None if attached else STOCK_SHARE_RATIO
    return float(asked) if isinstance(asked, int | float) else None


def share_bytes(share: JsonValue, ctx: Context) -> int:
    """Bytes of the pool of each GPU under another `share` of its memory.

    vLLM gives the pool what weights, activations and graphs leave of the share. These stay as they
    are, so that all of a difference is the pool's.

    Raises:
        BadInput: something that decides it is not known, or nothing is left for the pool.
    """
    before, memory, pool = base_share(ctx), ctx.device.memory_bytes, pool_bytes(ctx)
    if before is None or not isinstance(share, int | float):
        raise _share_unknown("the server's own share", "name it with --engine-args")
    if memory is None:
        raise _share_unknown("the memory of the device", "run this where the server runs")
    if pool is None:
        raise _share_unknown("the pool in bytes", NAME_CHECKPOINT)
    found = pool + math.ceil(memory * share) - math.ceil(memory * before)
    if found <= 0:
        raise BadInput(f"{SHARE} {share:g} leaves the pool no memory", fix="give it more")
    return found


def _share_unknown(what: str, fix: str) -> BadInput:
    return BadInput(f"{SHARE} is not part of the simulation where {what} is not known", fix=fix)


def _has_other_share(arguments: Mapping[str, JsonValue], ctx: Context) -> bool:
    """Whether a share of memory sizes the pool, and not the one of the baseline."""
    sized = any(arguments.get(name) is not None for name in SIZED_BY)
    return not sized and arguments.get(SHARE) != ctx.base_arguments.get(SHARE)


def not_modelled(arguments: Mapping[str, JsonValue], ctx: Context) -> str:
    """Why it is not known what `arguments` do on top of the baseline's; empty when it is."""
    modelled = MODELLED - {SHARE} if ctx.platform == "cpu" else MODELLED
    if unknown := sorted(set(arguments) - modelled):
        return f"{', '.join(unknown)} is not part of the simulation"
    together = {**ctx.base_arguments, **arguments}
    if more := _of_plugin(asked_by(together)):
        return f"{more} of kvtune's plugin is not part of the simulation"
    if _smaller(together, ctx) is None:
        return _not_accounted(together, ctx)
    if _has_other_share(together, ctx):
        try:
            share_bytes(together.get(SHARE), ctx)
        except BadInput as error:
            return error.message
    return ""


def _of_plugin(asked: PluginConfig) -> str:
    """What is asked of the plugin that the simulation does not know; empty: all is known."""
    if more := asked.model_fields_set - PLUGIN_PARTS:
        return ", ".join(sorted(more))
    if asked.page_eviction is not None and asked.page_eviction.method not in ONCE:
        return f"page_eviction by {asked.page_eviction.method}"
    if asked.tiers is None:
        return ""
    if asked.tiers.disk_bytes:
        return "tiers.disk_bytes"
    return "tiers beside streaming_llm" if asked.streaming_llm is not None else ""


def _not_accounted(arguments: Mapping[str, JsonValue], ctx: Context) -> str:
    dtypes = (kv_format(one) for one in (ctx.base_arguments, arguments))
    dtype = next(dtype for dtype in dtypes if dtype not in DTYPE_BYTES and dtype != "auto")
    is_known = dtype.startswith("store") or method_of(dtype) is not None
    fix = f": {NAME_CHECKPOINT}" if is_known and ctx.model is None else ""
    return f"what a token takes in {dtype} is not known{fix}"


def _pool(arguments: Mapping[str, JsonValue], ctx: Context) -> Pool | None:
    """The pool by the model's bytes if they explain the baseline's, else in proportion to it."""
    if _has_other_share(arguments, ctx):
        memory_bytes = share_bytes(arguments.get(SHARE), ctx)
        arguments = {**arguments, "kv-cache-memory-bytes": memory_bytes}
    seen = ctx.baseline
    exact = pool_of(arguments, ctx)
    if seen is None or seen.num_gpu_blocks is None or seen.block_size_tokens is None:
        return exact
    base = pool_of(ctx.base_arguments, ctx)
    explained = base is not None and abs(base.blocks / seen.num_gpu_blocks - 1) <= SAME
    if explained and exact is not None:
        return exact
    block_tokens = settings_of(arguments, ctx).block_tokens
    if (override := read_count(arguments.get("num-gpu-blocks-override"))) is not None:
        return Pool(override, block_tokens)
    memory, asked = pool_bytes(ctx), read_count(arguments.get("kv-cache-memory-bytes"))
    smaller = _smaller(arguments, ctx)
    if smaller is None or (asked is not None and memory is None):
        return None
    more = 1.0 if asked is None or memory is None else asked / memory
    # Up to one block's memory was left over, which other blocks may use: half of it is expected.
    tokens = (seen.num_gpu_blocks + 0.5) * seen.block_size_tokens * more * smaller
    return Pool(int(tokens / block_tokens), block_tokens)


def _smaller(arguments: Mapping[str, JsonValue], ctx: Context) -> float | None:
    """How many tokens take what one takes on the baseline; None where nothing says it."""
    base = ctx.base_arguments
    is_same = kv_format(arguments) == kv_format(base)
    if is_same and all(arguments.get(name) == base.get(name) for name in ("dtype", SKIP)):
        return 1.0
    before, after = _element_bytes(base, ctx), _element_bytes(arguments, ctx)
    return None if before is None or after is None else before / after


def _element_bytes(arguments: Mapping[str, JsonValue], ctx: Context) -> float | None:
    """Bytes of a cached number with its part of the scales, over all layers."""
    quantized, own = _layer_bytes(arguments, ctx)
    if quantized is None or not arguments.get(SKIP):
        return quantized
    if ctx.model is None:
        return None
    kept = skipped_layers(arguments, ctx.model) / ctx.model.layers
    return kept * own + (1 - kept) * quantized


def _layer_bytes(arguments: Mapping[str, JsonValue], ctx: Context) -> tuple[float | None, int]:
    """The same where no layer is skipped, as `kvtune plan` counts them, and where all are."""
    cached = str(arguments.get("kv-cache-dtype", "auto"))
    served = str(arguments.get("dtype", "auto"))
    own = DTYPE_BYTES.get(served, ctx.model.dtype_bytes if ctx.model else 2)
    if (store := asked_by(arguments).store) is not None:
        head_dim = ctx.model.head_dim if ctx.model else 0
        return cell_bytes(store, head_dim) / (2 * head_dim) if head_dim else None, own
    if cached == "auto" or cached in DTYPE_BYTES:
        return DTYPE_BYTES.get(cached, own), own
    stack, model = method_of(cached), ctx.model
    if stack is None or model is None:
        return None, own
    width = model.head_dim
    layers = [
        LayerShape(index, model.layers, model.query_heads, model.kv_heads, width, width, own)
        for index in range(model.layers)
    ]
    return stored_bytes(parse_stack(stack), layers, 1) / model.kv_bytes_per_token(1), own


def method_of(dtype: str) -> str | None:
    """The method that accounts for a number format, as `kvtune plan` takes it; None: none does."""
    if dtype in FULL:
        return "full"
    return FORMATS.get("fp8" if dtype in FP8 else dtype)


def refusal(arguments: Mapping[str, JsonValue], ctx: Context) -> str:
    """Why the engine would not start under `arguments`; empty when it would."""
    now = settings_of(arguments, ctx)
    broken = (rule.reason for rule in RULES if rule.effect == "refused" and rule.broken(now))
    return next(broken, "")
