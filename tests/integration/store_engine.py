"""Runs vLLM in this process with what the plugin is asked for, and tells what it answers and holds.

`calls` are lists of prompts, each answered together with `tokens` tokens. `engine` are arguments of
`LLM` beside those here.
"""

from small_vllm import answer, start


def answers(model, asked, calls, tokens, engine):
    """What vLLM answers, greedily, and what it holds."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request

    def watched(self, request, *rest, **named):
        preempted.append(request.request_id)
        return preempt(self, request, *rest, **named)

    Scheduler._preempt_request = watched
    llm = start(model, asked, **engine)
    done = [answer(llm, prompts, tokens) for prompts in calls]
    from kvtune.engines.vllm.plugin.counters import counters

    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    cache = core.vllm_config.cache_config
    names = ("kv_bytes_stored", "kv_bytes_read", "pages_seen", "pages_read")
    return {
        "calls": done,
        # The last token of an answer is not computed any more.
        "computed_tokens": sum(
            len(prompt) - cached + tokens - 1
            for call in done
            for prompt, cached in zip(call["prompts"], call["cached"], strict=True)
        ),
        "preemptions": len(preempted),
        "blocks": cache.num_gpu_blocks,
        "size_tokens": cache.kv_cache_size_tokens,
        "free_blocks": pool.get_num_free_blocks(),
        **{name: counters().get(name) for name in names},
    }
