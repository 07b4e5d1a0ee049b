"""Servers with and without kvtune's plugin, and greedy questions to them."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import JsonValue

from kvtune.engines.base import RunningServer, ServerSpec
from kvtune.engines.vllm.engine import VllmEngine

BLOCK_TOKENS = 32
VOCABULARY = range(1000, 40_000)


def start(
    engine: VllmEngine,
    model: Path,
    asked: Mapping[str, JsonValue],
    log: Path,
    **arguments: JsonValue,
) -> RunningServer:
    """A server that is asked for these policies; none of them is stock vLLM."""
    own: dict[str, JsonValue] = {"additional-config": {"kvtune": dict(asked)}} if asked else {}
    given = {
        "enforce-eager": True,
        "block-size": BLOCK_TOKENS,
        "max-num-batched-tokens": 512,
        "enable-prefix-caching": True,
        **{name.replace("_", "-"): value for name, value in arguments.items()},
        **own,
    }
    spec = ServerSpec(str(model), served_model_name="m", arguments=given)
    return engine.launch(spec, log_path=log, start_timeout_s=400)


def ask(server: RunningServer, prompt: Sequence[int], tokens: int) -> list[int]:
    """The ids of a greedy answer of so many tokens."""
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.endpoint.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=1200) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


def ask_all(
    server: RunningServer, prompts: Sequence[Sequence[int]], tokens: int, at_once: int
) -> list[list[int]]:
    """The answers to all of them, so many at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt, tokens), prompts))


def some_prompts(count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    """Prompts of random words, their lengths spread evenly over the orders of magnitude.

    Every third begins with all of the one before it, as far as that is long enough to be of use to
    a prefix cache.
    """
    draw = random.Random(seed)
    made: list[list[int]] = []
    for place in range(count):
        share = place / max(1, count - 1)
        length = round(shortest * (longest / shortest) ** share)
        begun = made[-1] if place % 3 == 2 else []
        made.append(begun + draw.choices(VOCABULARY, k=length - len(begun)))
    draw.shuffle(made)
    return made
