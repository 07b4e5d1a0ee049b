"""Runs vLLM in this process with what the plugin is asked for, and tells what it answers and holds.

`calls` are lists of prompts, each answered together with `tokens` tokens. `engine` are arguments of
`LLM` beside those here.
"""

from small_vllm import answer, start

WIDTH, EVERY = 64, 61
"""Channels of a head. Of what a page holds one number in so many is told, which is prime to it."""


def answers(model, asked, calls, tokens, engine):
    """What vLLM answers, greedily, and what it holds."""
    llm = start(model, asked, **engine)
    core = llm.llm_engine.engine_core.engine_core
    scheduler, cache = core.scheduler, core.vllm_config.cache_config
    pool = scheduler.kv_cache_manager.block_pool
    preempted, held = [], {}
    preempt, free = scheduler._preempt_request, scheduler._free_blocks

    def _preempt_request(request, *rest, **named):
        preempted.append(request.request_id)
        preempt(request, *rest, **named)

    def _free_blocks(request):
        if "store" in asked:
            held[tuple(request.prompt_token_ids)] = pages(core, request, asked["store"])
        free(request)

    scheduler._preempt_request, scheduler._free_blocks = _preempt_request, _free_blocks
    done = [answer(llm, prompts, tokens) for prompts in calls]
    from kvtune.engines.vllm.plugin.counters import counters

    names = ("kv_bytes_stored", "kv_bytes_read", "pages_seen", "pages_read")
    return {
        "calls": done,
        # The last token of an answer is not computed any more.
        "computed_tokens": sum(
            len(prompt) - cached + tokens - 1
            for call in done
            for prompt, cached in zip(call["prompts"], call["cached"], strict=True)
        ),
        "held": [held.get(tuple(prompt)) for call in done for prompt in call["prompts"]],
        "preemptions": len(preempted),
        "blocks": cache.num_gpu_blocks,
        "size_tokens": cache.kv_cache_size_tokens,
        "free_blocks": pool.get_num_free_blocks(),
        **{name: counters().get(name) for name in names},
    }


def pages(core, request, store):
    """Some numbers of each full page of a request in the last layer, as they read back."""
    import torch

    from kvtune.engines.vllm.plugin.store.cells import cells_of
    from kvtune.engines.vllm.plugin.store.grouped import grouped_pages
    from kvtune.policies.plugin_config import StoreConfig

    (manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    size, store = manager.block_size, StoreConfig(**store)
    full = manager.req_to_blocks[request.request_id][: request.num_computed_tokens // size]
    if not full:
        return []
    cache = core.model_executor.driver_worker.worker.model_runner.kv_caches[-1]
    cells = cache[[block.block_id for block in full]].flatten(0, 1)
    if store.is_grouped:
        both = grouped_pages(store, WIDTH, size).decode(cells, torch.float32)
    else:
        both = cells_of(store, WIDTH, torch.float32).decode(cells)
    return torch.cat(both, dim=-1).view(len(full), -1)[:, ::EVERY].tolist()
