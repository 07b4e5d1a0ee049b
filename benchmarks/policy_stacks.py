"""The stacks that the method benchmarks run: each method at several strengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A stack, under the name of the method that it is about."""

    method: str
    stack: str


FULL = Entry("full cache", "full")
BUDGETS = (128, 256, 512)


def _each(method: str, *stacks: str) -> tuple[Entry, ...]:
    return tuple(Entry(method, stack) for stack in stacks)


STACKS: tuple[Entry, ...] = (
    *_each(
        "StreamingLLM",
        *(f"streaming-llm:sink_tokens=4,window_tokens={n - 4},positions=keep" for n in BUDGETS),
        "streaming-llm:sink_tokens=4,window_tokens=252",
    ),
    *_each("TOVA", *(f"tova:budget_tokens={n}" for n in BUDGETS)),
    *_each("H2O", *(f"h2o:heavy_tokens={n // 2},recent_tokens={n // 2}" for n in BUDGETS)),
    *_each("Scissorhands", *(f"scissorhands:budget_tokens={n},window_tokens=64" for n in BUDGETS)),
    *_each("SnapKV", *(f"snapkv:budget_tokens={n}" for n in BUDGETS)),
    *_each("ChunkKV", *(f"chunkkv:budget_tokens={n}" for n in BUDGETS)),
    *_each("KVzip", *(f"kvzip:kept_ratio={ratio}" for ratio in (0.15, 0.3, 0.5))),
    *_each("KVzip, uniform heads", "kvzip:kept_ratio=0.3,mode=pair-uniform"),
    *_each(
        "R-KV",
        *(f"r-kv:budget_tokens={n},buffer_tokens=32,pin_prompt=false" for n in BUDGETS),
    ),
    *_each("Quest", *(f"quest:budget_tokens={n}" for n in BUDGETS)),
    *_each("KIVI", "kivi:bits=2", "kivi:bits=4"),
    *_each("KVQuant", "kvquant:bits=2", "kvquant:bits=3", "kvquant:bits=4"),
    *_each("GEAR", "gear:bits=2", "gear:bits=4"),
    *_each("Palu", "palu:keep_ratio=0.5", "palu:keep_ratio=0.75"),
    *_each("OjaKV", "ojakv:keep_ratio=0.5", "ojakv:keep_ratio=0.75"),
    *_each("MiniCache", "minicache", "minicache + vllm-int4-per-token-head"),
    *_each(
        "TurboQuant",
        *(f"turboquant:bits_key={n},bits_value={n}" for n in (2, 3, 4)),
        "turboquant:bits_key=2,bits_value=2,outlier_channels=16",
        "turboquant:bits_key=3,bits_value=3,mode_key=prod",
        "turboquant:bits_key=3,bits_value=3,center_keys=true",
    ),
    *_each("vLLM fp8", "vllm-fp8"),
    *_each(
        "vLLM per-token-head",
        "vllm-int8-per-token-head",
        "vllm-fp8-per-token-head",
        "vllm-int4-per-token-head",
    ),
    *_each(
        "vLLM TurboQuant",
        *(f"vllm-turboquant:preset={name}" for name in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")),
    ),
    *_each(
        "stacks",
        "snapkv:budget_tokens=256 + turboquant:bits_key=4,bits_value=4",
        "quest:budget_tokens=256 + turboquant:bits_key=4,bits_value=4",
        "palu:keep_ratio=0.75 + turboquant:bits_key=4,bits_value=4",
    ),
)
