"""Runs vLLM in this process, with tiers as asked, and tells what it answers and where from.

`tiers_engine.py MODEL`: reads one JSON object a line, {"kvtune": ..., "calls": ..., "pool_bytes":
...}, and answers with one each. vLLM is imported once; each line gets a fork of its own, which is a
server that starts anew.

`calls` are lists of prompts, as token ids, each answered together from a pool of so many bytes.
What is told of pages are digests of the bytes that the pool holds under the hash of their tokens.
"""

import hashlib
import json
import logging
import os
import sys
from collections import Counter

PAGE, TOKENS = 32, 16
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that pages can be looked at
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "HF_HUB_OFFLINE": "1",
}


def answers(model, asked):
    """What vLLM answers, greedily."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="float32",
        block_size=PAGE,
        max_model_len=1200,
        max_num_batched_tokens=asked.get("chunk", 256),
        max_num_seqs=4,
        kv_cache_memory_bytes=asked["pool_bytes"],
        enforce_eager=True,
        disable_log_stats=False,
        additional_config={"kvtune": asked["kvtune"]},
        distributed_executor_backend="uni",
    )
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("vllm.kvtune").addHandler(handler)
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    told = []
    for prompts in asked["calls"]:
        before = sources(engine)
        done = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False
        )
        told.append(
            {
                "ids": [list(request.outputs[0].token_ids) for request in done],
                "tokens": dict(sources(engine) - before),
                "pages": pages(engine),
            }
        )
    from kvtune.engines.vllm.plugin.counters import counters

    figures = {
        f"{name} {tier} {direction}": counters().get(name, tier=tier, direction=direction)
        for name in ("tier_bytes", "tier_seconds", "tier_failures")
        for tier in ("host", "disk")
        for direction in ("store", "load")
    }
    engine.llm_engine.engine_core.shutdown()
    return {"calls": told, "warnings": warnings, "figures": figures}


def sources(engine):
    """Prompt tokens by where their keys and values came from, as vLLM counts them."""
    counted = Counter()
    for metric in engine.get_metrics():
        if metric.name in ("vllm:prompt_tokens_by_source", "vllm:prompt_tokens_cached_by_source"):
            counted[metric.labels["source"]] += metric.value
    return counted


def pages(engine):
    """A digest of each published page, by the hash of its tokens."""
    core = engine.llm_engine.engine_core.engine_core
    caches = core.model_executor.driver_worker.worker.model_runner.kv_caches
    digests = {}
    for block in core.scheduler.kv_cache_manager.block_pool.blocks:
        if block.block_hash is not None:
            digest = hashlib.sha256()
            for cache in caches:
                digest.update(cache[block.block_id].numpy().tobytes())
            digests[block.block_hash.hex()] = digest.hexdigest()
    return digests


def main():
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    model = sys.argv[1]
    for line in sys.stdin:
        receive, send = os.pipe()
        if (child := os.fork()) == 0:
            with os.fdopen(send, "w") as pipe:
                json.dump(answers(model, json.loads(line)), pipe)
            os._exit(0)
        os.close(send)
        with os.fdopen(receive) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        sys.stdout.write((told or json.dumps({"failed": True})) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
