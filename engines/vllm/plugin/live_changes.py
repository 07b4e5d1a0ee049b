"""Let kvtune change a running vLLM's scheduler between two loads.

vLLM loads this through the entry point group `vllm.general_plugins` in every process of every
server of an environment that has kvtune; it does nothing there unless kvtune's own variable says
so. Then the engine process answers one more method of vLLM's development address
`/collective_rpc`: `kvtune_change`, with one JSON object of option names as its argument. Standard
library and vLLM only.

Only what the scheduler reads anew in each step is set, and nothing that a start would have made
differently in another place, such as a buffer, a graph or the size of the pool: that is refused.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

SWITCH = "KVTUNE_LIVE"
METHOD = "kvtune_change"
_ATTRIBUTES = (
    "max_num_running_reqs",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "scheduler_reserve_full_isl",
)


def register() -> None:
    """Add the method to vLLM's engine, if this server is kvtune's to change."""
    if os.environ.get(SWITCH) != "1":
        return
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.collective_rpc
    if hasattr(original, METHOD):
        return

    @functools.wraps(original)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if method == METHOD:
            return [change(self, json.loads(args[0]))]
        return original(self, method, timeout, args, kwargs)

    setattr(collective_rpc, METHOD, True)
    EngineCore.collective_rpc = collective_rpc


def change(core: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Set what is `wanted` on an idle engine, empty its prefix cache, and say what holds then.

    `wanted` names all six options. None keeps what the engine was started with; for
    `max-num-active-seqs` it is no cap of its own. Answers `{"set": {...}}`, `{"refused": why}` or
    `{"busy": true}`; the last two leave everything as it was.
    """
    scheduler = core.scheduler
    if why := _foreign(core):
        return {"refused": why}
    started = _started(core)
    values = {
        name: started[name] if wanted[name] is None else wanted[name]
        for name in wanted
        if name != "max-num-active-seqs"
    }
    active = wanted["max-num-active-seqs"]
    if why := _invalid(core, values, active) or _inexact(core, started, wanted, values):
        return {"refused": why}
    if scheduler.has_requests() or core.batch_queue or not scheduler.reset_prefix_cache():
        return {"busy": True}
    width, tokens = values["max-num-seqs"], values["max-num-batched-tokens"]
    config, cache = scheduler.scheduler_config, scheduler.kv_cache_manager
    scheduler.max_num_running_reqs = width
    scheduler.max_num_active_reqs = active or width
    scheduler.max_num_scheduled_tokens = config.max_num_batched_tokens = tokens
    scheduler.scheduler_reserve_full_isl = values["scheduler-reserve-full-isl"]
    config.long_prefill_token_threshold = values["long-prefill-token-threshold"]
    config.watermark = values["watermark"]
    cache.watermark_blocks = int(values["watermark"] * scheduler.kv_cache_config.num_blocks)
    return {"set": _holds(core), "watermark_blocks": cache.watermark_blocks}


def _foreign(core: Any) -> str | None:
    """Why this is no engine whose scheduler is known through and through."""
    scheduler, config = core.scheduler, core.vllm_config
    if not type(scheduler).__module__.startswith("vllm.v1.core.sched."):
        return f"the scheduler is a {type(scheduler).__name__} of somebody else's"
    if missing := [name for name in _ATTRIBUTES if not hasattr(scheduler, name)]:
        return f"the scheduler of this vLLM has no {missing[0]}"
    if not hasattr(scheduler.kv_cache_manager, "watermark_blocks"):
        return "the cache of this vLLM has no watermark_blocks"
    if scheduler.max_num_scheduled_tokens != scheduler.scheduler_config.max_num_batched_tokens:
        return "a step's budget is not max-num-batched-tokens here"
    if config.speculative_config is not None:
        return "speculative decoding has budgets of its own"
    if scheduler.connector is not None or scheduler.ec_connector is not None:
        return "a connector keeps KV that outlives a change"
    if config.parallel_config.data_parallel_size > 1:
        return "there are several engines behind this address"
    return None


def _holds(core: Any) -> dict[str, Any]:
    """What the scheduler goes by, under the names of the options."""
    scheduler = core.scheduler
    return {
        "max-num-seqs": scheduler.max_num_running_reqs,
        "max-num-active-seqs": scheduler.max_num_active_reqs,
        "max-num-batched-tokens": scheduler.max_num_scheduled_tokens,
        "long-prefill-token-threshold": scheduler.scheduler_config.long_prefill_token_threshold,
        "scheduler-reserve-full-isl": scheduler.scheduler_reserve_full_isl,
        "watermark": scheduler.scheduler_config.watermark,
    }


def _started(core: Any) -> dict[str, Any]:
    """What `_holds` was before the first change."""
    if not hasattr(core, "kvtune_started"):
        core.kvtune_started = _holds(core)
    started: dict[str, Any] = core.kvtune_started
    return started


def _inexact(
    core: Any, started: dict[str, Any], wanted: dict[str, Any], values: dict[str, Any]
) -> str | None:
    """Why a start with these sizes would differ in more than the scheduler."""
    sizes = ("max-num-seqs", "max-num-batched-tokens")
    for name in sizes:
        if values[name] > started[name]:
            return f"the server was started for {name} of at most {started[name]}"
    longest = core.scheduler.max_model_len
    # The default of a budget is at most what so many sequences of full length can have.
    if wanted["max-num-batched-tokens"] is None and (
        values["max-num-seqs"] * longest < values["max-num-batched-tokens"]
    ):
        return "a start would take a smaller max-num-batched-tokens for so few sequences"
    if all(values[name] == started[name] for name in sizes):
        return None
    return _shaped_by_sizes(core)


def _shaped_by_sizes(core: Any) -> str | None:
    """What in this engine the sizes shape beside the scheduler and the length of buffers."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = core.vllm_config
    cache = config.cache_config
    if not current_platform.is_cpu():
        return "graphs are captured for the sizes that a server is started with"
    if not config.model_config.enforce_eager:
        return "kernels are compiled for the sizes that a server is started with"
    if cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None:
        return "the KV pool is what the buffers leave"
    if config.model_config.is_multimodal_model:
        return "the budget of the encoder follows the budget of a step"
    if not config.scheduler_config.enable_chunked_prefill:
        return "without chunked prefill the sizes depend on each other"
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    if any(type(group.kv_cache_spec) is not FullAttentionSpec for group in groups):
        return "layers with a window or a state reserve by the budget of a step"
    return None


def _invalid(core: Any, values: dict[str, Any], active: int | None) -> str | None:
    """Why vLLM would not start so; a start then tells it in vLLM's own words."""
    width, longest = values["max-num-seqs"], core.scheduler.max_model_len
    threshold = values["long-prefill-token-threshold"]
    if min(width, values["max-num-batched-tokens"], active or width) < 1:
        return "a size is below 1"
    if values["max-num-batched-tokens"] < width:
        return "max-num-batched-tokens is below max-num-seqs"
    if active is not None and active > width:
        return "max-num-active-seqs is above max-num-seqs"
    if not 0 <= threshold <= longest:
        return f"long-prefill-token-threshold is not within 0 and {longest}"
    if not 0 <= values["watermark"] < 1:
        return "watermark is not within 0 and 1"
    return None
