"""The regimes of the labelled suite: loads and engines whose bottleneck is known beforehand.

Sizes are for SmolLM2-135M on two CPU cores. Measured there on a quiet machine: a decode step takes
15 ms, 0.7 ms more a sequence and 2.6 us more a cached token, and a prompt token about 0.5 ms. A
load is some ten seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue
from verdict_parts import Arm, Expected, Load, Regime

from kvtune.types import Bottleneck

KV_BYTES_PER_TOKEN = 23_040
"""Of SmolLM2-135M in bfloat16: 30 layers x 3 KV heads x 64 x keys and values x 2 bytes."""

BLOCK_TOKENS = 128
"""The engine's own block on a CPU."""

MIB = 1 << 20


def _engine(blocks: int, longest_tokens: int, **more: JsonValue) -> dict[str, JsonValue]:
    """Arguments of an engine on SmolLM2 with a pool of so many blocks."""
    block_tokens = more.get("block_size", BLOCK_TOKENS)
    assert isinstance(block_tokens, int)
    return {
        "enforce-eager": True,
        "max-model-len": longest_tokens,
        "kv-cache-memory-bytes": blocks * block_tokens * KV_BYTES_PER_TOKEN,
        "max-num-seqs": 64,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


def _memory(base: Mapping[str, JsonValue], factor: float, expected: Expected) -> Arm:
    now = base["kv-cache-memory-bytes"]
    assert isinstance(now, int)
    return Arm(f"kv memory x{factor:g}", expected, {"kv-cache-memory-bytes": int(now * factor)})


def _seqs(count: int, expected: Expected = "does not help") -> Arm:
    return Arm(f"max-num-seqs {count}", expected, {"max-num-seqs": count})


def _blocks(tokens: int, expected: Expected = "does not help") -> Arm:
    return Arm(f"blocks of {tokens}", expected, {"block-size": tokens})


def _batched(tokens: int, expected: Expected = "does not help") -> Arm:
    name = "max-num-batched-tokens"
    return Arm(f"{name} {tokens}", expected, {name: tokens})


def _caching_off() -> Arm:
    return Arm("prefix caching off", "does not help", {"enable-prefix-caching": False})


def _fp8(expected: Expected = "open") -> Arm:
    return Arm("fp8", expected, {"kv-cache-dtype": "fp8"})


def _load(name: str, load: Load, expected: Expected = "helps") -> Arm:
    return Arm(name, expected, load=load)


def regimes() -> tuple[Regime, ...]:
    """All of them, in the order in which they are run."""
    return (
        _preempted(),
        _no_room(),
        _uneven(),
        _long_contexts(),
        _shared_context(),
        _prefill_only(),
        _short_answers(),
        _few_slots(),
        _thrash(),
        _idle(),
        _wide_model(),
        _tiny_model(),
        _eager(),
        _mixed(),
        _halved(_preempted(), "hurts", "and an arm whose pool holds less than four"),
        _halved(_thrash(), "hurts", "and an arm whose pool holds one request and not a second"),
        _short_prefixes(),
        _halved(_uneven(), "hurts", "and an arm whose pool holds 736 tokens"),
        _halved(
            _with_memory(_long_contexts(), 1024 * MIB),
            "changes nothing",
            "in a pool of 65,536 tokens, of which the load fills a quarter",
        ),
    )


def _preempted() -> Regime:
    base = _engine(49, 512, block_size=32)
    return Regime(
        "capacity-preempted",
        (Bottleneck.KV_CAPACITY,),
        "16 at a time that grow to 192 tokens each, in a pool of 1,536: all are admitted, half fit",
        Load(24, 64, 128, concurrency=16),
        base,
        (_memory(base, 2, "helps"), _fp8("helps"), _seqs(128), _caching_off()),
    )


def _no_room() -> Regime:
    base = _engine(17, 896)
    return Regime(
        "capacity-waiting",
        (Bottleneck.KV_CAPACITY,),
        "prompts of 768 tokens in a pool of 2,048: two run, and a third prompt does not fit",
        Load(8, 768, 96, concurrency=6),
        base,
        (_memory(base, 2, "helps"), _seqs(128), _batched(4096), _caching_off()),
    )


def _uneven() -> Regime:
    base = _engine(49, 512, block_size=32)
    return Regime(
        "capacity-uneven",
        (Bottleneck.KV_CAPACITY,),
        "prompts of 32 to 224 and answers of 24 to 168 tokens, 12 at a time, in a pool of 1,536",
        Load(25, 128, 96, concurrency=12, uneven=True),
        base,
        (_memory(base, 2, "helps"), _seqs(128), _batched(4096)),
    )


def _long_contexts() -> Regime:
    base = _engine(0, 4096) | {"kv-cache-memory-bytes": 512 * MIB}
    return Regime(
        "bandwidth",
        (Bottleneck.KV_BANDWIDTH,),
        "8 unlike contexts of 2,048 tokens at a time, 128 tokens each; two layers, 32 KV heads",
        Load(16, 2048, 128, concurrency=8),
        base,
        (
            _load("half the resident context", Load(16, 1024, 128, concurrency=8)),
            _memory(base, 2, "does not help"),
            _seqs(128),
            _fp8(),
        ),
        model="keys",
        goal="max goodput where mean itl <= 500ms",
    )


def _shared_context() -> Regime:
    base = _engine(112, 4096)
    half = Load(24, 32, 96, concurrency=24, prefixes=1, prefix_tokens=1792)
    return Regime(
        "bandwidth-shared",
        (Bottleneck.KV_BANDWIDTH,),
        "24 at a time, 96 tokens each, over 3,584 tokens that all share",
        Load(24, 32, 96, concurrency=24, prefixes=1, prefix_tokens=3584),
        base,
        (
            _load("half the resident context", half),
            _memory(base, 2, "does not help"),
            _seqs(128),
            _fp8(),
        ),
        goal="max goodput where mean itl <= 500ms",
    )


def _prefill_only() -> Regime:
    base = _engine(112, 2048)
    return Regime(
        "prefill-only",
        (Bottleneck.COMPUTE,),
        "unlike prompts of 1,024 tokens, 4 at a time, one token each",
        Load(16, 1024, 1, concurrency=4),
        base,
        (
            _load("half the prompt", Load(16, 512, 1, concurrency=4)),
            _memory(base, 2, "does not help"),
            _batched(4096),
        ),
    )


def _short_answers() -> Regime:
    base = _engine(112, 2048)
    shared = Load(10, 512, 8, concurrency=4, prefixes=1, prefix_tokens=1024)
    return Regime(
        "prefill-short-answers",
        (Bottleneck.COMPUTE,),
        "unlike prompts of 1,536 tokens, 4 at a time, 8 tokens each",
        Load(10, 1536, 8, concurrency=4),
        base,
        (
            _load("two thirds of the prompt shared", shared),
            _memory(base, 2, "does not help"),
            _caching_off(),
        ),
    )


def _few_slots() -> Regime:
    base = _engine(112, 2048, max_num_seqs=2)
    return Regime(
        "few-slots",
        (Bottleneck.BATCH_WIDTH,),
        "12 at a time on two sequence slots, in a pool that holds 100 of them",
        Load(16, 64, 48, concurrency=12),
        base,
        (_seqs(4, "helps"), _memory(base, 2, "does not help"), _batched(4096), _fp8("open")),
    )


def _thrash() -> Regime:
    base = _engine(28, 1280)
    return Regime(
        "thrash",
        (Bottleneck.PREFIX_THRASH,),
        "4 prefixes of 1,024 tokens in turn, two at a time, in a pool that holds three",
        Load(16, 32, 8, concurrency=2, prefixes=4, prefix_tokens=1024),
        base,
        (_memory(base, 2, "helps"), _seqs(128), _batched(4096), _caching_off()),
    )


def _idle() -> Regime:
    base = _engine(112, 2048)
    return Regime(
        "idle",
        (Bottleneck.IDLE,),
        "one request of 64 and 8 tokens a second",
        Load(9, 64, 8, rate_per_s=1.0),
        base,
        (
            _load("twice the rate", Load(9, 64, 8, rate_per_s=2.0)),
            _memory(base, 2, "does not help"),
            _blocks(64),
        ),
        goal="max goodput where p95 ttft <= 1s",
    )


def _wide_model() -> Regime:
    base = _engine(0, 1024) | {"kv-cache-memory-bytes": 128 * MIB}
    return Regime(
        "weights",
        (Bottleneck.WEIGHT_BANDWIDTH,),
        "one at a time, 32 and 32 tokens, on two layers of 173 million weights each",
        Load(10, 32, 32, concurrency=1),
        base,
        (
            Arm("half the weights", "helps", model="half"),
            _load("4 at a time", Load(40, 32, 32, concurrency=4)),
            _memory(base, 2, "does not help"),
            _blocks(64),
        ),
        model="wide",
    )


def _tiny_model() -> Regime:
    base = _engine(0, 1024) | {"kv-cache-memory-bytes": 32 * MIB}
    return Regime(
        "overhead-tiny",
        (Bottleneck.OVERHEAD,),
        "one at a time, 32 and 64 tokens, on two layers that are 64 wide",
        Load(90, 32, 64, concurrency=1),
        base,
        (
            _load("8 at a time", Load(240, 32, 64, concurrency=8)),
            _memory(base, 2, "does not help"),
            _seqs(128),
        ),
        model="tiny",
    )


def _eager() -> Regime:
    base = _engine(112, 2048)
    return Regime(
        "overhead-eager",
        (Bottleneck.OVERHEAD,),
        "SmolLM2 without compilation, one at a time, 64 and 64 tokens: 30 layers, 269 MB",
        Load(8, 64, 64, concurrency=1),
        base,
        (
            Arm("compiled", "helps", removed=("enforce-eager",)),
            _load("4 at a time", Load(32, 64, 64, concurrency=4)),
            _memory(base, 2, "does not help"),
        ),
    )


def _mixed() -> Regime:
    base = _engine(176, 4096)
    half = Load(6, 640, 160, concurrency=6)
    return Regime(
        "mixed",
        (Bottleneck.COMPUTE, Bottleneck.KV_BANDWIDTH),
        "6 unlike prompts of 1,280 tokens at once, then 160 tokens each over all of that",
        Load(6, 1280, 160, concurrency=6),
        base,
        (
            _load("half the prompt", half),
            _memory(base, 2, "does not help"),
            _seqs(128),
        ),
    )


def _halved(regime: Regime, expected: Expected, how: str) -> Regime:
    """The same server and load with half the memory as the only arm: a lever that costs."""
    return replace(
        regime,
        name=f"{regime.name}-halved",
        built=f"{regime.built}; {how}",
        arms=(_memory(regime.arguments, 0.5, expected),),
    )


def _with_memory(regime: Regime, memory_bytes: int) -> Regime:
    return replace(regime, arguments={**regime.arguments, "kv-cache-memory-bytes": memory_bytes})


def _short_prefixes() -> Regime:
    base = _engine(112, 2048)
    return Regime(
        "short-prefixes",
        (Bottleneck.COMPUTE,),
        "4 prefixes of 96 tokens in turn, 32 own and 4 new ones each, 4 at a time: "
        "no block of 128 is shared",
        Load(80, 32, 4, concurrency=4, prefixes=4, prefix_tokens=96),
        base,
        (
            _blocks(32, "helps"),
            _blocks(64, "helps"),
            _memory(base, 2, "changes nothing"),
        ),
    )
