"""What fits into the KV pool: bytes, blocks and tokens, as vLLM counts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from kvtune.errors import BadInput
from kvtune.policies.base import Context
from kvtune.policies.model_shape import ModelShape
from kvtune.policies.plugin_arguments import OPTION, asked_by
from kvtune.policies.plugin_config import SECTION
from kvtune.policies.settings import base_settings, read_count, settings_of
from kvtune.policies.store_bytes import cell_bytes
from kvtune.types import EffectiveConfig

DTYPE, SKIP = "kv-cache-dtype", "kv-cache-dtype-skip-layers"
DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class Pool:
    """A KV pool of `blocks` blocks of `block_tokens` tokens; block 0 never holds a token."""

    blocks: int
    block_tokens: int

    @property
    def tokens(self) -> int:
        """The size that vLLM reports, the reserved block included."""
        return self.blocks * self.block_tokens

    @property
    def usable_blocks(self) -> int:
        """What requests can hold together."""
        return max(self.blocks - 1, 0)

    @property
    def usable_tokens(self) -> int:
        """Tokens of all usable blocks."""
        return self.usable_blocks * self.block_tokens


def kv_bytes_per_token(arguments: Mapping[str, JsonValue], ctx: Context) -> int | None:
    """Return the bytes a token takes on each device; None where that is not known exactly."""
    return None if ctx.model is None else kv_bytes_on_device(ctx.model, arguments)


def kv_bytes_on_device(shape: ModelShape, arguments: Mapping[str, JsonValue]) -> int | None:
    """Return the bytes a token of a model takes on each device under engine arguments.

    None where that is not known exactly.
    """
    if any(
        (read_count(arguments.get(name)) or 1) > 1
        for name in ("pipeline-parallel-size", "decode-context-parallel-size")
    ):
        return None
    each, own = (_element_bytes(one, shape) for one in (arguments, {**arguments, DTYPE: "auto"}))
    ranks = read_count(arguments.get("tensor-parallel-size")) or 1
    if each is None or own is None or (shape.kv_heads > ranks and shape.kv_heads % ranks):
        return None
    heads_here = max(shape.kv_heads // ranks, 1)
    if (store := asked_by(arguments).store) is not None:
        return shape.layers * heads_here * cell_bytes(store, shape.head_dim)
    kept = skipped_layers(arguments, shape)
    total = shape.kv_bytes_per_token(each) * (shape.layers - kept)
    total += shape.kv_bytes_per_token(own) * kept
    return total * heads_here // (shape.layers * shape.kv_heads)


def skipped_layers(arguments: Mapping[str, JsonValue], shape: ModelShape) -> int:
    """How many layers are held in the model's own format although the rest are not.

    vLLM 0.32 then gives every block the sum of what its layers take: SmolLM2 with fp8 has 160
    blocks where the first and last two of 30 layers are skipped, of 91 without and 182 with fp8.
    """
    named = arguments.get(SKIP)
    layers = named if isinstance(named, list) else [named]
    found = {count for one in layers if (count := read_count(one)) is not None}
    return sum(count < shape.layers for count in found)


def effective_kv_bytes(
    shape: ModelShape, arguments: Mapping[str, JsonValue], effective: EffectiveConfig | None
) -> int | None:
    """Return the same for a running server, whose number formats are those that it reports.

    None too where its plugin reports what this version does not know.
    """
    if effective is None:
        return kv_bytes_on_device(shape, arguments)
    reported: dict[str, JsonValue] = {
        "kv-cache-dtype": effective.kv_cache_dtype,
        "dtype": effective.model_dtype,
        OPTION: None if effective.plugin is None else {SECTION: effective.plugin},
    }
    known = {name: value for name, value in reported.items() if value is not None}
    try:
        return kv_bytes_on_device(shape, {**arguments, **known})
    except BadInput:
        return None


def reported_kv_bytes(
    arguments: Mapping[str, JsonValue], effective: EffectiveConfig
) -> float | None:
    """Return the bytes of the pool for each token of its blocks, both as a server reports them.

    Up to one block's bytes of the pool are left over, so this is a little more than a token takes.
    None where the server reports no pool, or where its blocks were not counted from its bytes.
    """
    memory, blocks = effective.kv_cache_memory_bytes, effective.num_gpu_blocks
    block_tokens = effective.block_size_tokens
    if not memory or not blocks or not block_tokens or "num-gpu-blocks-override" in arguments:
        return None
    return memory / blocks / block_tokens


def pool_of(arguments: Mapping[str, JsonValue], ctx: Context) -> Pool | None:
    """Return the KV pool under `arguments` (the base arguments included); None when unknown."""
    block_tokens = settings_of(arguments, ctx).block_tokens
    override = read_count(arguments.get("num-gpu-blocks-override"))
    if override is not None:
        return Pool(override, block_tokens)
    per_token = kv_bytes_per_token(arguments, ctx)
    memory = pool_bytes(arguments, ctx)
    if per_token is None or memory is None:
        return None
    return Pool(memory // (per_token * block_tokens), block_tokens)


def pool_bytes(arguments: Mapping[str, JsonValue], ctx: Context) -> int | None:
    """Return the bytes of the KV pool under `arguments`; None when unknown."""
    asked = read_count(arguments.get("kv-cache-memory-bytes"))
    if asked is not None:
        return asked
    base_share = ctx.base_arguments.get("gpu-memory-utilization")
    seen = ctx.baseline
    if seen is None or arguments.get("gpu-memory-utilization") != base_share:
        return None
    if seen.kv_cache_memory_bytes is not None:
        return seen.kv_cache_memory_bytes
    per_token = kv_bytes_per_token(ctx.base_arguments, ctx)
    if per_token is None or seen.num_gpu_blocks is None or seen.block_size_tokens is None:
        return None
    return seen.num_gpu_blocks * seen.block_size_tokens * per_token


def shortfall(arguments: Mapping[str, JsonValue], ctx: Context) -> str | None:
    """Say why not even one request of the longest length fits; None if it fits, or is unknown."""
    pool, now = pool_of(arguments, ctx), settings_of(arguments, ctx)
    longest = now.max_model_len_tokens
    if pool is None or longest is None or now.blocks_of(longest) <= pool.usable_blocks:
        return None
    held = "one request" if now.sink_window is None else "what StreamingLLM keeps of one request"
    return (
        f"a KV pool of {pool.blocks} blocks of {pool.block_tokens} tokens holds "
        f"{pool.usable_tokens:,} tokens (one block is reserved), less than {held} of "
        f"max-model-len {longest:,}"
    )


def resident_requests(ctx: Context) -> int | None:
    """Return how many typical requests the base pool holds at once; None when unknown.

    Typical is the median input plus the median output, or the longest request served.
    """
    pool, now = pool_of(ctx.base_arguments, ctx), base_settings(ctx)
    seen = ctx.fingerprint
    inputs = seen.input_tokens.p50 if seen and seen.input_tokens else None
    outputs = seen.output_tokens.p50 if seen and seen.output_tokens else None
    tokens = now.max_model_len_tokens
    if inputs is not None and outputs is not None:
        tokens = max(round(inputs + outputs), 1)
    if pool is None or tokens is None:
        return None
    if now.sink_window is not None:
        return pool.usable_blocks // now.blocks_of(tokens)
    return pool.usable_tokens // tokens


def _element_bytes(arguments: Mapping[str, JsonValue], shape: ModelShape) -> int | None:
    cached = str(arguments.get(DTYPE, "auto"))
    if cached != "auto":
        return DTYPE_BYTES.get(cached)
    served = str(arguments.get("dtype", "auto"))
    return shape.dtype_bytes if served == "auto" else DTYPE_BYTES.get(served)
