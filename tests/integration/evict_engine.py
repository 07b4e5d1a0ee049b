"""Runs vLLM in this process with page eviction as asked, and tells what it answers and holds.

`evict_engine.py MODEL`, see `vllm_forks`, answers {"asked": ..., "calls": ..., "engine": ...}.

`calls` are lists of prompts, as text or token ids, each answered together with `tokens` tokens.
`engine` are arguments of `LLM` beside those here. `aborted` are prompts that arrive together and
are given up after one step, then again after two, and so on, before any call.
"""

from vllm_forks import greedy, serve, start


def answers(model, asked, calls, tokens, engine, aborted=()):
    """What vLLM answers, greedily, and what it holds."""
    from kvtune.engines.vllm.plugin.counters import counters

    llm = start(model, asked, **{"kv_cache_memory_bytes": 300 << 20, **engine})
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
    draw = greedy(tokens)
    told = {"prompts": [], "ids": [], "cached": [], "texts": [], "free": []}
    for steps in range(1, len(aborted) + 1):
        names = [f"{steps}-{number}" for number in range(len(aborted))]
        for name, prompt in zip(names, aborted, strict=True):
            llm.llm_engine.add_request(name, prompt, draw)
        for _ in range(steps):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(names)
        llm.llm_engine.step()
        told["free"].append(pool.get_num_free_blocks())
    for prompts in calls:
        done = llm.generate(
            [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts],
            draw,
            use_tqdm=False,
        )
        told["prompts"].append([list(request.prompt_token_ids) for request in done])
        told["ids"].append([list(request.outputs[0].token_ids) for request in done])
        told["texts"].append([request.outputs[0].text for request in done])
        told["cached"].append([request.num_cached_tokens for request in done])
        told["free"].append(pool.get_num_free_blocks())
    known = "page_eviction" in (asked or {})
    return {
        **told,
        "pool": pool.num_gpu_blocks - 1,
        "preempted": preempted,
        "most_running": max(running),
        "evicted": counters().get("evicted_tokens", cause="score") if known else 0,
        "pages": [counters().get(name) for name in ("pages_seen", "pages_read")],
    }


if __name__ == "__main__":
    serve(answers)
