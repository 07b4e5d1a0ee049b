"""What a verdict says of each bottleneck: what will help, what will not, what would prove it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvtune.profilers.sign import MEASURE_CEILINGS
from kvtune.types import Bottleneck

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer: the verdict without its evidence."""

    bottleneck: Bottleneck
    confidence: Confidence
    summary: str
    next_experiment: str = ""
    missing: tuple[str, ...] = ()


def abstain(summary: str, next_experiment: str, *missing: str) -> Finding:
    """No answer, and what would bring one."""
    return Finding(Bottleneck.ABSTAIN, "low", summary, next_experiment, missing)


def kv_capacity(sure: Confidence, why: str) -> Finding:
    """Requests lack blocks."""
    return Finding(
        Bottleneck.KV_CAPACITY,
        sure,
        f"Requests lack KV blocks ({why}): room for more tokens will help (more KV memory, fp8 "
        "KV, prefix sharing); more sequence slots or faster kernels will not.",
        "Repeat with twice the KV memory: preemptions and waiting should vanish.",
    )


def prefix_thrash(sure: Confidence, why: str) -> Finding:
    """The prefix cache forgets what comes again."""
    return Finding(
        Bottleneck.PREFIX_THRASH,
        sure,
        f"Prefixes are evicted before they are used again ({why}): room to keep them will help "
        "(more KV memory, fp8 KV, offload of evicted blocks, requests of one prefix sent close "
        "together); more sequence slots will evict more.",
        "Repeat with twice the KV memory: the share of prefix hits should rise.",
    )


def batch_width(limit: int | None, usage: float | None) -> Finding:
    """All slots run while KV is free; `usage` is the peak share of KV blocks held."""
    return Finding(
        Bottleneck.BATCH_WIDTH,
        "medium" if usage is None else "high",
        f"Requests wait while all {limit} sequence slots run"
        + ("" if usage is None else f" and KV usage peaks at {usage:.0%}")
        + ": raising max_num_seqs will help; KV levers will not help, there is room.",
        "Repeat with twice max_num_seqs: the waiting should vanish.",
    )


def kv_bandwidth(sure: Confidence, why: str, *, is_slow: bool = False) -> Finding:
    """Steps read KV; `is_slow` says that they do so far below what the memory can."""
    helps = (
        "shorter contexts or reading fewer tokens will help; fewer bytes a token may not, because "
        "KV is read far below the memory's speed"
        if is_slow
        else "a smaller KV to read will help (fp8 KV, shorter contexts)"
    )
    return Finding(
        Bottleneck.KV_BANDWIDTH,
        sure,
        f"Decode steps mostly read KV ({why}): {helps}; more KV memory will not.",
        "Repeat with half the context at the same batch: the time between tokens should fall.",
    )


def weight_bandwidth(sure: Confidence, why: str) -> Finding:
    """Steps read weights, near what the memory can."""
    return Finding(
        Bottleneck.WEIGHT_BANDWIDTH,
        sure,
        f"Decode steps mostly read weights ({why}): more requests a step will help, or smaller "
        "weights; KV levers will not help, unless KV room is what keeps the batch small.",
        "Repeat with twice the concurrency: throughput should nearly double at nearly the same "
        "time between tokens.",
    )


def compute(sure: Confidence, why: str) -> Finding:
    """Prompts are computed."""
    return Finding(
        Bottleneck.COMPUTE,
        sure,
        f"Prefill arithmetic is the limit ({why}): KV levers will not help, except a prefix cache "
        "that spares prefill.",
        "Repeat with shorter prompts: time to first token should fall in proportion.",
    )


def decode_compute(sure: Confidence, why: str) -> Finding:
    """The batch is so wide that each sequence costs its arithmetic."""
    return Finding(
        Bottleneck.COMPUTE,
        sure,
        f"The work of each decoded token is the limit ({why}): a wider batch and KV levers will "
        "not help; a faster device or fewer operations a token will.",
        "Repeat with half the concurrency: the time between tokens should fall, throughput should "
        "hardly change.",
    )


def overhead(sure: Confidence, why: str) -> Finding:
    """Steps pay a price that no tensor explains."""
    return Finding(
        Bottleneck.OVERHEAD,
        sure,
        f"Steps pay a fixed price (launching kernels, scheduling; {why}): KV levers will not "
        "help; more requests a step, compilation or CUDA graphs will.",
        "Repeat with twice the concurrency: throughput should rise at nearly the same time "
        "between tokens.",
    )


def fixed_price(why: str, *, may_be_compute: bool = False) -> Finding:
    """Weights or overhead, or prefill on a device slow at arithmetic: only ceilings tell."""
    said = (
        f"Steps hardly read KV ({why}), but whether they read weights, compute prompts or are "
        "overhead cannot be told. A smaller KV to read will not help."
        if may_be_compute
        else f"Steps pay a fixed price ({why}), but whether it reads weights or is overhead cannot "
        "be told. Either way KV levers will not help, and more requests a step will."
    )
    return abstain(
        said,
        f"To tell them apart, {MEASURE_CEILINGS}; then profile again.",
        f"device_ceilings: {MEASURE_CEILINGS}",
    )
