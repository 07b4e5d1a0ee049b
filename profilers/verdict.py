"""What holds a workload back: a pure judgement of one window, with all its evidence.

The order of the questions matters. Is there anything to judge? Does the server idle, and keeps
nobody waiting meanwhile? Do requests lose or lack KV blocks, for themselves or for what comes
again? Do they wait for a slot? Only then: what does a step spend its time on? Where the evidence is
thin the verdict abstains and names what is missing. Of a server that idles between bursts, the
bursts are judged.
"""

from __future__ import annotations

from dataclasses import replace

from kvtune.profilers.evidence import Signs, take_signs
from kvtune.profilers.findings import (
    Confidence,
    Finding,
    abstain,
    batch_width,
    kv_capacity,
    prefix_thrash,
)
from kvtune.profilers.prefix_use import prefix_use
from kvtune.profilers.sign import TELL_SLOTS
from kvtune.profilers.step_shares import shares_of
from kvtune.profilers.step_verdict import judge_steps
from kvtune.profilers.window import Window
from kvtune.types import Bottleneck, Evidence, Verdict

WINDOW_LEAST_S = 2.0
"""Shorter windows hold a handful of scrapes, and a single prefill may fill them."""

COMPLETED_LEAST = 8
STEPS_LEAST = 100
"""Either is enough: eight finished requests give shares of time that one request can't dominate,
and a hundred steps describe a load whose requests are too long to finish."""


def judge(window: Window) -> Verdict:
    """Name the bottleneck of a window, how sure that is, and what would settle it.

    `shares` say how a mean step divides, also where one bottleneck is named; see `shares_of`.
    """
    signs = take_signs(window)
    unjudged = (
        _nothing_to_judge(window, signs) or _idle(window, signs) or _too_little(window, signs)
    )
    finding = (
        unjudged
        or _losing_blocks(window, signs)
        or _thrashing(signs)
        or _waiting(window, signs)
        or judge_steps(window, signs)
    )
    if signs.idle.holds and unjudged is None:
        finding = _within_bursts(finding, signs)
    return Verdict(
        bottleneck=finding.bottleneck,
        confidence=finding.confidence,
        evidence=(*_amounts(window), *signs.evidence),
        summary=finding.summary,
        missing=tuple(dict.fromkeys([*finding.missing, *signs.missing])),
        next_experiment=finding.next_experiment,
        shares={} if unjudged else _shares(window, finding),
    )


def _shares(window: Window, finding: Finding) -> dict[Bottleneck, float]:
    """Those of a mean step; of its arithmetic, what a larger prefix cache would spare is named."""
    shares = shares_of(window)
    avoidable = prefix_use(window).avoidable
    if finding.bottleneck is not Bottleneck.PREFIX_THRASH or not avoidable or not shares:
        return shares
    computed = shares.pop(Bottleneck.COMPUTE, 0.0)
    spared = round(computed * avoidable, 3)
    shares |= {
        Bottleneck.PREFIX_THRASH: spared,
        Bottleneck.COMPUTE: round(computed - spared, 3),
    }
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


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


def _nothing_to_judge(window: Window, signs: Signs) -> Finding | None:
    if not window.has_engine_series:
        return abstain(
            "The server exports no engine statistics, so its workload cannot be judged.",
            "Restart it without --disable-log-stats and profile again.",
            "vllm: series: restart without --disable-log-stats (or this is not a vLLM server)",
        )
    if window.window_s < WINDOW_LEAST_S:
        return abstain(
            f"{window.window_s:.1f} s is too short a window to judge.",
            f"Profile for at least {WINDOW_LEAST_S:g} s, better a minute.",
            f"window: at least {WINDOW_LEAST_S:g} s",
        )
    if window.steps is None:
        return abstain(
            "The server does not count its engine steps.",
            "Use a vLLM that exports vllm:iteration_tokens_total.",
            "engine_steps: needs vllm:iteration_tokens_total",
        )
    if window.steps == 0 and window.in_flight:
        return abstain(
            "Requests are in flight but no engine step finished: the server hangs, or one step "
            "outlasts the window.",
            "Look at the server's log, or profile for longer.",
            "engine_steps: at least one",
        )
    if signs.client.holds:
        return abstain(
            "The load client itself is at its limit, so the figures are the client's.",
            "Run the client on another machine, or replay at a lower rate.",
            "client_cpu_share: a client with spare CPU",
        )
    return None


def _idle(window: Window, signs: Signs) -> Finding | None:
    if (window.steps and not signs.idle.holds) or signs.holds_up:
        return None
    busy = 0.0 if not window.steps else signs.idle.value or 0.0
    more = "replay at a higher rate" if window.is_load_ours else "profile under peak traffic"
    return Finding(
        Bottleneck.IDLE,
        "high",
        f"The server is busy {busy:.0%} of the time, so nothing holds this load back: "
        "no lever will raise its throughput.",
        f"To find the limit, {more}.",
    )


def _within_bursts(finding: Finding, signs: Signs) -> Finding:
    """Say that a finding is of the busy part of a window that is mostly idle."""
    idle = f"The server idles between bursts: it is busy {signs.idle.value or 0.0:.0%} of the time"
    return replace(finding, summary=f"{idle}, which is what is judged. {finding.summary}")


def _is_enough(window: Window) -> bool:
    completed, steps = window.completed or 0.0, window.steps or 0.0
    return completed >= COMPLETED_LEAST or steps >= STEPS_LEAST


def _too_little(window: Window, signs: Signs) -> Finding | None:
    if _is_enough(window) or signs.preempted.holds:
        return None  # A preemption is a fact, not a share of something.
    completed, steps = window.completed or 0.0, window.steps or 0.0
    return abstain(
        f"{completed:.0f} finished requests and {steps:.0f} engine steps are too few to judge.",
        f"Profile until {COMPLETED_LEAST} requests or {STEPS_LEAST} steps are done.",
        f"completed_requests: at least {COMPLETED_LEAST}",
    )


# --- who waits for what -----------------------------------------------------------------------


def _losing_blocks(window: Window, signs: Signs) -> Finding | None:
    if not signs.preempted.holds:
        return None
    sure: Confidence = "high" if _is_enough(window) else "medium"
    return kv_capacity(sure, f"{signs.preempted.value:.2f} preemptions a request")


def _thrashing(signs: Signs) -> Finding | None:
    """Whether the prefix cache forgets what comes again.

    Where the workload's reuse is known, hits are held against it. Where it is not, thrash shows in
    hits that fall, or in blocks that are evicted as soon as others are used again. In both cases
    blocks must have been written over: a cache that still holds everything misses for another
    reason. Requests that find no room for themselves lack blocks first of all.
    """
    if signs.waits and (signs.full.holds or signs.no_room.holds) and not signs.at_limit.holds:
        return None
    is_written_over = signs.turned_over.holds or signs.evicted.holds
    if signs.missed.value is not None:
        if not (signs.missed.holds and signs.avoidable.holds):
            return None
        why = f"{signs.missed.value:.0%} of the prompt tokens came before and were computed again"
        if is_written_over:
            return prefix_thrash("high" if signs.turned_over.holds else "medium", why)
        is_all_kept = signs.turned_over.fails or signs.evicted.fails
        return None if is_all_kept else prefix_thrash("low", why)
    if not (is_written_over and signs.prefill_work.holds):
        return None
    whys = []
    if signs.hits_fell.holds:
        whys.append(f"the share of hits fell by {signs.hits_fell.value:.0%} of the lookups")
    if signs.evicted_early.holds:
        whys.append("blocks are evicted about as soon as others are used again")
    if not whys:
        return None
    return prefix_thrash("medium" if len(whys) > 1 else "low", " and ".join(whys))


def _waiting(window: Window, signs: Signs) -> Finding | None:
    """What requests wait for.

    vLLM's waiting reason "capacity" is anything but a deferral: KV blocks, a sequence slot or the
    step's token budget. They are told apart here by the room in the cache and the slots in use.
    """
    if not signs.waits:
        return None
    if signs.at_limit.holds and not signs.full.holds:
        return batch_width(window.sequence_limit, signs.full.value)
    if signs.full.holds or signs.no_room.holds:
        sure: Confidence = "high" if signs.at_limit.fails else "medium"
        return kv_capacity(sure, "requests wait and the free blocks don't hold their prompts")
    if signs.prefill.holds:
        return None  # they wait for the step's token budget
    if window.sequence_limit is None:
        return abstain(
            "Requests wait, but whether for KV blocks or for a sequence slot cannot be told: "
            "max_num_seqs is not known.",
            f"To learn max_num_seqs, {TELL_SLOTS}.",
            "max_num_seqs: /metrics does not export it",
        )
    if signs.at_limit.fails and signs.no_room.value is None:
        return kv_capacity(
            "low",
            "requests wait although sequence slots are free; without the KV cache size, waiting "
            "for the token budget of a step looks the same",
        )
    return None
