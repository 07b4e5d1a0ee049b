"""The levers on a cache: for each the arguments that pull it, and what it does to bytes and reads.

Bytes of methods are those of `kvtune plan`, for the workload's mean sequence at its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from kvtune.autotune.forecast.experience import Experience, MeasuredRead
from kvtune.autotune.forecast.system import MODELLED, pool_bytes, refusal
from kvtune.errors import BadInput
from kvtune.policies.base import Context
from kvtune.policies.block_size import SIZES
from kvtune.policies.capacity import DTYPE_BYTES
from kvtune.policies.compose import publish_of
from kvtune.policies.kv_dtype import FP8, kv_dtype_support
from kvtune.policies.method import History
from kvtune.policies.method_stack import MethodStack, parse_stack
from kvtune.policies.model_cache import ModelCache
from kvtune.policies.plan import stack_bytes
from kvtune.policies.settings import base_settings, settings_of

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

NOTHING_KNOWN = Experience()

FP8_ON_CPU = (0.8, 1.0, 1.25)
"""Time to read a token in 8 bits over that in 16 on a CPU (least, expected, most): the bytes are
half, and converting them costs about what that saves. What decode steps took on one quiet machine
(docs/verdicts.md) comes to 0.87 for 32 KV heads and 1.15 for 3."""

BUDGET_SHARES = (0.5, 0.25)
"""Budgets of methods that keep, or read, a part of a sequence, as shares of its tokens."""

QUEST_PAGE_TOKENS = 16
NOT_SERVED = "no engine at hand serves it"
OFFLOAD = "kv-offloading-size"
OFFLOAD_TIMES = 4
"""Size of the second tier that is forecast, in pools."""

LINK_BYTES_PER_S = (10e9, 20e9, 50e9)
"""How fast blocks come back to a GPU (least, expected, most): a link of 16 lanes moves 32 GB/s by
PCIe 4.0 and 64 by 5.0, and copies of many blocks do not reach that."""


@dataclass(frozen=True, slots=True)
class Lever:
    """One lever. `arguments` go on top of the baseline's; empty for methods of no engine at hand.

    `resident_ratio` is what a sequence takes over what it took, where the arguments do not say it
    already: from the first token of a prompt, or with `cuts_prompts` once its prompt is computed.
    `read_ratio` is the time to read a cached token over what it was: least, expected and most.
    `read_source` says where that is from. `load_bytes_per_s` is how fast a second tier gives back
    what it holds, and `problem` says why nothing can be forecast.
    """

    name: str
    says: str
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    stack: str = ""
    not_served: str = ""
    resident_ratio: float = 1.0
    cuts_prompts: bool = False
    read_ratio: tuple[float, float, float] = (1.0, 1.0, 1.0)
    read_source: str = ""
    load_bytes_per_s: tuple[float, float, float] | None = None
    reuses_prefixes: bool = True
    problem: str = ""


def lever_of(
    arguments: Mapping[str, JsonValue],
    ctx: Context,
    *,
    name: str,
    says: str,
    experience: Experience = NOTHING_KNOWN,
) -> Lever:
    """The lever that engine arguments pull on top of the baseline's.

    `experience` is that of the device.
    """
    unknown = sorted(set(arguments) - MODELLED)
    problem = f"{', '.join(unknown)} is not part of the simulation" if unknown else ""
    if arguments.get(OFFLOAD) and ctx.platform == "cpu":
        problem = "vLLM has no KV offload where a CPU computes: its memory is the second tier"
    problem = problem or refusal({**ctx.base_arguments, **arguments}, ctx)
    ratio, source = _read_ratio(arguments, ctx, experience.reads)
    return Lever(
        name,
        says,
        arguments,
        read_ratio=ratio,
        read_source=source,
        load_bytes_per_s=_load_bytes_per_s(experience) if arguments.get(OFFLOAD) else None,
        problem=problem,
    )


def levers(
    ctx: Context,
    cache: ModelCache | None,
    mean: History,
    experience: Experience = NOTHING_KNOWN,
) -> list[Lever]:
    """Every lever for a baseline; those of methods need to know the model's `cache`.

    `mean` is the workload's mean sequence at its end: prompt and generated tokens. `experience`
    is that of the device.
    """
    found = [*_memory(ctx), *_engine(ctx)]
    offload = _offload(ctx, experience)
    if base_settings(ctx).kv_cache_dtype in FP8:
        # Formulas of methods start from full precision.
        return [*found, _engine_format("auto", ctx, experience), offload]
    for dtype, stack in FORMATS.items():
        not_served = _refusal_of(dtype, ctx)
        if not not_served:
            found.append(_engine_format(dtype, ctx, experience))
        elif cache is not None:
            found.append(_method(stack, cache, mean, dtype, not_served))
    if cache is not None:
        found += [_method(stack, cache, mean, stack, NOT_SERVED) for stack in _methods(mean.tokens)]
    return [*found, offload]


def _memory(ctx: Context) -> list[Lever]:
    found = []
    for factor, text in ((2.0, "doubles"), (0.5, "halves")):
        memory = pool_bytes(ctx)
        arguments: dict[str, JsonValue] = {}
        if memory is not None:
            arguments = {"kv-cache-memory-bytes": int(memory * factor)}
        elif ctx.baseline is not None and ctx.baseline.num_gpu_blocks is not None:
            arguments = {"num-gpu-blocks-override": int(ctx.baseline.num_gpu_blocks * factor)}
        else:
            continue
        found.append(
            lever_of(arguments, ctx, name=f"kv memory x{factor:g}", says=f"{text} the memory")
        )
    return found


def _engine(ctx: Context) -> list[Lever]:
    now = base_settings(ctx)
    flipped = "off" if now.prefix_caching else "on"
    wanted: list[tuple[str, str, JsonValue]] = [
        (f"prefix caching {flipped}", "enable-prefix-caching", not now.prefix_caching)
    ]
    wanted += [
        (f"blocks of {size}", "block-size", size)
        for size in SIZES[ctx.platform]
        if size != now.block_tokens
    ]
    for argument, value in (
        ("max-num-seqs", now.max_num_seqs),
        ("max-num-batched-tokens", now.max_num_batched_tokens),
    ):
        for changed in (value * 2, max(value // 2, 1)):
            wanted.append((f"{argument} {changed}", argument, changed))
    return [
        lever_of({argument: value}, ctx, name=name, says=f"sets {argument} to {_text(value)}")
        for name, argument, value in wanted
    ]


def _engine_format(dtype: str, ctx: Context, experience: Experience) -> Lever:
    says = f"holds keys and values in {dtype}"
    arguments: dict[str, JsonValue] = {"kv-cache-dtype": dtype}
    return lever_of(arguments, ctx, name=dtype, says=says, experience=experience)


def _offload(ctx: Context, experience: Experience) -> Lever:
    memory = pool_bytes(ctx)
    if memory is None:
        return Lever("kv offload", "", problem="the size of the pool is not known")
    size_gib = round(OFFLOAD_TIMES * memory / (1 << 30), 2)
    says = f"keeps blocks of prompts in {size_gib:g} GiB of host memory"
    return lever_of({OFFLOAD: size_gib}, ctx, name="kv offload", says=says, experience=experience)


def _load_bytes_per_s(experience: Experience) -> tuple[float, float, float]:
    """Nothing is copied faster than memory is read and written on the device."""
    most = experience.copy_bytes_per_s or math.inf
    low, expected, high = (min(speed, most / 2) for speed in LINK_BYTES_PER_S)
    return low, expected, high


def _method(text: str, cache: ModelCache, mean: History, name: str, not_served: str) -> Lever:
    """A method that no engine at hand serves, as if one did."""
    stack = parse_stack(text)
    try:
        full, taken = stack_bytes(cache, MethodStack(), mean), stack_bytes(cache, stack, mean)
    except BadInput as error:
        return Lever(name, "", stack=text, not_served=not_served, problem=error.message)
    resident = taken.resident_bytes / full.resident_bytes
    read = taken.read_bytes_per_step / full.read_bytes_per_step
    cut = " once a prompt is computed" if stack.evictors else ""
    return Lever(
        name,
        says=f"holds {resident:.0%} and reads {read:.0%} of the bytes{cut}",
        stack=text,
        not_served=not_served,
        resident_ratio=resident,
        cuts_prompts=bool(stack.evictors),
        read_ratio=_by_bytes(read),
        reuses_prefixes=publish_of(stack) != "never",
    )


def _methods(tokens: int) -> list[str]:
    found = ["turboquant"]
    for share in BUDGET_SHARES:
        budget = max(int(tokens * share), 2 * QUEST_PAGE_TOKENS)
        pages = budget // QUEST_PAGE_TOKENS
        found += [
            f"snapkv:budget_tokens={budget}",
            f"streaming-llm:window_tokens={budget}",
            f"quest:budget_tokens={pages * QUEST_PAGE_TOKENS}",
        ]
    return found


def _read_ratio(
    arguments: Mapping[str, JsonValue], ctx: Context, reads: Mapping[str, MeasuredRead]
) -> tuple[tuple[float, float, float], str]:
    """Time to read a cached token over what it was, and where that is from."""
    before = settings_of(ctx.base_arguments, ctx).kv_cache_dtype
    after = settings_of({**ctx.base_arguments, **arguments}, ctx).kv_cache_dtype
    if (before in FP8) == (after in FP8):
        return (1.0, 1.0, 1.0), ""
    small, full = (after, before) if after in FP8 else (before, after)
    if (known := reads.get(small)) is not None:
        (low, expected, high), source = known.ratios, f"as {known.trials} trials here found"
    elif ctx.platform == "cpu":
        (low, expected, high), source = FP8_ON_CPU, "a guess, no trial here measured it"
    else:
        own = DTYPE_BYTES.get(full, ctx.model.dtype_bytes if ctx.model else 2)
        (low, expected, high), source = _by_bytes(1 / own), "as its bytes"
    if after in FP8:
        return (low, expected, high), source
    return (1 / high, 1 / expected, 1 / low), source


def _by_bytes(ratio: float) -> tuple[float, float, float]:
    """Time over time where bytes are all that counts; at worst half of the saving is lost."""
    return min(ratio, (1 + ratio) / 2), ratio, max(ratio, (1 + ratio) / 2)


def _refusal_of(dtype: str, ctx: Context) -> str:
    """Why a format cannot be had here; empty when it can."""
    support = kv_dtype_support(dtype, ctx.engine, ctx.device, ctx.model, ctx.detail)
    return support.reason


def _text(value: JsonValue) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else f"{value:,}"
