"""The levers on a cache: for each the arguments that pull it, and what it does to bytes and reads.

Bytes of methods are those of `kvtune plan`, for the workload's mean sequence at its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import JsonValue

from kvtune.autotune.forecast.experience import Experience
from kvtune.autotune.forecast.loading import LOADED_ON_CPU, LOADED_ON_GPU, load_speeds
from kvtune.autotune.forecast.plugin_levers import plugin_offers, saved_times
from kvtune.autotune.forecast.read_times import UNCHANGED, Times, read_times, times_by_bytes
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.autotune.forecast.system import (
    FORMATS,
    FULL,
    NAME_CHECKPOINT,
    base_share,
    method_of,
    not_modelled,
    pool_bytes,
    refusal,
    share_bytes,
)
from kvtune.errors import BadInput
from kvtune.policies.base import Context
from kvtune.policies.block_size import SIZES
from kvtune.policies.capacity import skipped_layers
from kvtune.policies.compose import publish_of, refusals
from kvtune.policies.kv_dtype import kv_dtype_support
from kvtune.policies.kv_memory import SHARE, SHARES
from kvtune.policies.method import Axis, History
from kvtune.policies.method_stack import MethodStack, parse_stack
from kvtune.policies.model_cache import ModelCache
from kvtune.policies.plan import stack_bytes
from kvtune.policies.plugin_arguments import HOST_BYTES, asked_by, kv_format
from kvtune.policies.plugin_levers import why_not_served
from kvtune.policies.settings import GIB, base_settings

NOTHING_KNOWN = Experience()

BUDGET_SHARES = (0.5, 0.25)
"""Budgets of methods that keep, or read, a part of a sequence, as shares of its tokens."""

QUEST_PAGE_TOKENS = 16
NOT_SERVED = "no engine at hand serves it"
BLOCKS = "num-gpu-blocks-override"
OFFLOAD = "kv-offloading-size"
OFFLOAD_TIMES = 4
"""Size of the second tier that is forecast, in pools."""


@dataclass(frozen=True, slots=True)
class Lever:
    """One lever. `arguments` go on top of the baseline's; empty for methods of no engine at hand.

    `resident_ratio` is what a sequence takes over what it took, where the arguments do not say it
    already: from the first token of a prompt, or with `cuts_prompts` once its prompt is computed.
    `read_ratio` is the time to read a cached token over what it was: least, expected and most.
    `read_source` says where that is from. `saved_ratio` is what is saved of the time for tokens
    that the arguments leave unread: best, expected and worst. `reads_prompts_so`: prompts that are
    computed read cached tokens in the same time as decode steps. `load_bytes_per_s` is how fast a
    second tier gives back what it holds, and `problem` says why nothing can be forecast.
    """

    name: str
    says: str
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    stack: str = ""
    not_served: str = ""
    resident_ratio: float = 1.0
    cuts_prompts: bool = False
    read_ratio: Times = UNCHANGED
    read_source: str = ""
    saved_ratio: Times = UNCHANGED
    reads_prompts_so: bool = False
    load_bytes_per_s: tuple[float, float, float] | None = None
    reuses_prefixes: bool = True
    problem: str = ""

    def cost(self, base: StepCost, read: int) -> StepCost:
        """What a step costs with it: `read` chooses among the three ratios."""
        ratio = self.read_ratio[read]
        prompts = ratio if self.reads_prompts_so else 1.0
        return replace(base, read_ratio=ratio, prompt_read_ratio=prompts)


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
    problem = not_modelled(arguments, ctx)
    if arguments.get(OFFLOAD) and ctx.platform == "cpu":
        problem = "vLLM has no KV offload where a CPU computes: its memory is the second tier"
    together = {**ctx.base_arguments, **arguments}
    problem = problem or refusal(together, ctx)
    before, after = kv_format(ctx.base_arguments), kv_format(together)
    times, source = read_times(before, after, ctx, experience.reads)
    kept = 0.0 if ctx.model is None else skipped_layers(arguments, ctx.model) / ctx.model.layers
    low, expected, high = (kept + (1 - kept) * time for time in times)
    return Lever(
        name,
        says,
        arguments,
        read_ratio=(low, expected, high),
        read_source=source,
        saved_ratio=saved_times(asked_by(arguments)),
        reads_prompts_so=any(one.startswith("store") for one in (before, after)),
        load_bytes_per_s=_load_bytes_per_s(arguments, experience),
        problem=problem,
    )


def levers(
    ctx: Context,
    cache: ModelCache | None,
    mean: History,
    experience: Experience = NOTHING_KNOWN,
    *,
    weight_bytes: int = 0,
    unread: str = NAME_CHECKPOINT,
) -> list[Lever]:
    """Every lever for a baseline; those of methods need to know the model's `cache`.

    `mean` is the workload's mean sequence at its end: prompt and generated tokens. `experience`
    is that of the device. `weight_bytes` are those on each device, as far as they are known.
    `unread` is what to say where the cache is not known.
    """
    found = [*_memory(ctx, weight_bytes), *_engine(ctx)]
    base = base_settings(ctx)
    held, is_full = base.kv_cache_dtype, base.kv_cache_dtype in FULL
    if base.plugin.store is not None:
        # Other formats do not go beside a store, and formulas of methods start from a whole cache.
        return [*found, _second_tier(ctx, experience, weight_bytes)]
    if not is_full:
        found.append(_engine_format("auto", ctx, experience))
    for dtype, text in FORMATS.items():
        not_served = _refusal_of(dtype, ctx)
        lever = _method(text, dtype, not_served, ctx, cache, mean, experience, unread)
        is_smaller = lever.resident_ratio < 1 or bool(lever.problem)
        if is_full or (is_smaller and method_of(held) != text):
            found.append(lever if not_served else _engine_format(dtype, ctx, experience))
    if is_full and not base.plugin.is_asked:
        if not why_not_served(ctx):
            found += _plugin(mean, ctx, experience)
        else:
            # Formulas of methods start from full precision, and from a whole cache.
            found += [
                _method(text, text, NOT_SERVED, ctx, cache, mean, experience, unread)
                for text in _methods(mean.tokens)
            ]
    return [*found, _second_tier(ctx, experience, weight_bytes)]


def stack_lever(
    stack: MethodStack,
    ctx: Context,
    cache: ModelCache | None,
    mean: History,
    experience: Experience = NOTHING_KNOWN,
    *,
    unread: str = NAME_CHECKPOINT,
) -> Lever:
    """The lever that a stack of methods is: one of the engine's, else as if an engine served it.

    Other arguments are as in `levers`.
    """
    text = str(stack)
    dtype = next((dtype for dtype, one in FORMATS.items() if str(parse_stack(one)) == text), None)
    not_served = NOT_SERVED if dtype is None else _refusal_of(dtype, ctx)
    problem = "; ".join(refusals(stack))
    held = base_settings(ctx).kv_cache_dtype
    if held not in FULL and dtype is None:
        problem = problem or f"formulas of methods start from full precision, this cache is {held}"
    if dtype is not None and not not_served and not problem:
        return replace(_engine_format(dtype, ctx, experience), name=text)
    if problem:
        return Lever(text, "", stack=text, not_served=not_served or NOT_SERVED, problem=problem)
    lever = _method(text, dtype or text, not_served, ctx, cache, mean, experience, unread)
    return replace(lever, name=text)


def _memory(ctx: Context, weight_bytes: int) -> list[Lever]:
    """More and less memory, by the knob that a search would pull where that can give it."""
    found = []
    for factor, text in ((2.0, "doubles"), (0.5, "halves")):
        name, says = f"kv memory x{factor:g}", f"{text} the memory"
        lever = _by_share(factor, name, says, ctx) or _by_size(
            factor, name, says, ctx, weight_bytes
        )
        if lever is not None:
            found.append(lever)
    return found


def _by_share(factor: float, name: str, says: str, ctx: Context) -> Lever | None:
    """`factor` times the memory, or what the largest share that a search tries gives.

    None where no share of a GPU's memory sizes the pool, or too little is known of it.
    """
    before, memory, device_bytes = base_share(ctx), pool_bytes(ctx), ctx.device.memory_bytes
    if before is None or memory is None or device_bytes is None:
        return None
    # Rounded up, so that no block is missing.
    share = math.ceil((before + (factor - 1) * memory / device_bytes) * 1e6) / 1e6
    if share > SHARES[-1] > before:
        share = SHARES[-1]
        most = f"{share_bytes(share, ctx) / memory:.3g}"
        name = f"kv memory x{most}"
        says = f"gives the pool {most} times the memory, the most that a search tries"
    lever = lever_of({SHARE: share}, ctx, name=name, says=says)
    if share <= 1:
        return lever
    return replace(lever, problem=_too_large(share * device_bytes, device_bytes))


def _by_size(factor: float, name: str, says: str, ctx: Context, weight_bytes: int) -> Lever | None:
    """`factor` times the memory where bytes or blocks size the pool; None: it is not known."""
    memory, seen = pool_bytes(ctx), ctx.baseline
    arguments: dict[str, JsonValue] = {}
    if memory is not None and not ctx.fixed(BLOCKS):
        arguments = {"kv-cache-memory-bytes": int(memory * factor)}
    elif seen is not None and seen.num_gpu_blocks is not None:
        arguments = {BLOCKS: int(seen.num_gpu_blocks * factor)}
    else:
        return None
    lever = lever_of(arguments, ctx, name=name, says=says)
    if memory is None:
        return lever
    return _if_it_fits(lever, weight_bytes + memory, weight_bytes + factor * memory, ctx)


def _if_it_fits(lever: Lever, now_bytes: float, needed_bytes: float, ctx: Context) -> Lever:
    """The lever, or why the device has too little for it."""
    device_bytes = ctx.device.memory_bytes
    # A device that could not even hold what the server holds now is not the server's.
    if device_bytes is None or not now_bytes <= device_bytes < needed_bytes:
        return lever
    return replace(lever, problem=lever.problem or _too_large(needed_bytes, device_bytes))


def _too_large(needed_bytes: float, device_bytes: int) -> str:
    return f"needs {needed_bytes / GIB:.1f} GiB, the device has {device_bytes / GIB:.1f}"


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


def _second_tier(ctx: Context, experience: Experience, weight_bytes: int) -> Lever:
    """Host memory behind the pool: vLLM's own, or on a CPU that of kvtune's plugin."""
    is_ours = ctx.platform == "cpu" and not why_not_served(ctx)
    name = "host tier" if is_ours else "kv offload"
    memory = pool_bytes(ctx)
    if memory is None:
        return Lever(name, "", problem="the size of the pool is not known")
    size_gib = round(OFFLOAD_TIMES * memory / GIB, 2)
    says = f"keeps blocks of prompts in {size_gib:g} GiB of host memory"
    arguments: dict[str, JsonValue] = (
        {HOST_BYTES: OFFLOAD_TIMES * memory} if is_ours else {OFFLOAD: size_gib}
    )
    lever = lever_of(arguments, ctx, name=name, says=says, experience=experience)
    # Where a CPU computes, pool and tier share one memory.
    needed_bytes = weight_bytes + (1 + OFFLOAD_TIMES) * memory
    return _if_it_fits(lever, weight_bytes + memory, needed_bytes, ctx) if is_ours else lever


def _load_bytes_per_s(
    arguments: Mapping[str, JsonValue], experience: Experience
) -> tuple[float, float, float] | None:
    """How fast a second tier that is asked for gives back what it holds."""
    if asked_by(arguments).tiers is not None:
        return load_speeds(LOADED_ON_CPU, experience.copy_bytes_per_s)
    if arguments.get(OFFLOAD):
        return load_speeds(LOADED_ON_GPU, experience.copy_bytes_per_s)
    return None


def _method(
    text: str,
    name: str,
    not_served: str,
    ctx: Context,
    cache: ModelCache | None,
    mean: History,
    experience: Experience,
    unread: str,
) -> Lever:
    """A stack that no engine at hand serves, as if one did, over what the baseline holds."""
    held = base_settings(ctx).kv_cache_dtype
    unknown = Lever(name, "", stack=text, not_served=not_served)
    if cache is None:
        return replace(unknown, problem=unread)
    if (base := method_of(held)) is None:
        return replace(unknown, problem=f"what a token takes in {held} is not known")
    stack = parse_stack(text)
    try:
        full, taken, stored = (
            stack_bytes(cache, one, mean)
            for one in (parse_stack(base), stack, MethodStack(stack.stores))
        )
    except BadInput as error:
        return replace(unknown, problem=error.message)
    resident = taken.resident_bytes / full.resident_bytes
    read = taken.read_bytes_per_step / full.read_bytes_per_step
    times, source = times_by_bytes(read), ""
    quantized = next((store.name for store in stack.stores if store.axis is Axis.BITS), None)
    if quantized is not None and ctx.platform != "cpu":
        dtype = name if name in FORMATS else quantized
        each, source = read_times(held, dtype, ctx, experience.reads)
        part = taken.read_bytes_per_step / stored.read_bytes_per_step
        times = (each[0] * part, each[1] * part, each[2] * part)
    cut = " once a prompt is computed" if stack.evictors else ""
    return Lever(
        name,
        says=f"holds {resident:.0%} and reads {read:.0%} of the bytes{cut}",
        stack=text,
        not_served=not_served,
        resident_ratio=resident,
        cuts_prompts=bool(stack.evictors),
        read_ratio=times,
        read_source=source,
        reuses_prefixes=publish_of(stack) != "never",
    )


def _methods(tokens: int) -> list[str]:
    """Stacks of methods where no engine serves any."""
    found = ["turboquant"]
    for share in BUDGET_SHARES:
        budget = max(int(tokens * share), 2 * QUEST_PAGE_TOKENS)
        pages = budget // QUEST_PAGE_TOKENS
        found += [
            f"snapkv:budget_tokens={budget}",
            f"streaming-llm:window_tokens={budget}",
            f"quest:budget_tokens={pages * QUEST_PAGE_TOKENS}",
        ]
    return list(dict.fromkeys(found))  # The smallest budget may stand for several shares.


def _plugin(mean: History, ctx: Context, experience: Experience) -> list[Lever]:
    """What kvtune's plugin for vLLM serves: the same budgets, and its formats."""
    return [
        lever_of(one.arguments, ctx, name=one.name, says=one.says, experience=experience)
        for one in plugin_offers(mean, BUDGET_SHARES, ctx)
    ]


def _refusal_of(dtype: str, ctx: Context) -> str:
    """Why a format cannot be had here; empty when it can."""
    support = kv_dtype_support(dtype, ctx.engine, ctx.device, ctx.model, ctx.detail)
    return support.reason


def _text(value: JsonValue) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else f"{value:,}"
