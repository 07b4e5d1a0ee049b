"""The loads of `watching.py`: three on one server, each held back by something else.

The truth follows from how each is built; that moving the named lever helps, and that moving others
does not, is what `verdicts.py` shows on the same kinds of load.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pydantic import JsonValue

from kvtune.profilers.load.client import ClosedLoop, replay
from kvtune.profilers.load.request import prepare
from kvtune.profilers.load.runtime import run
from kvtune.types import Bottleneck, Endpoint, Request

KV_BYTES_PER_TOKEN = 23_040
"""Of SmolLM2-135M in bfloat16: 30 layers x 3 KV heads x 64 x keys and values x 2 bytes."""

BLOCK_TOKENS = 128
POOL_BLOCKS = 17
"""vLLM keeps one for itself: 2,048 tokens are left."""

SERVER: dict[str, JsonValue] = {
    "enforce-eager": True,
    "max-model-len": 896,
    "max-num-seqs": 4,
    "kv-cache-memory-bytes": POOL_BLOCKS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN,
}


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` unlike requests in flight until the client is killed.

    `needs_ceilings`: without knowing what the device reaches there is no verdict, and has to be
    none.
    """

    name: str
    truth: Bottleneck
    built: str
    concurrency: int
    prompt_tokens: int
    answer_tokens: int
    most_requests: int
    needs_ceilings: bool = False


LOADS = (
    Load(
        "slots",
        Bottleneck.BATCH_WIDTH,
        "12 at a time, 64 and 48 tokens, on 4 sequence slots in a pool that holds 16 of them",
        concurrency=12,
        prompt_tokens=64,
        answer_tokens=48,
        most_requests=20_000,
    ),
    Load(
        "pool",
        Bottleneck.KV_CAPACITY,
        "6 at a time, 768 and 96 tokens, in a pool of 2,048: two run, and a third does not fit",
        concurrency=6,
        prompt_tokens=768,
        answer_tokens=96,
        most_requests=1_000,
    ),
    Load(
        "one",
        Bottleneck.OVERHEAD,
        "one at a time, 64 and 64 tokens, without compilation: 30 layers, 269 MB",
        concurrency=1,
        prompt_tokens=64,
        answer_tokens=64,
        most_requests=5_000,
        needs_ceilings=True,
    ),
)


def load_named(name: str) -> Load:
    return next(load for load in LOADS if load.name == name)


def keep_up(load: Load, url: str, model: str) -> None:
    """Send the load until killed; says `ready` before the first request."""
    ids = random.Random(0)
    requests = [
        prepare(
            Request(token_ids=tuple(ids.choices(range(100, 20_000), k=load.prompt_tokens))),
            model=model,
            index=number,
            fixed_length=True,
            output_tokens=load.answer_tokens,
            cache_salt=None,
        )
        for number in range(load.most_requests)
    ]
    print("ready", flush=True)
    endpoint = Endpoint(url, model)
    run(replay(endpoint, requests, ClosedLoop(load.concurrency), scrape_interval_s=None))
