"""What holds a workload back: a pure judgement of one window, with all its evidence.

The order of the questions matters. Is there anything to judge? Does the server idle? Do requests
lose or lack KV blocks? Do they wait for a slot? Only then: what does a step spend its time on?
Where the evidence is thin the verdict abstains and names what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvtune.profilers.evidence import (
    NAME_CHECKPOINT,
    PEAK_LEAST_SHARE,
    TELL_CONFIGURATION,
    Signs,
    take_signs,
)
from kvtune.profilers.window import Window
from kvtune.types import Bottleneck, Evidence, Verdict

WINDOW_LEAST_S = 2.0
"""Shorter windows hold a handful of scrapes, and a single prefill may fill them."""

COMPLETED_LEAST = 8
STEPS_LEAST = 100
"""Either is enough: eight finished requests give shares of time that one request can't dominate,
and a hundred steps describe a load whose requests are too long to finish."""

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class _Finding:
    bottleneck: Bottleneck
    confidence: Confidence
    summary: str
    next_experiment: str = ""
    missing: tuple[str, ...] = ()


def judge(window: Window) -> Verdict:
    """Name the bottleneck of a window, how sure that is, and what would settle it."""
    signs = take_signs(window)
    finding = (
        _nothing_to_judge(window, signs)
        or _idle(window, signs)
        or _too_little(window, signs)
        or _waiting(window, signs)
        or _by_measured_use(signs)
        or _by_model(signs)
    )
    return Verdict(
        bottleneck=finding.bottleneck,
        confidence=finding.confidence,
        evidence=(*_amounts(window), *signs.evidence),
        summary=finding.summary,
        missing=tuple(dict.fromkeys([*finding.missing, *signs.missing])),
        next_experiment=finding.next_experiment,
    )


def _abstain(summary: str, next_experiment: str, *missing: str) -> _Finding:
    return _Finding(Bottleneck.ABSTAIN, "low", summary, next_experiment, missing)


def _amounts(window: Window) -> tuple[Evidence, ...]:
    """How much was seen."""
    rows = (
        ("window", window.window_s, WINDOW_LEAST_S, "s", "clock", "the window is long enough"),
        (
            "completed_requests",
            window.completed,
            COMPLETED_LEAST,
            "requests",
            "vllm:request_success_total",
            "enough requests finished",
        ),
        (
            "engine_steps",
            window.steps,
            STEPS_LEAST,
            "steps",
            "vllm:iteration_tokens_total_count",
            "enough engine steps were seen",
        ),
    )
    return tuple(
        Evidence(
            metric=metric,
            value=value,
            threshold=threshold,
            unit=unit,
            source=source,
            holds=None if value is None else value >= threshold,
            says=says,
        )
        for metric, value, threshold, unit, source, says in rows
    )


def _nothing_to_judge(window: Window, signs: Signs) -> _Finding | None:
    if not window.has_engine_series:
        return _abstain(
            "The server exports no engine statistics, so its workload cannot be judged.",
            "Restart it without --disable-log-stats and profile again.",
            "vllm: series: restart without --disable-log-stats (or this is not a vLLM server)",
        )
    if window.window_s < WINDOW_LEAST_S:
        return _abstain(
            f"{window.window_s:.1f} s is too short a window to judge.",
            f"Profile for at least {WINDOW_LEAST_S:g} s, better a minute.",
            f"window: at least {WINDOW_LEAST_S:g} s",
        )
    if window.steps is None:
        return _abstain(
            "The server does not count its engine steps.",
            "Use a vLLM that exports vllm:iteration_tokens_total.",
            "engine_steps: needs vllm:iteration_tokens_total",
        )
    if window.steps == 0 and window.in_flight:
        return _abstain(
            "Requests are in flight but no engine step finished: the server hangs, or one step "
            "outlasts the window.",
            "Look at the server's log, or profile for longer.",
            "engine_steps: at least one",
        )
    if signs.client.holds:
        return _abstain(
            "The load client itself is at its limit, so the figures are the client's.",
            "Run the client on another machine, or replay at a lower rate.",
            "client_cpu_share: a client with spare CPU",
        )
    return None


def _idle(window: Window, signs: Signs) -> _Finding | None:
    if window.steps and not signs.idle.holds:
        return None
    busy = 0.0 if not window.steps else signs.idle.value or 0.0
    more = "replay at a higher rate" if window.is_load_ours else "profile under peak traffic"
    return _Finding(
        Bottleneck.IDLE,
        "high",
        f"The server is busy {busy:.0%} of the time, so nothing holds this load back: "
        "no lever will raise its throughput.",
        f"To find the limit, {more}.",
    )


def _too_little(window: Window, signs: Signs) -> _Finding | None:
    completed, steps = window.completed or 0.0, window.steps or 0.0
    if completed >= COMPLETED_LEAST or steps >= STEPS_LEAST:
        return None
    return _abstain(
        f"{completed:.0f} finished requests and {steps:.0f} engine steps are too few to judge.",
        f"Profile until {COMPLETED_LEAST} requests or {STEPS_LEAST} steps are done.",
        f"completed_requests: at least {COMPLETED_LEAST}",
    )


# --- who waits for what -----------------------------------------------------------------------


def _waiting(window: Window, signs: Signs) -> _Finding | None:
    """What requests wait for.

    vLLM's waiting reason "capacity" is anything but a deferral: KV blocks, a sequence slot or the
    step's token budget. They are told apart here by the room in the cache and the slots in use.
    """
    if signs.preempted.holds:
        return _kv_capacity("high", f"{signs.preempted.value:.2f} preemptions a request")
    if not (signs.queued.holds or signs.waiting.holds):
        return None
    if signs.at_limit.holds and not signs.full.holds:
        return _batch_width(window, signs)
    if signs.full.holds or signs.no_room.holds:
        sure: Confidence = "high" if signs.at_limit.fails else "medium"
        return _kv_capacity(sure, "requests wait and the free blocks don't hold their prompts")
    if signs.prefill.holds:
        return None  # they wait for the step's token budget
    if window.sequence_limit is None:
        return _abstain(
            "Requests wait, but whether for KV blocks or for a sequence slot cannot be told: "
            "max_num_seqs is not known.",
            f"To learn max_num_seqs, {TELL_CONFIGURATION}.",
            "max_num_seqs: /metrics does not export it",
        )
    if signs.at_limit.fails and signs.no_room.value is None:
        return _kv_capacity(
            "low",
            "requests wait although sequence slots are free; without the KV cache size, waiting "
            "for the token budget of a step looks the same",
        )
    return None


def _kv_capacity(confidence: Confidence, why: str) -> _Finding:
    return _Finding(
        Bottleneck.KV_CAPACITY,
        confidence,
        f"Requests lack KV blocks ({why}): room for more tokens will help (more KV memory, fp8 "
        "KV, prefix sharing); more sequence slots or faster kernels will not.",
        "Repeat with twice the KV memory: preemptions and waiting should vanish.",
    )


def _batch_width(window: Window, signs: Signs) -> _Finding:
    usage = signs.full.value
    return _Finding(
        Bottleneck.BATCH_WIDTH,
        "medium" if usage is None else "high",
        f"Requests wait while all {window.sequence_limit} sequence slots run"
        + ("" if usage is None else f" and KV usage peaks at {usage:.0%}")
        + ": raising max_num_seqs will help; KV levers will not help, there is room.",
        "Repeat with twice max_num_seqs: the waiting should vanish.",
    )


# --- what a step spends its time on -----------------------------------------------------------


def _by_measured_use(signs: Signs) -> _Finding | None:
    """From the engine's estimate of its work against the device's measured peaks."""
    flops, traffic = signs.flops.value, signs.traffic.value
    if flops is None or traffic is None:
        return None
    use = f"{flops:.0%} of peak FLOP/s, {traffic:.0%} of peak bytes/s"
    if flops + traffic < PEAK_LEAST_SHARE:
        return _overhead("medium", f"the device is hardly used: {use}")
    if signs.flops.holds and flops > traffic:
        return _compute("high", use)
    if not signs.traffic.holds:
        return None
    if signs.kv_reads.holds:
        return _kv_bandwidth("high", use)
    if signs.weight_reads.holds:
        return _overhead("high", f"mostly weights are read: {use}")
    return None


def _by_model(signs: Signs) -> _Finding:
    """From the division of a mean step on an ideal device, which is weaker evidence."""
    if signs.arithmetic.holds:
        return _compute("medium", f"{signs.arithmetic.value:.0%} of a modelled step")
    if signs.weight_reads.holds:
        return _overhead("medium", f"weights are {signs.weight_reads.value:.0%} of a modelled step")
    if signs.kv_reads.holds:
        why = f"{signs.kv_reads.value:.0%} of a modelled step"
        if signs.traffic.fails:
            return _overhead(
                "low", f"KV would be {why}, but memory traffic is {signs.traffic.value:.0%} of peak"
            )
        return _kv_bandwidth("medium" if signs.traffic.holds else "low", why)
    if signs.arithmetic.value is not None:
        return _abstain(
            f"No single resource dominates: of a modelled step, prefill arithmetic is "
            f"{signs.arithmetic.value:.0%}, weights {signs.weight_reads.value:.0%} and KV reads "
            f"{signs.kv_reads.value:.0%}.",
            "Profile prefill and decoding apart: the same prompts with one output token, then "
            "short prompts with long outputs.",
        )
    if signs.prefill.holds:
        return _compute("low", f"{signs.prefill.value:.0%} of the requests' time is prefill")
    return _abstain(
        "Decoding takes most of the requests' time, but whether it reads KV or weights cannot be "
        "told.",
        f"To tell them apart, {NAME_CHECKPOINT}.",
    )


def _kv_bandwidth(sure: Confidence, why: str) -> _Finding:
    return _Finding(
        Bottleneck.KV_BANDWIDTH,
        sure,
        f"Decode steps mostly read KV ({why}): a smaller KV to read will help (fp8 KV, shorter "
        "contexts); more KV memory will not.",
        "Repeat with half the context at the same batch: the time between tokens should fall.",
    )


def _compute(sure: Confidence, why: str) -> _Finding:
    return _Finding(
        Bottleneck.COMPUTE,
        sure,
        f"Prefill arithmetic is the limit ({why}): KV levers will not help, except a prefix cache "
        "that spares prefill.",
        "Repeat with shorter prompts: time to first token should fall in proportion.",
    )


def _overhead(sure: Confidence, why: str) -> _Finding:
    return _Finding(
        Bottleneck.OVERHEAD,
        sure,
        f"Steps pay a fixed price (reading weights, launching kernels, scheduling; {why}): KV "
        "levers will not help; more requests a step, compilation or CUDA graphs will.",
        "Repeat with twice the concurrency: throughput should rise at nearly the same time "
        "between tokens.",
    )
