"""The vocabulary: the values that flow from workload to serving config.

Frozen. A value that crosses a process (store, file, `--json`) is a pydantic model that refuses
unknown fields; a value that stays inside is a slots dataclass. Units are in the names, `None` is
unknown (never 0), and a failure is a status with a class, never a number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

SCHEMA_VERSION: Literal[1] = 1


def fingerprint_of(value: Any) -> str:
    """First 16 hex digits of SHA-256 over the canonical JSON of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Stored(BaseModel):
    """Base of every value that is written down: frozen, and strict about its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = SCHEMA_VERSION


# --- vocabulary -------------------------------------------------------------------------------


class Harm(StrEnum):
    """How much a policy may change answers, in the order in which kvtune tries them."""

    LOSSLESS = "lossless"
    NEAR_LOSSLESS = "near-lossless"
    LOSSY = "lossy"


class Bottleneck(StrEnum):
    """What holds a workload back."""

    KV_CAPACITY = "kv-capacity"
    KV_BANDWIDTH = "kv-bandwidth"
    WEIGHT_BANDWIDTH = "weight-bandwidth"
    COMPUTE = "compute"
    BATCH_WIDTH = "batch-width"
    PREFIX_THRASH = "prefix-thrash"
    OVERHEAD = "overhead"
    IDLE = "idle"
    ABSTAIN = "abstain"


class Status(StrEnum):
    """How a trial ended."""

    OK = "ok"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    STOPPED = "stopped"


class FailureClass(StrEnum):
    """Why a server or a trial failed."""

    BAD_ARGUMENT = "bad-argument"
    DOES_NOT_FIT = "does-not-fit"
    OUT_OF_MEMORY = "out-of-memory"
    HANG_AT_START = "hang-at-start"
    CRASH_AT_START = "crash-at-start"
    CRASH_UNDER_LOAD = "crash-under-load"
    HANG_UNDER_LOAD = "hang-under-load"
    PORT_TAKEN = "port-taken"
    WRONG_MODEL = "wrong-model"
    BROKEN_OUTPUT = "broken-output"
    REQUEST_ERRORS = "request-errors"
    ENGINE_MISSING = "engine-missing"
    UNKNOWN = "unknown"


# --- workload ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a workload names it.

    Exactly one of `prompt` (text), `messages` (chat), `token_ids` or `input_tokens` (a length, to
    be materialized) says what is sent. `prefix_blocks` are hash ids of consecutive blocks of
    `prefix_block_tokens` tokens from the start of the prompt: equal ids mean equal tokens.
    """

    arrival_s: float | None = None
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prefix_blocks: tuple[int, ...] = ()
    prefix_block_tokens: int = 0
    conversation: str | None = None


class Histogram(Stored):
    """Counts in bins; bin i holds values in [edges[i], edges[i + 1]), the last one is closed."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None


class WorkloadFingerprint(Stored):
    """What a workload looks like, without its text.

    `reusable_prefix_share` maps a block size in tokens to the share of prompt tokens that an
    unbounded prefix cache of that block size would serve. `burstiness` is the coefficient of
    variation of inter-arrival times (1 for a Poisson process). `digest` identifies the requests.
    """

    requests: int
    input_tokens: Histogram | None
    output_tokens: Histogram | None
    duration_s: float | None
    request_rate_per_s: float | None
    burstiness: float | None
    reusable_prefix_share: dict[int, float] = Field(default_factory=dict)
    sampled: bool = False
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to replay, split into those used for tuning and those held out for confirmation."""

    name: str
    source: str
    requests: tuple[Request, ...]
    heldout: tuple[Request, ...]
    fingerprint: WorkloadFingerprint


# --- goal -------------------------------------------------------------------------------------


class Slo(Stored):
    """One limit: `statistic` ("p50", "p95", "p99", "mean", "max") of `metric` at most `limit_s`."""

    metric: Literal["ttft", "itl", "tpot", "e2e"]
    statistic: str
    limit_s: float


class Goal(Stored):
    """What the user wants: an objective to maximise, and limits that must hold."""

    objective: Literal["goodput", "throughput"] = "goodput"
    slos: tuple[Slo, ...] = ()

    @property
    def objective_metric(self) -> str:
        """The flat name of the metric that is maximised."""
        return "goodput_requests_per_s" if self.objective == "goodput" else "output_tokens_per_s"


# --- engines ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running OpenAI-compatible server. `pid` is set only when kvtune started it.

    `url` is the root of its API, without `/v1`. Metrics are at `metrics_url`, else at `/metrics`
    below the root. The authorizations are headers; without one the key in the environment is sent.
    `ca_cert` is a file of certificates that are trusted beside those of this machine.
    """

    url: str
    model: str
    pid: int | None = None
    is_vllm: bool = True
    metrics_url: str | None = None
    authorization: str | None = field(default=None, repr=False)
    metrics_authorization: str | None = field(default=None, repr=False)
    ca_cert: str | None = None


class Device(Stored):
    """The device a model runs on. `memory_bytes` is per device."""

    kind: Literal["cpu", "cuda"]
    name: str
    count: int
    memory_bytes: int | None
    driver: str | None = None

    @property
    def key(self) -> str:
        """What a stored measurement is keyed by."""
        return f"{self.kind}:{self.name}:{self.count}"


class EngineInfo(Stored):
    """An engine that can be started: which version, on which platform, from which interpreter."""

    name: str
    version: str
    distribution: str
    platform: Literal["cpu", "cuda", "simulated", "unknown"]
    python: str | None
    torch: str | None = None
    tested: bool = True


class EffectiveConfig(Stored):
    """What the engine really runs with, read back from it; `None` where it does not say.

    `differs` names what the engines behind one address do not have in common: of the sizes of their
    caches the smallest counts, other settings are unknown.
    """

    kv_cache_size_tokens: int | None = None
    num_gpu_blocks: int | None = None
    block_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str | None = None
    model_dtype: str | None = None
    enable_prefix_caching: bool | None = None
    prefix_caching_hash_algo: str | None = None
    max_model_len_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_active_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold_tokens: int | None = None
    watermark_ratio: float | None = None
    scheduler_reserve_full_isl: bool | None = None
    attention_backend: str | None = None
    enforce_eager: bool | None = None
    engine_version: str | None = None
    start_kind: Literal["cold", "warm", "attached"] | None = None
    source: tuple[str, ...] = ()
    differs: tuple[str, ...] | None = None


# --- policies and trials ----------------------------------------------------------------------


class Choice(Stored):
    """One policy with its parameters, and the engine arguments that serve it.

    Argument names are vLLM's long option names without dashes; `True`/`False` become
    `--name`/`--no-name`, mappings become JSON.
    """

    policy: str
    parameters: dict[str, JsonValue]
    arguments: dict[str, JsonValue]
    harm: Harm
    because: str = ""


class PolicyStack(Stored):
    """Ordered choices. The empty stack is the engine's stock defaults."""

    choices: tuple[Choice, ...] = ()

    @property
    def harm(self) -> Harm:
        """The worst harm class of the choices."""
        order = list(Harm)
        return max((choice.harm for choice in self.choices), key=order.index, default=Harm.LOSSLESS)

    @property
    def arguments(self) -> dict[str, JsonValue]:
        """Engine arguments of all choices together; a later choice wins."""
        merged: dict[str, JsonValue] = {}
        for choice in self.choices:
            merged.update(choice.arguments)
        return merged


class Trial(Stored):
    """One point to measure: a stack on top of the user's base arguments, and how often.

    `parent` is set on a trial that measures an earlier one again: its number.
    """

    number: int
    stack: PolicyStack
    base_arguments: dict[str, JsonValue]
    repeats: int
    seed: int
    parent: int | None = None

    @property
    def arguments(self) -> dict[str, JsonValue]:
        """All engine arguments of this trial; the stack wins over the base."""
        return {**self.base_arguments, **self.stack.arguments}


class Failure(Stored):
    """Why there is no number."""

    failure: FailureClass
    message: str
    fix: str = ""
    log_excerpt: str = ""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What happened to one request. Times are seconds since the start of the run.

    `gaps_s` are the times between consecutive output tokens, one a token after the first; tokens
    that arrive in one message share its time, so their gaps after the first are 0.
    """

    index: int
    scheduled_s: float
    sent_s: float
    first_token_s: float | None
    end_s: float
    gaps_s: tuple[float, ...]
    input_tokens: int | None
    output_tokens: int
    requested_output_tokens: int | None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    text: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the request completed with at least one token."""
        return self.error is None and self.first_token_s is not None


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One replay of a set of requests: raw records (warm-up excluded) and the server's counters.

    `counters` are deltas over the run keyed by Prometheus series; `gauges` are samples taken during
    it, keyed the same way, as (seconds since start, value). Both are of `counted_s` seconds only
    where the server restarted or went away meanwhile; `lost` then says what happened, if it was
    gone at the end.
    """

    records: tuple[RequestRecord, ...]
    duration_s: float
    client_cpu_s: float
    counters: Mapping[str, float]
    gauges: Mapping[str, Sequence[tuple[float, float]]]
    warnings: tuple[str, ...] = ()
    counted_s: float | None = None
    lost: str = ""


AnswerFault = Literal["empty", "unreadable", "looping", "off-script"]


class BrokenAnswer(Stored):
    """The beginning of an answer that looks broken, and why it does.

    `request` is the place of the request among those that were sent.
    """

    request: int
    kind: AnswerFault
    why: str
    text: str


class OutputHealth(Stored):
    """How many answers to a trial's own requests look broken, by the first fault of each.

    `answers` were looked at, one for each different prompt of a sample. `text_prompts` of them
    answer a prompt that is text: only these can be off-script. `long_prompts` of them answer a
    prompt of at least two KV blocks; `None` where the block size is not known.
    """

    answers: int
    text_prompts: int
    long_prompts: int | None
    empty: int = 0
    unreadable: int = 0
    looping: int = 0
    off_script: int = 0
    examples: tuple[BrokenAnswer, ...] = ()

    @property
    def broken(self) -> int:
        """How many answers have any fault."""
        return self.empty + self.unreadable + self.looping + self.off_script


class Measurement(Stored):
    """The outcome of a trial. `metrics` maps a metric name to one value per repeat.

    `canary_answers` are the texts that the long-prompt canary got, where it was asked. `outputs`
    says what the answers of the first repeat looked like. `asked_s` of `wall_s` went into the
    questions of quality suites.
    """

    status: Status
    failure: Failure | None = None
    metrics: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    effective: EffectiveConfig | None = None
    counters: tuple[dict[str, float], ...] = ()
    warnings: tuple[str, ...] = ()
    cache: Literal["cold", "warm", "unknown"] = "unknown"
    requests_per_repeat: int = 0
    start_s: float | None = None
    wall_s: float | None = None
    asked_s: float = 0.0
    canary_answers: tuple[str, ...] | None = None
    outputs: OutputHealth | None = None
    kv_bytes_per_token_predicted: int | None = None
    kv_bytes_per_token_observed: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    measured_at: str = ""


class Interval(Stored):
    """An estimate, its confidence interval (`None` bounds: too few repeats), and its origin."""

    estimate: float
    low: float | None
    high: float | None
    unit: str
    confidence: float = 0.95
    repeats: int = 0
    method: str = ""


# --- verdict ----------------------------------------------------------------------------------


class Evidence(Stored):
    """One row behind a verdict; `holds` says whether the value crosses the threshold."""

    metric: str
    value: float | None
    threshold: float | None
    unit: str
    source: str
    holds: bool | None
    says: str


class Ceilings(Stored):
    """What a device reaches in micro-benchmarks, the best of several runs; `device` is its key.

    `copy_bytes_per_s` counts bytes read and written. `method` says what was run, on how much data.
    """

    device: str
    read_bytes_per_s: float
    copy_bytes_per_s: float
    matrix_flop_per_s: float
    matrix_dtype: str
    threads: int | None
    method: str
    measured_at: str


class StepTimeModel(Stored):
    """Time of a decode step: fixed + per_sequence x sequences + per_kv_token x resident tokens.

    Resident tokens are those of all sequences of the step together. `source` says whether a probe
    set the batches, or the workload happened to. `error_share` is the median of the relative errors
    of the observations. Where the model's bytes and the device's ceilings are known, `fixed_s`
    divides into `weight_read_s` and the rest, which is overhead, and `kv_bytes_per_s` is the
    bandwidth at which KV is effectively read.
    """

    source: Literal["probe", "load"]
    fixed_s: Interval
    per_sequence_s: Interval
    per_kv_token_s: Interval
    observations: int
    error_share: float
    weight_read_s: float | None = None
    kv_bytes_per_s: Interval | None = None


class Verdict(Stored):
    """What the workload is bound by, how sure we are, and what would settle it.

    `shares` divide the time of a mean step, or of the requests, among bottlenecks; they sum to at
    most 1, and are empty where nothing can be divided.
    """

    bottleneck: Bottleneck
    confidence: Literal["high", "medium", "low"]
    evidence: tuple[Evidence, ...]
    summary: str
    missing: tuple[str, ...] = ()
    next_experiment: str = ""
    shares: dict[Bottleneck, float] = Field(default_factory=dict)


class Forecast(Stored):
    """What a lever is expected to do to one metric, told before it was tried.

    `arguments` are all engine arguments with the lever in it; `stack` names the methods, as `kvtune
    plan` takes them, where it is one of those. A lever that the engine at hand does not serve is a
    `reference`: its figures are those of an engine that did. `predicted` is `ratio` times
    `baseline`; without it `reason` says why there is no forecast. `measured` and
    `measured_baseline` come from the search that tried the lever later.
    """

    lever: str
    stack: str = ""
    arguments: dict[str, JsonValue]
    served_by: Literal["engine", "reference"] = "engine"
    metric: str
    unit: str
    baseline: float | None = None
    predicted: float | None = None
    ratio: Interval | None = None
    reason: str
    study: str | None = None
    measured: float | None = None
    measured_baseline: float | None = None

    @property
    def measured_ratio(self) -> float | None:
        """How many times the baseline the lever was when it was measured."""
        if self.measured is None or not self.measured_baseline:
            return None
        return self.measured / self.measured_baseline


class Profile(Stored):
    """A workload on a server: what was seen, and what it is bound by.

    The store keeps `forecasts` apart, beside what is measured of them later.
    """

    model: str
    endpoint_url: str
    device: Device | None
    engine: EngineInfo | None
    effective: EffectiveConfig | None
    fingerprint: WorkloadFingerprint | None
    metrics: dict[str, tuple[float, ...]]
    counters: dict[str, float]
    window_s: float
    verdict: Verdict
    warnings: tuple[str, ...] = ()
    measured_at: str = ""
    ceilings: Ceilings | None = None
    step_time: StepTimeModel | None = None
    forecasts: tuple[Forecast, ...] = ()


# --- quality ------------------------------------------------------------------------------------


class QualityFigure(Stored):
    """One metric of a suite in one category, candidate against baseline on the same items.

    `candidate` and `baseline` are means, `change` is the mean of the paired differences with its
    interval, and `floor` the same for the baseline against itself. `broken` items were fine with
    the baseline and are not now, `mended` ones the other way round. `items_needed` is how many
    items could support the limit; `None` when these do, or no number would. The report's outcome is
    made of those that `decides`; the others only inform.
    """

    suite: str
    category: str
    metric: str
    unit: str
    better: Literal["higher", "lower"]
    kind: Literal["difference", "level"]
    limit: float
    items: int
    candidate: float
    baseline: float
    change: Interval
    floor: Interval | None = None
    broken: int = 0
    mended: int = 0
    items_needed: int | None = None
    decides: bool = True
    outcome: Literal["pass", "fail", "unclear"]
    because: str


class NegativeSample(Stored):
    """An item that was fine with the baseline and is broken now, with both answers."""

    suite: str
    category: str
    item: str
    asked: str
    candidate: str
    baseline: str
    detail: str = ""


class QualityPoint(Stored):
    """What an item's headline metric was, and where the item stands on the axes of its map.

    `again` is that of the baseline's second run, where there was one.
    """

    suite: str
    category: str
    item: str
    place: dict[str, float] = Field(default_factory=dict)
    candidate: float
    baseline: float
    again: float | None = None


class QualityReport(Stored):
    """What a configuration's answers are worth beside the baseline's, by suite and category.

    The outcome is the worst figure's. `skipped` says of suites that were not run why. `candidate`
    and `baseline` say what answered: engine arguments, or a stack of methods. `unanswered` counts
    the items that one of them gave no answer to, which another time it may.
    """

    outcome: Literal["pass", "fail", "unclear"]
    figures: tuple[QualityFigure, ...]
    samples: tuple[NegativeSample, ...] = ()
    points: tuple[QualityPoint, ...] = ()
    skipped: dict[str, str] = Field(default_factory=dict)
    unanswered: int = 0
    model: str = ""
    baseline: str = ""
    candidate: str = ""
    size: str = ""
    seed: int = 0
    wall_s: float | None = None
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    measured_at: str = ""


# --- decision and what is handed over ---------------------------------------------------------


class Outcome(StrEnum):
    """How a search ended."""

    WINNER = "winner"
    KEEP_BASELINE = "keep-baseline"
    NO_CLEAR_WINNER = "no-clear-winner"
    INFEASIBLE = "infeasible"
    NOTHING_MEASURED = "nothing-measured"


class Decision(Stored):
    """Which trial to ship and why; `recommended` is also set when there is no clear winner."""

    outcome: Outcome
    recommended: int | None
    baseline: int | None
    ties: tuple[int, ...] = ()
    figures: dict[str, Interval] = Field(default_factory=dict)
    baseline_figures: dict[str, Interval] = Field(default_factory=dict)
    gain_ratio: Interval | None = None
    reasons: tuple[str, ...] = ()
    rejected: dict[int, str] = Field(default_factory=dict)


class Setting(Stored):
    """One engine argument of a serving config and where it comes from."""

    name: str
    value: JsonValue
    because: str
    origin: Literal["tuned", "base"] = "tuned"


class ServingConfig(Stored):
    """What a person deploys: engine arguments with provenance and the measured evidence.

    `outcome` is None for a trial that a person picked and the study does not recommend.
    """

    study: str
    trial: int
    outcome: Outcome | None
    model: str
    served_model_name: str | None = None
    engine: EngineInfo
    device: Device
    settings: tuple[Setting, ...]
    environment: dict[str, str] = Field(default_factory=dict)
    goal: Goal
    figures: dict[str, Interval] = Field(default_factory=dict)
    baseline_figures: dict[str, Interval] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    revert_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    kvtune_version: str
    created_at: str
