"""Runs vLLM in this process with what the plugin is asked for, and tells what it answers.

`store_engine.py MODEL`, see `vllm_forks`, answers {"asked": ..., "calls": ..., "engine": ...,
"tokens": ...}.

`calls` are lists of prompts, as text or token ids, each answered together. `engine` are arguments
of `LLM` beside those here. An answer has so many `tokens`.
"""

from vllm_forks import greedy, serve, start


def answers(model, asked, calls, engine, tokens):
    """What vLLM answers, greedily, and what it holds."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request

    def watched(self, request, *rest, **named):
        preempted.append(request.request_id)
        return preempt(self, request, *rest, **named)

    Scheduler._preempt_request = watched
    llm = start(model, asked, **engine)
    ids, best, cached, texts, computed = [], [], [], [], 0
    for prompts in calls:
        done = llm.generate(
            [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts],
            greedy(tokens, logprobs=2),
            use_tqdm=False,
        )
        ids.append([list(request.outputs[0].token_ids) for request in done])
        # Of each token of an answer, the best two: [[id, log probability], ...].
        best.append(
            [
                [[[i, lp.logprob] for i, lp in each.items()] for each in one.outputs[0].logprobs]
                for one in done
            ]
        )
        texts.append([request.outputs[0].text for request in done])
        cached.append([request.num_cached_tokens for request in done])
        # The last token of an answer is not computed any more.
        computed += sum(
            len(request.prompt_token_ids) - request.num_cached_tokens + tokens - 1
            for request in done
        )
    from kvtune.engines.vllm.plugin.counters import counters

    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    cache = core.vllm_config.cache_config
    names = ("kv_bytes_stored", "kv_bytes_read", "pages_seen", "pages_read")
    return {
        "ids": ids,
        "cached": cached,
        "texts": texts,
        "best": best,
        "computed_tokens": computed,
        "preemptions": len(preempted),
        "blocks": cache.num_gpu_blocks,
        "size_tokens": cache.kv_cache_size_tokens,
        "free_blocks": pool.get_num_free_blocks(),
        **{name: counters().get(name) for name in names},
    }


if __name__ == "__main__":
    serve(answers)
