"""Regimes for kvtune's plugin: what its policies do where keys and values bind, and where not.

They are run as those of `verdict_regimes.py` are: the policies are arms beside stock, in turns, and
strengths are those that a profile forecasts. Numbers are float32, with which every CPU computes.
Sizes are for part of SmolLM2-135M (`verdicts.py --layers 8`) on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue
from verdict_parts import Arm, Expected, Load, Regime

from kvtune.autotune.forecast.plugin_levers import plugin_budgets
from kvtune.policies.method import History
from kvtune.types import Bottleneck

BLOCK_TOKENS = 32
SHARE = 0.25
"""Of a request that a policy reads or keeps; forecast by a profile too."""

MIB = 1 << 20


def plugin_regimes() -> tuple[Regime, ...]:
    """All of them, in the order in which they are run."""
    return (_long_context(), _small_pool(), _light_load())


def _long_context() -> Regime:
    load = Load(20, 24, 48, concurrency=10, prefixes=1, prefix_tokens=3840)
    return Regime(
        "plugin-bandwidth",
        (Bottleneck.KV_BANDWIDTH,),
        "10 at a time, 48 tokens each, over 3,840 tokens that all share; six layers, 16 KV heads",
        load,
        _engine(384 * MIB, 4096),
        (
            *_policies(load, quest="helps", window="hurts", eviction="open"),
            Arm("kv memory x2", "does not help", {"kv-cache-memory-bytes": 768 * MIB}),
        ),
        model="deep keys",
    )


def _small_pool() -> Regime:
    load = Load(16, 384, 160, concurrency=10)
    return Regime(
        "plugin-capacity",
        (Bottleneck.KV_CAPACITY,),
        "10 at a time that grow from 384 to 544 tokens each, in a pool that holds three",
        load,
        _engine(20 * MIB, 1024),
        (
            *_policies(load, quest="does not help", window="helps", eviction="helps"),
            Arm("kv memory x2", "helps", {"kv-cache-memory-bytes": 40 * MIB}),
        ),
    )


def _light_load() -> Regime:
    load = Load(8, 256, 64, concurrency=1)
    return Regime(
        "plugin-neither",
        (Bottleneck.OVERHEAD, Bottleneck.COMPUTE, Bottleneck.WEIGHT_BANDWIDTH),
        "one at a time, 256 and 64 tokens, in a pool that holds twenty",
        load,
        _engine(80 * MIB, 1024),
        _policies(load, quest="does not help", window="does not help", eviction="does not help"),
    )


def _engine(memory_bytes: int, longest_tokens: int) -> Mapping[str, JsonValue]:
    return {
        "dtype": "float32",
        "enforce-eager": True,
        "block-size": BLOCK_TOKENS,
        "max-model-len": longest_tokens,
        "max-num-seqs": 64,
        "kv-cache-memory-bytes": memory_bytes,
    }


def _policies(load: Load, **expected: Expected) -> tuple[Arm, ...]:
    """Quest, StreamingLLM and eviction of pages, as a profile of this load has them."""
    mean = History(load.prefix_tokens + load.prompt_tokens, load.output_tokens)
    offers = plugin_budgets(mean, (SHARE,), BLOCK_TOKENS)
    return tuple(
        Arm(offer.name, effect, offer.arguments)
        for called, effect in zip(
            ("quest", "streaming-llm", "page-eviction"),
            (expected["quest"], expected["window"], expected["eviction"]),
            strict=True,
        )
        for offer in offers
        if offer.name.startswith(called)
    )
