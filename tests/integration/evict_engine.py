"""Runs vLLM in this process with page eviction as asked, and tells what it answers and holds.

`evict_engine.py MODEL`: reads one JSON object a line, {"asked": ..., "calls": ..., "engine": ...},
and answers with one each. vLLM is imported once; each line gets a fork of its own.

`calls` are lists of prompts, as text or token ids, each answered together with `tokens` tokens.
`engine` are arguments of `LLM` beside those here. `aborted` are prompts that arrive together and
are given up after one step, then again after two, and so on, before any call.
"""

import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the pool can be looked at
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def answers(model, asked, calls, tokens, engine, aborted=()):
    """What vLLM answers, greedily, and what it holds."""
    from vllm import LLM, SamplingParams

    from kvtune.engines.vllm.plugin.counters import counters

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
            "kv_cache_memory_bytes": 300 << 20,
            **engine,
        },
    )
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
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    told = {"prompts": [], "ids": [], "cached": [], "texts": [], "free": []}
    for steps in range(1, len(aborted) + 1):
        names = [f"{steps}-{number}" for number in range(len(aborted))]
        for name, prompt in zip(names, aborted, strict=True):
            llm.llm_engine.add_request(name, prompt, greedy)
        for _ in range(steps):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(names)
        llm.llm_engine.step()
        told["free"].append(pool.get_num_free_blocks())
    for prompts in calls:
        done = llm.generate(
            [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts],
            greedy,
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
