"""Runs vLLM in this process, with tiers as asked, and tells what it answers and where from.

`calls` are lists of prompts, each answered together from a pool of so many bytes. What is told of
pages are digests of the bytes that the pool holds under the hash of their tokens.
"""

import hashlib
import logging
from collections import Counter

from small_vllm import answer, start

TOKENS = 16


def answers(model, asked, calls, pool_bytes, chunk=256):
    """What vLLM answers, greedily."""
    engine = start(
        model,
        asked,
        max_model_len=1200,
        max_num_batched_tokens=chunk,
        max_num_seqs=4,
        kv_cache_memory_bytes=pool_bytes,
        disable_log_stats=False,
    )
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("vllm.kvtune").addHandler(handler)
    told = []
    for prompts in calls:
        before = sources(engine)
        done = answer(engine, prompts, TOKENS)
        counted = {"tokens": dict(sources(engine) - before), "pages": pages(engine)}
        told.append(done | counted)
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
