"""What the engine really runs with: the user's arguments, and its own defaults for the rest.

The defaults are those of vLLM's API server; where a baseline was read back from a running server,
what it says comes first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from kvtune.policies.base import Context
from kvtune.policies.page_budget import PageBudget
from kvtune.policies.plugin_arguments import asked_by
from kvtune.policies.plugin_clashes import Beside
from kvtune.policies.plugin_config import PluginConfig
from kvtune.policies.sink_window import SinkWindow

GIB = 1 << 30
STOCK_BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
STOCK_HASH_ALGO = "sha256"
_SUFFIXES = {
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that policies depend on, as they take effect together.

    `long_prefill_tokens` of 0 is no cap; `max_model_len_tokens` is None when unknown.
    `in_flight_tokens` are the most that are scheduled and not yet settled. `plugin` is what is
    asked of kvtune's plugin.
    """

    block_tokens: int
    kv_cache_dtype: str
    prefix_caching: bool
    hash_algo: str
    max_num_seqs: int
    max_num_active_seqs: int
    max_num_batched_tokens: int
    long_prefill_tokens: int
    chunked_prefill: bool
    max_model_len_tokens: int | None
    in_flight_tokens: int
    skips_kv_layers: bool
    plugin: PluginConfig

    @property
    def sink_window(self) -> SinkWindow | None:
        """What StreamingLLM keeps of a request; None where it is off."""
        return self.plugin.sink_window(self.block_tokens)

    @property
    def page_budget(self) -> PageBudget | None:
        """What page eviction keeps of a prompt; None where it is off."""
        return self.plugin.page_budget(self.block_tokens)

    @property
    def beside(self) -> Beside:
        """What the plugin is asked for, beside what it has to go with."""
        return Beside(
            self.plugin,
            self.kv_cache_dtype,
            self.prefix_caching,
            self.hash_algo,
            self.skips_kv_layers,
        )

    def blocks_of(self, tokens: int) -> int:
        """The most KV blocks that a request holds at a time until it has `tokens` tokens."""
        kept = self.sink_window
        if kept is None:
            return -(-tokens // self.block_tokens)
        return kept.blocks_per_request(self.in_flight_tokens, tokens)


def settings_of(arguments: Mapping[str, JsonValue], ctx: Context) -> Settings:
    """Return what takes effect under `arguments`, the base arguments included in them.

    Raises:
        BadInput: they ask kvtune's plugin for what it does not have.
    """
    chunked = arguments.get("enable-chunked-prefill") is not False
    length = max_model_len_tokens(arguments, ctx)
    budget = read_count(arguments.get("max-num-batched-tokens"))
    seqs = read_count(arguments.get("max-num-seqs"))
    width = seqs or _stock_max_num_seqs(ctx)
    if budget is None:
        budget = _stock_batched_tokens(ctx)
        if length is not None:
            budget = min(budget if chunked else max(budget, length), width * length)
    if seqs is None:
        width = min(width, budget)
    caching = arguments.get("enable-prefix-caching", _baseline(ctx, "enable_prefix_caching"))
    return Settings(
        block_tokens=read_count(arguments.get("block-size")) or _stock_block_tokens(ctx),
        kv_cache_dtype=str(arguments.get("kv-cache-dtype", "auto")),
        prefix_caching=caching is not False,
        hash_algo=str(arguments.get("prefix-caching-hash-algo", STOCK_HASH_ALGO)),
        max_num_seqs=width,
        max_num_active_seqs=read_count(arguments.get("max-num-active-seqs")) or width,
        max_num_batched_tokens=budget,
        long_prefill_tokens=read_count(arguments.get("long-prefill-token-threshold")) or 0,
        chunked_prefill=chunked,
        max_model_len_tokens=length,
        in_flight_tokens=budget * _batches_at_once(arguments, ctx),
        skips_kv_layers=bool(arguments.get("kv-cache-dtype-skip-layers")),
        plugin=asked_by(arguments),
    )


def base_settings(ctx: Context) -> Settings:
    """Return what takes effect when no policy is chosen."""
    return settings_of(ctx.base_arguments, ctx)


def max_model_len_tokens(arguments: Mapping[str, JsonValue], ctx: Context) -> int | None:
    """Return the longest sequence that is served; None when nothing says it."""
    asked = read_count(arguments.get("max-model-len"))
    if asked is not None:
        return asked
    seen = ctx.baseline.max_model_len_tokens if ctx.baseline else None
    return seen or (ctx.model.max_tokens if ctx.model else None)


def read_count(value: JsonValue) -> int | None:
    """Read a count as vLLM does: 2048, "2048", "2k" is 2000, "2K" is 2048; None for the rest."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value >= 0 else None
    if not isinstance(value, str):
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kKmMgGtT]?)\s*", value)
    return int(float(match[1]) * _SUFFIXES.get(match[2], 1)) if match else None


def _stock_block_tokens(ctx: Context) -> int:
    return _baseline_count(ctx, "block_size_tokens") or STOCK_BLOCK_TOKENS[ctx.platform]


def _stock_max_num_seqs(ctx: Context) -> int:
    on_gpu = 1024 if _is_large_gpu(ctx) else 256
    stock = 128 * _world_size(ctx) if ctx.platform == "cpu" else on_gpu
    return _baseline_count(ctx, "max_num_seqs") or stock


def _stock_batched_tokens(ctx: Context) -> int:
    if ctx.platform == "cpu":
        stock = 2048 * _world_size(ctx)
    elif (ctx.device.memory_bytes or 0) >= 160 * GIB:
        stock = 16384
    else:
        stock = 8192 if _is_large_gpu(ctx) else 2048
    return _baseline_count(ctx, "max_num_batched_tokens") or stock


def _is_large_gpu(ctx: Context) -> bool:
    """vLLM keeps the small defaults on an A100, however much memory it has, up to 160 GiB."""
    memory = ctx.device.memory_bytes or 0
    return memory >= 160 * GIB or (memory >= 70 * GIB and "a100" not in ctx.device.name.lower())


def _world_size(ctx: Context) -> int:
    tensor = read_count(ctx.base_arguments.get("tensor-parallel-size")) or 1
    return tensor * (read_count(ctx.base_arguments.get("pipeline-parallel-size")) or 1)


def _batches_at_once(arguments: Mapping[str, JsonValue], ctx: Context) -> int:
    """While one batch is computed vLLM schedules the next one, unless it runs on a CPU."""
    alone = ctx.platform == "cpu" or arguments.get("async-scheduling") is False
    return 1 if alone else 2


def _baseline(ctx: Context, field: str) -> JsonValue:
    value: JsonValue = getattr(ctx.baseline, field) if ctx.baseline else None
    return value


def _baseline_count(ctx: Context, field: str) -> int | None:
    return read_count(_baseline(ctx, field))
