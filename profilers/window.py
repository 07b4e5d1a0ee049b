"""What a verdict judges: a stretch of time on a server, and the readings derived from it.

The readings hide vLLM's metric names and their traps from the judgement. A reading that the window
does not hold is `None`, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from kvtune.profilers.kv_reads import read_share
from kvtune.profilers.scrape import ENGINES, FULLEST
from kvtune.types import EffectiveConfig, GpuUse, StepTimeModel

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_CAPACITY = 'vllm:num_requests_waiting_by_reason{reason="capacity"}'
KV_USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
STEPS = "vllm:iteration_tokens_total_count"
STEP_TOKENS = "vllm:iteration_tokens_total_sum"
GENERATED = "vllm:generation_tokens_total"
PROMPTS = "vllm:prompt_tokens_total"
CACHED = "vllm:prompt_tokens_cached_total"
"""Of the prompt tokens, those that were not computed; counted once a request."""

QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
PREFILL_S = "vllm:request_prefill_time_seconds_sum"
DECODE_S = "vllm:request_decode_time_seconds_sum"
QUEUE_S = "vllm:request_queue_time_seconds_sum"
INFERENCE_S = "vllm:request_inference_time_seconds_sum"
FLOPS = "vllm:estimated_flops_per_gpu_total"
READ_BYTES = "vllm:estimated_read_bytes_per_gpu_total"
WRITE_BYTES = "vllm:estimated_write_bytes_per_gpu_total"
EVICTIONS = "vllm:kv_block_idle_before_evict_seconds_count"

RIDGE_DEFAULT_TOKENS = 300.0
"""Ridge point of an H100 at bf16 in flop/byte, the highest in common use: A100 has 156, H200 206,
an AMX server about 200. A high ridge calls less work compute-bound."""


LOOKUPS_MOST_PER_PROMPT = 1.05
"""More lookups than prompt tokens were repeated; 5% is what the edges of a window can do."""


BUSY_LEAST_SAMPLES = 3
"""Samples with a running request that can tell a burst from an arrival caught in passing."""


class Moment(NamedTuple):
    """One scrape while requests waited: how many ran, and which share of the KV blocks was held."""

    running: float
    usage: float


@dataclass(frozen=True, slots=True)
class Window:
    """Counters and gauges of a server over `window_s`, and what else is known about it.

    `counters` are deltas, `gauges` samples as (seconds, value); both are keyed by series as the
    scraper names them, over all engines of the server. `load` holds the figures of our own client
    (`measure`), if it made the load. Peaks, weights and KV bytes are per device; peaks are
    measured, `None` where they were not. `effective` speaks of one engine.
    `reusable_prefix_share` is that of the workload's fingerprint, empty where it is not known.
    `gpus` are those that the server runs on, empty where they were not watched.
    """

    window_s: float
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    effective: EffectiveConfig | None = None
    load: Mapping[str, float] | None = None
    is_load_ours: bool = False
    peak_flops_per_s: float | None = None
    peak_bytes_per_s: float | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: float | None = None
    step_time: StepTimeModel | None = None
    reusable_prefix_share: Mapping[int, float] = field(default_factory=dict)
    gpus: tuple[GpuUse, ...] = ()

    # --- how much was seen ---

    @property
    def has_engine_series(self) -> bool:
        """Whether the server exports engine statistics at all."""
        return any(key.startswith("vllm:") for key in (*self.counters, *self.gauges))

    @property
    def engines(self) -> int:
        """How many engines the server runs; counters are of all of them together."""
        return round(max(self._gauge(ENGINES), default=1.0))

    @property
    def steps(self) -> float | None:
        """Engine steps that produced output."""
        return self.counters.get(STEPS)

    @property
    def completed(self) -> float | None:
        """Requests that finished, for whatever reason."""
        finished = [
            value
            for key, value in self.counters.items()
            if key.startswith("vllm:request_success_total")
        ]
        return sum(finished) if finished else None

    @property
    def in_flight(self) -> bool:
        """Whether any sample saw a request running or waiting."""
        return any(value > 0 for key in (RUNNING, WAITING) for value in self._gauge(key))

    @property
    def busy_share(self) -> float | None:
        """Share of the window with a request running.

        The gauge is set after a step, so requests that finish within one step leave it at 0. Where
        it misses most of the running time that finished requests report, that time bounds the
        share from above.
        """
        running, inference_s = self._gauge(RUNNING), self.counters.get(INFERENCE_S)
        if running and fmean(running) * self.window_s >= 0.5 * (inference_s or 0.0):
            return fmean(value > 0 for value in running)
        if inference_s is None or self.window_s <= 0:
            return None
        return min(1.0, inference_s / self.window_s)

    @property
    def client_cpu_share(self) -> float | None:
        """Share of one core that our load client used."""
        load = self.load or {}
        cost_s = load.get("client_cpu_s_per_request")
        rate = load.get("requests_per_s")
        return None if cost_s is None or rate is None else cost_s * rate

    # --- who waits for what ---

    @property
    def preemptions_per_request(self) -> float | None:
        """Preemptions a finished request; all of them if none finished."""
        preemptions = self.counters.get(PREEMPTIONS)
        return None if preemptions is None else preemptions / max(1.0, self.completed or 0.0)

    @property
    def queue_share(self) -> float | None:
        """Share of the finished requests' time in the server that they waited to be scheduled."""
        return self._share(QUEUE_S, INFERENCE_S)

    @property
    def waiting_share(self) -> float | None:
        """Share of samples in which a request waited for capacity of any kind."""
        samples = self._gauge(self._waiting_key)
        return fmean(value > 0 for value in samples) if samples else None

    @property
    def waiting_share_while_busy(self) -> float | None:
        """Of the samples in which requests ran, the share in which others waited for capacity.

        Unknown of too few samples: one may catch an arrival that waits for the step under way.
        """
        waiting = dict(self.gauges.get(self._waiting_key, ()))
        waited = [
            waiting[at_s] > 0
            for at_s, running in self.gauges.get(RUNNING, ())
            if running > 0 and at_s in waiting
        ]
        return fmean(waited) if len(waited) >= BUSY_LEAST_SAMPLES else None

    @property
    def queue_steps(self) -> float | None:
        """How many mean steps a mean finished request waited to be scheduled."""
        queue_s, step_s = self.counters.get(QUEUE_S), self.mean_step_s
        if queue_s is None or not self.completed or not step_s:
            return None
        return queue_s / self.completed / step_s

    @property
    def peak_usage(self) -> float | None:
        """Largest share of KV blocks held by live requests; reusable cached blocks don't count."""
        if not any(self._gauge(RUNNING)):
            return None  # requests that finish within one step leave the gauges at 0
        return max(self._gauge(self._usage_key), default=None)

    @property
    def sequence_limit(self) -> int | None:
        """How many sequences may run at once, in all engines together."""
        if self.effective is None:
            return None
        limits = (self.effective.max_num_seqs, self.effective.max_num_active_seqs)
        known = [limit for limit in limits if limit is not None]
        return min(known) * self.engines if known else None

    @property
    def at_limit_share(self) -> float | None:
        """Of the samples in which requests waited, the share with all sequence slots in use."""
        moments = self._waiting_moments()
        if self.sequence_limit is None or not moments:
            return None
        return fmean(moment.running >= self.sequence_limit for moment in moments)

    @property
    def room_prompts(self) -> float | None:
        """How many mean prompts fitted into the free KV blocks while requests waited.

        In the fullest engine: a request waits for its own, whatever room the others have.
        """
        size = self.effective.kv_cache_size_tokens if self.effective is not None else None
        moments = self._waiting_moments()
        prompt_tokens = self.prompt_tokens_per_request
        if size is None or not moments or not prompt_tokens:
            return None
        return fmean((1 - moment.usage) * size for moment in moments) / prompt_tokens

    # --- where a step's time goes ---

    @property
    def busy_s(self) -> float | None:
        """Seconds in which engines had something to do, of all of them together."""
        share = self.busy_share
        return None if share is None else share * self.window_s * self.engines

    @property
    def mean_step_s(self) -> float | None:
        """How long a mean step took: nothing else runs while a request does."""
        return self.busy_s / self.steps if self.busy_s and self.steps else None

    @property
    def sequences_per_step(self) -> float | None:
        """Sequences that got a token in a mean step."""
        generated = self.counters.get(GENERATED)
        return generated / self.steps if self.steps and generated is not None else None

    @property
    def prefill_tokens_per_step(self) -> float | None:
        """Prompt tokens computed in a mean step, without what a preemption recomputes."""
        tokens = self.computed_prompt_tokens
        return tokens / self.steps if self.steps and tokens is not None else None

    @property
    def computed_prompt_tokens(self) -> float | None:
        """Prompt tokens that were computed, without what a preemption recomputes.

        The tokens of steps held those from the prefix cache too until vLLM pull request 43346, of
        May 2026. Where only repeated lookups tell of these, nobody knows how many they were.
        """
        tokens, generated = self.counters.get(STEP_TOKENS), self.counters.get(GENERATED)
        if tokens is None or generated is None:
            return None
        counted = max(0.0, tokens - generated)
        prompts, hits = self.counters.get(PROMPTS), self.prefix_hits
        if prompts is None or not (self.counters.get(CACHED) or self.counters.get(HITS)):
            return counted
        return None if hits is None else min(counted, prompts * (1 - hits))

    @property
    def prefix_hits(self) -> float | None:
        """Share of the prompt tokens that came from the prefix cache.

        Unknown where lookups were repeated and only they tell of hits.
        """
        prompts, cached = self.counters.get(PROMPTS), self.counters.get(CACHED)
        if prompts and cached is not None:
            return min(1.0, cached / prompts)
        lookups = self.lookups_per_prompt
        if lookups is None or lookups > LOOKUPS_MOST_PER_PROMPT:
            return None
        queries, hits = self.counters.get(QUERIES), self.counters.get(HITS)
        return min(1.0, hits / queries) if queries and hits is not None else None

    @property
    def lookups_per_prompt(self) -> float | None:
        """Tokens that were looked up in the prefix cache a prompt token."""
        queries, prompts = self.counters.get(QUERIES), self.counters.get(PROMPTS)
        return queries / prompts if queries is not None and prompts else None

    @property
    def ridge_tokens(self) -> float:
        """Tokens a step at which arithmetic takes as long as reading the weights once.

        One multiply-add per 2-byte weight and token: the device's flop/byte at its ridge.
        """
        return self.measured_ridge_tokens or RIDGE_DEFAULT_TOKENS

    @property
    def measured_ridge_tokens(self) -> float | None:
        """The ridge of this device, if its peaks were measured."""
        if self.peak_flops_per_s is None or not self.peak_bytes_per_s:
            return None
        return self.peak_flops_per_s / self.peak_bytes_per_s

    @property
    def prefill_share(self) -> float | None:
        """Share of the requests' running time before their first token."""
        return self._share(PREFILL_S, DECODE_S)

    @property
    def flops_share(self) -> float | None:
        """Arithmetic done while busy, as a share of the device's peak."""
        flops = self.estimate(FLOPS)
        if flops is None or self.peak_flops_per_s is None or not self.busy_s:
            return None
        return flops / self.busy_s / self.peak_flops_per_s

    @property
    def kv_tokens_per_step(self) -> float | None:
        """Tokens that decoding attends to in a mean step: sequences x mean context.

        From token counts, because usage gauges count a shared prefix once though every sequence
        reads it.
        """
        prompt_tokens = self.prompt_tokens_per_request
        answer_tokens = self._per_request("vllm:request_generation_tokens")
        sequences = self.sequences_per_step
        if sequences is None or prompt_tokens is None or answer_tokens is None:
            return None
        return sequences * (prompt_tokens + answer_tokens / 2)

    @property
    def kv_bytes_per_step(self) -> float | None:
        """KV bytes that decoding reads in a mean step, without what kvtune's plugin skips."""
        tokens = self.kv_tokens_per_step
        if tokens is None or self.kv_bytes_per_token is None:
            return None
        return tokens * self.kv_bytes_per_token * self.kv_read_share

    @property
    def kv_read_share(self) -> float:
        """Of the KV that decoding attends to, the share that is read: 1 without kvtune's plugin."""
        return read_share(self.counters)

    @property
    def prompt_tokens_per_request(self) -> float | None:
        """Tokens in a mean prompt of the requests that finished."""
        return self._per_request("vllm:request_prompt_tokens")

    def estimate(self, key: str) -> float | None:
        """An analytic estimate of the engine; 0 means that it is off, not that nothing ran."""
        return self.counters.get(key) or None

    # --- helpers ---

    @property
    def _waiting_key(self) -> str:
        return WAITING_CAPACITY if WAITING_CAPACITY in self.gauges else WAITING

    @property
    def _usage_key(self) -> str:
        return KV_USAGE + FULLEST if KV_USAGE + FULLEST in self.gauges else KV_USAGE

    def _gauge(self, key: str) -> list[float]:
        return [value for _, value in self.gauges.get(key, ())]

    def _waiting_moments(self) -> list[Moment]:
        """The samples in which requests waited while others ran."""
        running, usage = (
            dict(self.gauges.get(RUNNING, ())),
            dict(self.gauges.get(self._usage_key, ())),
        )
        return [
            Moment(running[at_s], usage[at_s])
            for at_s, waiting in self.gauges.get(self._waiting_key, ())
            if waiting > 0 and running.get(at_s, 0.0) > 0 and at_s in usage
        ]

    def _share(self, part: str, rest: str) -> float | None:
        part_s, rest_s = self.counters.get(part), self.counters.get(rest)
        if part_s is None or rest_s is None or part_s + rest_s <= 0:
            return None
        return part_s / (part_s + rest_s)

    def _per_request(self, histogram: str) -> float | None:
        total, count = (
            self.counters.get(f"{histogram}_sum"),
            self.counters.get(f"{histogram}_count"),
        )
        return total / count if total is not None and count else None
