"""The signs that a verdict weighs: each a reading of the window against a named threshold.

All signs are always taken, so a verdict can show those that did not hold and those that could not
be read.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvtune.profilers.window import (
    EVICTIONS,
    FLOPS,
    INFERENCE_S,
    KV_USAGE,
    PREEMPTIONS,
    PREFILL_S,
    QUEUE_S,
    READ_BYTES,
    RUNNING,
    WAITING,
    Window,
)
from kvtune.types import Evidence

BUSY_LEAST_SHARE = 0.3
"""A server busy less than this has more than twice the room it uses: nothing holds it back."""

CLIENT_CPU_MOST_SHARE = 0.9
"""A load client is one thread; near a whole core it delays the requests that it measures."""

PREEMPTIONS_LEAST_PER_REQUEST = 0.01
"""One request in a hundred redone is what a p99 sees; fewer are accidents, not a limit."""

QUEUE_LEAST_SHARE = 0.05
"""Waiting that takes less than this can't win more than about 5% of latency if it is removed."""

WAITING_LEAST_SHARE = 0.5
"""Arrivals wait for the current step to end, so some waiting is normal; most of the time is not."""

USAGE_LEAST_SHARE = 0.9
"""Above this the pool is full for practical purposes: the scheduler keeps a reserve."""

ROOM_LEAST_PROMPTS = 2.0
"""Prompts differ in length and a whole prompt has to fit, so room for two mean ones is no lack."""

AT_LIMIT_LEAST_SHARE = 0.5
"""All sequence slots taken in most of the moments in which requests wait."""

PEAK_LEAST_SHARE = 0.35
"""Kernels under a serving load reach about half of a micro-benchmark's peak, so a third of it
means that the resource is busy most of the time."""

PEAK_MOST_SHARE = 1.2
"""More than a peak is no measurement: the peak was taken at a bad moment or the data sat in a CPU
cache."""

STEP_LEAST_SHARE = 0.5
"""The majority of a step's time."""

PREFILL_LEAST_SHARE = 0.7
"""Requests that spend this much of their time before the first token are prefill work."""

TELL_CONFIGURATION = (
    "profile with --model, so that kvtune starts the server, or start it with "
    "VLLM_SERVER_DEV_MODE=1, so that /server_info tells"
)
"""How a user makes a server say what it runs with."""

NAME_CHECKPOINT = "name the checkpoint's directory with --model, together with --url if it runs"
"""How a user makes the bytes of a model known."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One evidence row, and what to do when its value is missing; empty if it doesn't matter."""

    evidence: Evidence
    fix: str

    @property
    def holds(self) -> bool:
        """Whether it is known and crosses its threshold."""
        return self.evidence.holds is True

    @property
    def fails(self) -> bool:
        """Whether it is known and does not cross its threshold."""
        return self.evidence.holds is False

    @property
    def value(self) -> float | None:
        """The reading, if it can be believed."""
        return None if self.evidence.holds is None else self.evidence.value


@dataclass(frozen=True, slots=True)
class Signs:
    """All signs of a window, in the order in which they are weighed."""

    idle: Sign
    client: Sign
    preempted: Sign
    queued: Sign
    waiting: Sign
    full: Sign
    no_room: Sign
    at_limit: Sign
    evicted: Sign
    flops: Sign
    traffic: Sign
    prefill: Sign
    arithmetic: Sign
    weight_reads: Sign
    kv_reads: Sign

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Every row, whether or not it holds or is known."""
        return tuple(sign.evidence for sign in self._all())

    @property
    def missing(self) -> tuple[str, ...]:
        """What could not be read, and what to do about it."""
        return tuple(
            f"{sign.evidence.metric}: {sign.fix}"
            for sign in self._all()
            if sign.evidence.holds is None and sign.fix
        )

    def _all(self) -> list[Sign]:
        return [getattr(self, item.name) for item in fields(self)]


def take_signs(window: Window) -> Signs:
    """Read every sign from the window."""
    return Signs(
        idle=_sign(
            "busy_share",
            window.busy_share,
            BUSY_LEAST_SHARE,
            f"{RUNNING}, {INFERENCE_S}",
            "the server has nothing to do most of the time",
            "scrape the server during the run",
            below=True,
        ),
        client=_sign(
            "client_cpu_share",
            window.client_cpu_share if window.is_load_ours else None,
            CLIENT_CPU_MOST_SHARE,
            "load client",
            "the load client is as slow as the server",
            "measure the client's CPU time" if window.is_load_ours else "",
        ),
        preempted=_sign(
            "preemptions_per_request",
            window.preemptions_per_request,
            PREEMPTIONS_LEAST_PER_REQUEST,
            PREEMPTIONS,
            "running requests lose their KV blocks; the recomputed tokens show in no token counter",
            "use a vLLM that exports vllm:num_preemptions_total",
            unit="1/request",
        ),
        **_queue_signs(window),
        **_device_signs(window),
    )


def _queue_signs(window: Window) -> dict[str, Sign]:
    nobody_waits = window.waiting_share == 0
    return {
        "queued": _sign(
            "queue_time_share",
            window.queue_share,
            QUEUE_LEAST_SHARE,
            f"{QUEUE_S}, {INFERENCE_S}",
            "finished requests spent a good part of their time waiting to be scheduled",
            "measure until requests finish",
        ),
        "waiting": _sign(
            "waiting_sample_share",
            window.waiting_share,
            WAITING_LEAST_SHARE,
            WAITING,
            "requests wait to be scheduled most of the time",
            "scrape the server during the run",
        ),
        "full": _sign(
            "peak_kv_usage",
            window.peak_usage,
            USAGE_LEAST_SHARE,
            KV_USAGE,
            "live requests hold (nearly) all KV blocks; reusable cached blocks are not counted",
            "gauges read 0 when requests finish within one step; ask for more output tokens",
        ),
        "no_room": _sign(
            "free_kv_mean_prompts_while_waiting",
            window.room_prompts,
            ROOM_LEAST_PROMPTS,
            f"{KV_USAGE}, effective kv_cache_size_tokens",
            "the free KV blocks don't hold the prompts that wait",
            ""
            if nobody_waits
            else "needs finished requests and kv_cache_size_tokens: " + TELL_CONFIGURATION,
            unit="prompts",
            below=True,
        ),
        "at_limit": _sign(
            "all_sequences_running_share",
            window.at_limit_share,
            AT_LIMIT_LEAST_SHARE,
            f"{RUNNING}, effective max_num_seqs",
            "requests wait while every sequence slot is in use",
            ""
            if nobody_waits
            else "needs max_num_seqs, which /metrics does not export: " + TELL_CONFIGURATION,
        ),
        "evicted": _sign(
            "evicted_cached_blocks",
            window.counters.get(EVICTIONS),
            1,
            EVICTIONS,
            "reusable prefix blocks were evicted, which KV usage does not show",
            "restart with --kv-cache-metrics --kv-cache-metrics-sample 1.0",
            unit="blocks",
        ),
    }


def _device_signs(window: Window) -> dict[str, Sign]:
    arithmetic, weight_reads, kv_reads = window.step_model or (None, None, None)
    return {
        "flops": _of_peak(
            "flops_of_peak",
            window.flops_share,
            window.peak_flops_per_s,
            FLOPS,
            "arithmetic keeps the device busy",
        ),
        "traffic": _of_peak(
            "memory_traffic_of_peak",
            window.traffic_share,
            window.peak_bytes_per_s,
            READ_BYTES,
            "memory traffic keeps the device busy",
        ),
        "prefill": _sign(
            "prefill_time_share",
            window.prefill_share,
            PREFILL_LEAST_SHARE,
            PREFILL_S,
            "requests spend their time in prefill",
            "measure until requests finish",
        ),
        "arithmetic": _modelled(
            "arithmetic", arithmetic, "prefill arithmetic takes most of a step"
        ),
        "weight_reads": _modelled(
            "weight_reads", weight_reads, "reading the weights takes most of a step"
        ),
        "kv_reads": _modelled("kv_reads", kv_reads, "reading KV takes most of a step"),
    }


def _of_peak(metric: str, value: float | None, peak: float | None, series: str, says: str) -> Sign:
    source = f"{series}, the device's peak"
    if value is not None and value > PEAK_MOST_SHARE:
        evidence = Evidence(
            metric=metric,
            value=value,
            threshold=PEAK_LEAST_SHARE,
            unit="share",
            source=source,
            holds=None,
            says="more than the device's peak, so the peak is wrong",
        )
        return Sign(evidence, "the device's peak does not fit the run, so this row says nothing")
    # Nobody can supply a peak by hand, so its absence asks for nothing.
    fix = "" if peak is None else "restart the server with --enable-mfu-metrics (0 means off)"
    return _sign(metric, value, PEAK_LEAST_SHARE, source, says, fix)


def _modelled(what: str, value: float | None, says: str) -> Sign:
    fix = f"needs finished requests, and the bytes of weights and KV: {NAME_CHECKPOINT}"
    source = "model of a step from token counters and bytes"
    return _sign(f"modelled_{what}_share", value, STEP_LEAST_SHARE, source, says, fix)


def _sign(
    metric: str,
    value: float | None,
    threshold: float,
    source: str,
    says: str,
    fix: str,
    *,
    unit: str = "share",
    below: bool = False,
) -> Sign:
    """A sign that claims `says` at or above its threshold, or below it."""
    holds = None if value is None else (value < threshold if below else value >= threshold)
    if holds is None:
        says = f"unknown whether {says}"
    elif not holds:
        says = f"no sign that {says}"
    return Sign(
        Evidence(
            metric=metric,
            value=value,
            threshold=threshold,
            unit=unit,
            source=source,
            holds=holds,
            says=says,
        ),
        fix,
    )
