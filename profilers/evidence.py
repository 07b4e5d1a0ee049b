"""The signs that a verdict weighs: each a reading of the window against a named threshold.

All signs are always taken, so a verdict can show those that did not hold and those that could not
be read.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvtune.profilers.gpu_signs import gpu_signs
from kvtune.profilers.prefix_signs import prefix_signs
from kvtune.profilers.sign import TELL_CONFIGURATION, TELL_SLOTS, Sign, make_sign
from kvtune.profilers.step_signs import step_signs
from kvtune.profilers.window import (
    EVICTIONS,
    INFERENCE_S,
    KV_USAGE,
    PREEMPTIONS,
    QUEUE_S,
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

QUEUE_LEAST_STEPS = 2.0
"""An arrival waits for the step under way, whatever the load: half a step where steps are alike.
More is a wait for others. Requests of one step each, at random on a server that is busy 30% of the
time, wait 0.4 steps (M/M/1)."""

USAGE_LEAST_SHARE = 0.9
"""Above this the pool is full for practical purposes: the scheduler keeps a reserve."""

ROOM_LEAST_PROMPTS = 2.0
"""Prompts differ in length and a whole prompt has to fit, so room for two mean ones is no lack."""

AT_LIMIT_LEAST_SHARE = 0.5
"""All sequence slots taken in most of the moments in which requests wait."""


@dataclass(frozen=True, slots=True)
class Signs:
    """All signs of a window, in the order in which they are weighed.

    Those of GPUs are `None` where no GPU was watched, and that of skipped KV where kvtune's plugin
    is not on.
    """

    idle: Sign
    client: Sign
    preempted: Sign
    queued: Sign
    waiting: Sign
    queue_steps: Sign
    waiting_while_busy: Sign
    full: Sign
    no_room: Sign
    at_limit: Sign
    evicted: Sign
    looked_up_again: Sign
    beyond_reuse: Sign
    below_blocks: Sign
    missed: Sign
    avoidable: Sign
    prefill_work: Sign
    turned_over: Sign
    hits_fell: Sign
    evicted_early: Sign
    flops: Sign
    traffic: Sign
    prefill: Sign
    arithmetic: Sign
    weight_reads: Sign
    kv_reads: Sign
    slow_arithmetic: Sign
    weight_traffic: Sign
    explained: Sign
    fit_error: Sign
    misfit: Sign
    fitted_kv: Sign
    fitted_weights: Sign
    fitted_overhead: Sign
    fitted_compute: Sign
    fitted_fixed: Sign
    fitted_kv_rate: Sign
    gpu_memory: Sign | None = None
    gpu_tensor: Sign | None = None
    gpu_sm: Sign | None = None
    gpu_slowed: Sign | None = None
    skipping: Sign | None = None

    @property
    def waits(self) -> bool:
        """Whether requests wait to be scheduled: for long, most of the time, or in bursts."""
        in_bursts = self.idle.holds and self.waiting_while_busy.holds
        return self.queued.holds or self.waiting.holds or in_bursts

    @property
    def holds_up(self) -> bool:
        """Whether the server kept requests waiting for more than the step under way."""
        queues = self.queued.holds and self.queue_steps.holds
        return self.preempted.holds or queues or self.waiting_while_busy.holds

    @property
    def computing(self) -> Sign:
        """How much arithmetic there is: as the GPU measures it, else as the engine estimates it."""
        return _first_known(self.gpu_tensor, self.flops)

    @property
    def reading(self) -> Sign:
        """How much memory traffic there is, from the same."""
        return _first_known(self.gpu_memory, self.traffic)

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
        signs = (getattr(self, item.name) for item in fields(self))
        return [sign for sign in signs if sign is not None]


def _first_known(measured: Sign | None, estimated: Sign) -> Sign:
    return estimated if measured is None or measured.value is None else measured


def take_signs(window: Window) -> Signs:
    """Read every sign from the window."""
    return Signs(
        idle=make_sign(
            "busy_share",
            window.busy_share,
            BUSY_LEAST_SHARE,
            f"{RUNNING}, {INFERENCE_S}",
            "the server has nothing to do most of the time",
            "scrape the server during the run",
            below=True,
        ),
        client=make_sign(
            "client_cpu_share",
            window.client_cpu_share if window.is_load_ours else None,
            CLIENT_CPU_MOST_SHARE,
            "load client",
            "the load client is as slow as the server",
            "measure the client's CPU time" if window.is_load_ours else "",
        ),
        preempted=make_sign(
            "preemptions_per_request",
            window.preemptions_per_request,
            PREEMPTIONS_LEAST_PER_REQUEST,
            PREEMPTIONS,
            "running requests lose their KV blocks; the recomputed tokens show in no token counter",
            "use a vLLM that exports vllm:num_preemptions_total",
            unit="1/request",
        ),
        **_queue_signs(window),
        **prefix_signs(window),
        **step_signs(window),
        **gpu_signs(window),
    )


def _queue_signs(window: Window) -> dict[str, Sign]:
    nobody_waits = window.waiting_share == 0
    return {
        "queued": make_sign(
            "queue_time_share",
            window.queue_share,
            QUEUE_LEAST_SHARE,
            f"{QUEUE_S}, {INFERENCE_S}",
            "finished requests spent a good part of their time waiting to be scheduled",
            "measure until requests finish",
        ),
        "waiting": make_sign(
            "waiting_sample_share",
            window.waiting_share,
            WAITING_LEAST_SHARE,
            WAITING,
            "requests wait to be scheduled most of the time",
            "scrape the server during the run",
        ),
        "queue_steps": make_sign(
            "queue_time_in_steps",
            window.queue_steps,
            QUEUE_LEAST_STEPS,
            f"{QUEUE_S}, mean step",
            "requests waited for more than the step under way",
            "",
            unit="steps",
        ),
        "waiting_while_busy": make_sign(
            "waiting_sample_share_while_busy",
            window.waiting_share_while_busy,
            WAITING_LEAST_SHARE,
            f"{WAITING}, {RUNNING}",
            "requests wait most of the time in which others run",
            "",
        ),
        "full": make_sign(
            "peak_kv_usage",
            window.peak_usage,
            USAGE_LEAST_SHARE,
            KV_USAGE,
            "live requests hold (nearly) all KV blocks; reusable cached blocks are not counted",
            "gauges read 0 when requests finish within one step; ask for more output tokens",
        ),
        "no_room": make_sign(
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
        "at_limit": make_sign(
            "all_sequences_running_share",
            window.at_limit_share,
            AT_LIMIT_LEAST_SHARE,
            f"{RUNNING}, effective max_num_seqs",
            "requests wait while every sequence slot is in use",
            ""
            if nobody_waits
            else "needs max_num_seqs, which /metrics does not export: " + TELL_SLOTS,
        ),
        "evicted": make_sign(
            "evicted_cached_blocks",
            window.counters.get(EVICTIONS),
            1,
            EVICTIONS,
            "cached prefix blocks were evicted, which KV usage does not show",
            "restart with --kv-cache-metrics --kv-cache-metrics-sample 1.0",
            unit="blocks",
        ),
    }
