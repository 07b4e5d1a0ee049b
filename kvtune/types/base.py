"""What all of kvtune speaks of: workloads, goals, engines, policies and trials.

The other modules of this package build on this one, and not on each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
    """How a trial ended; `CUT` is one that was given up while its load ran, as hopeless."""

    OK = "ok"
    CUT = "cut"
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
    CONTAMINATED = "contaminated"
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
    unbounded prefix cache of that block size would serve. `shared_prefix_tokens` is the beginning
    that most prompts have in common with others, such as a system prompt. `burstiness` is the
    coefficient of variation of inter-arrival times (1 for a Poisson process). `digest` identifies
    the requests.
    """

    requests: int
    input_tokens: Histogram | None
    output_tokens: Histogram | None
    duration_s: float | None
    request_rate_per_s: float | None
    burstiness: float | None
    reusable_prefix_share: dict[int, float] = Field(default_factory=dict)
    shared_prefix_tokens: int | None = None
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


class GpuUse(Stored):
    """What one GPU did while a server was watched, from `samples` looks at it.

    `gpu` counts the visible ones from 0. Figures are means, of memory it is the most; `None` is
    what the GPU does not tell. Ratios are of the most possible: the time in which any kernel ran,
    the SMs with work, those with tensor operations, the bandwidth of the memory. `slowed_by` held
    the clocks back, in the share `slowed_ratio` of the looks.
    """

    gpu: int
    samples: int
    busy_ratio: float | None = None
    sm_ratio: float | None = None
    tensor_ratio: float | None = None
    dram_bandwidth_ratio: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    slowed_ratio: float = 0.0
    slowed_by: tuple[str, ...] = ()
    memory_used_bytes: int | None = None
    power_w: float | None = None


class EngineInfo(Stored):
    """An engine that can be started: which version, on which platform, from which interpreter.

    `plugin` is the version of kvtune whose plugin its servers load; None: none, or it is not known.
    """

    name: str
    version: str
    distribution: str
    platform: Literal["cpu", "cuda", "simulated", "unknown"]
    python: str | None
    torch: str | None = None
    tested: bool = True
    plugin: str | None = None


class EffectiveConfig(Stored):
    """What the engine really runs with, read back from it; `None` where it does not say.

    `differs` names what the engines behind one address do not have in common: of the sizes of their
    caches the smallest counts, other settings are unknown. What was not started but changed while
    it ran has a `start_kind` of "live", what was started wider and then changed is "narrowed".
    `plugin` is what kvtune's plugin says that it does there.
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
    plugin: dict[str, JsonValue] | None = None
    engine_version: str | None = None
    start_kind: Literal["cold", "warm", "attached", "live", "narrowed"] | None = None
    source: tuple[str, ...] = ()
    differs: tuple[str, ...] | None = None


# --- policies and trials ----------------------------------------------------------------------


class Choice(Stored):
    """One policy with its parameters, and the engine arguments that serve it.

    Argument names are vLLM's long option names without dashes; `True`/`False` become
    `--name`/`--no-name`, mappings become JSON. `takes_bytes` is memory that a server takes for it
    beside all that it takes without.
    """

    policy: str
    parameters: dict[str, JsonValue]
    arguments: dict[str, JsonValue]
    harm: Harm
    because: str = ""
    takes_bytes: int = 0


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

    @property
    def cost(self) -> tuple[int, int]:
        """What it takes to run it whatever it gives, the smaller the simpler: bytes, arguments."""
        return sum(choice.takes_bytes for choice in self.choices), len(self.arguments)


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


# --- figures ----------------------------------------------------------------------------------


class Interval(Stored):
    """An estimate, its confidence interval (`None` bounds: too few repeats), and its origin."""

    estimate: float
    low: float | None
    high: float | None
    unit: str
    confidence: float = 0.95
    repeats: int = 0
    method: str = ""
