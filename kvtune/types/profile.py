"""What a profile says: what a workload is bound by, why, and what a lever would change."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from kvtune.types.base import (
    Bottleneck,
    Device,
    EffectiveConfig,
    EngineInfo,
    GpuUse,
    Interval,
    Stored,
    WorkloadFingerprint,
)


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
    `baseline`. Where `baseline` is 0 there is no ratio, and the range is in `reason`; where nothing
    is predicted `reason` says why. `measured` and `measured_baseline` come from the search that
    tried the lever later.
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

    The store keeps `forecasts` apart, beside what is measured of them later. `gpus` are those that
    the server ran on, where they could be watched.
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
    gpus: tuple[GpuUse, ...] = ()
