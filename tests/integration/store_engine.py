"""Runs vLLM in this process with what the plugin is asked for, and tells what it answers.

`store_engine.py MODEL`: reads one JSON object a line, {"asked": ..., "calls": ..., "engine": ...,
"tokens": ...}, and answers with one each. vLLM is imported once; each line gets a fork of its own.

`calls` are lists of prompts, as text or token ids, each answered together. `engine` are arguments
of `LLM` beside those here. An answer has so many `tokens`.
"""

import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that counters are those of this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def answers(model, asked, calls, engine, tokens):
    """What vLLM answers, greedily, and what it holds."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request

    def watched(self, request, *rest, **named):
        preempted.append(request.request_id)
        return preempt(self, request, *rest, **named)

    Scheduler._preempt_request = watched
    llm = LLM(
        model,
        additional_config={"kvtune": asked} if asked else {},
        distributed_executor_backend="uni",
        enforce_eager=True,
        **{
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 256 << 20,
            **engine,
        },
    )
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    ids, best, cached, texts, computed = [], [], [], [], 0
    for prompts in calls:
        done = llm.generate(
            [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts],
            greedy,
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


def main():
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    model = sys.argv[1]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to where answers go
    for line in sys.stdin:
        receive, send = os.pipe()
        if (child := os.fork()) == 0:
            with os.fdopen(send, "w") as pipe:
                json.dump(answers(model, **json.loads(line)), pipe)
            os._exit(0)
        os.close(send)
        with os.fdopen(receive) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        print(told or json.dumps({"failed": True}), file=answer, flush=True)


if __name__ == "__main__":
    main()
