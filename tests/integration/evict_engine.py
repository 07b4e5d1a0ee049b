"""Runs vLLM in this process with page eviction as asked, and tells what it answers and holds.

`calls` are lists of prompts, each answered together with `tokens` tokens. `engine` are arguments of
`LLM` beside those here. `aborted` are prompts that arrive together and are given up after one step,
then again after two, and so on, before any call.
"""

from small_vllm import answer, greedy, start


def answers(model, asked, calls, tokens, engine, aborted=()):
    """What vLLM answers, greedily, and what it holds."""
    llm = start(model, asked, **engine)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    preempted, running = [], []
    preempt, schedule = scheduler._preempt_request, scheduler.schedule

    def _preempt_request(request, *rest, **named):
        preempted.append(request.num_output_tokens)
        preempt(request, *rest, **named)

    def watched(*given, **named):
        scheduled = schedule(*given, **named)
        running.append(len(scheduler.running))
        return scheduled

    scheduler._preempt_request, scheduler.schedule = _preempt_request, watched
    done, free = [], []
    for steps in range(1, len(aborted) + 1):
        names = [f"{steps}-{number}" for number in range(len(aborted))]
        for name, prompt in zip(names, aborted, strict=True):
            llm.llm_engine.add_request(name, prompt, greedy(tokens))
        for _ in range(steps):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(names)
        llm.llm_engine.step()
        free.append(pool.get_num_free_blocks())
    for prompts in calls:
        done.append(answer(llm, prompts, tokens))
        free.append(pool.get_num_free_blocks())
    from kvtune.engines.vllm.plugin.counters import counters

    known = "page_eviction" in asked
    return {
        "calls": done,
        "free": free,
        "pool": pool.num_gpu_blocks - 1,
        "preempted": preempted,
        "most_running": max(running),
        "evicted": counters().get("evicted_tokens", cause="score") if known else 0,
        "pages": [counters().get(name) for name in ("pages_seen", "pages_read")],
    }
