"""From a stretch of load on a server to a `Profile` with its verdict."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from typing import Literal
from urllib.parse import urlsplit

from pydantic import JsonValue

from kvtune.autotune.reporting import Reporter
from kvtune.autotune.trial import warnings_of
from kvtune.engines.vllm import readiness
from kvtune.errors import KvtuneError
from kvtune.kernels.ceilings import may_be_low, measure_ceilings
from kvtune.policies.capacity import effective_kv_bytes, reported_kv_bytes
from kvtune.policies.checkpoint import model_shape, weight_bytes
from kvtune.policies.settings import read_count
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.probe import ProbeResult
from kvtune.profilers.scrape import ENGINES
from kvtune.profilers.step_gaps import Observations, observations
from kvtune.profilers.step_time import fit_step_time, missing_for_fit
from kvtune.profilers.verdict import judge
from kvtune.profilers.window import Window
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Ceilings,
    Device,
    EffectiveConfig,
    EngineInfo,
    Goal,
    GpuUse,
    LoadRun,
    Profile,
    StepTimeModel,
    Trial,
    WorkloadFingerprint,
)

PARALLEL_SIZES = ("tensor-parallel-size", "pipeline-parallel-size")
"""The options whose product is the number of devices that share the weights."""

_LIMITS = {
    "max-num-seqs": "max_num_seqs",
    "max-num-active-seqs": "max_num_active_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
}
"""Options that no page of metrics tells, and the fields of `EffectiveConfig` that they set."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is profiled: the server and what is known about it beside its counters.

    `model` is the checkpoint that the user named, `None` where nobody did: the name that a server
    gives its model is not looked up on this disk. `arguments` are the engine arguments that the
    server was started with, `None` where nobody said.
    """

    model: str | None
    endpoint_url: str
    served_name: str = ""
    arguments: Mapping[str, JsonValue] | None = None
    effective: EffectiveConfig | None = None
    engine: EngineInfo | None = None
    device: Device | None = None
    fingerprint: WorkloadFingerprint | None = None


def profile_of(
    subject: Subject,
    run: LoadRun,
    goal: Goal,
    *,
    is_load_ours: bool,
    ceilings: Ceilings | None = None,
    probed: ProbeResult | None = None,
    known: StepTimeModel | None = None,
) -> Profile:
    """Judge one run. `is_load_ours` says that nobody else used the server meanwhile.

    `ceilings` are those of the device that the server runs on. The step-time model is the one that
    is `known` from an earlier probe, else comes from what was `probed`, else from the run itself if
    its batches varied enough.
    """
    metrics = measure(run, goal) if run.records else {}
    step_time, doubts = known, tuple[str, ...]()
    if step_time is None or run.gauges.get(ENGINES):
        step_time, doubts = _step_time(subject, run, ceilings, probed)
    window = window_of(
        subject,
        run,
        metrics=metrics,
        is_load_ours=is_load_ours,
        ceilings=ceilings,
        step_time=step_time,
    )
    return Profile(
        model=subject.model or subject.served_name,
        endpoint_url=subject.endpoint_url,
        device=subject.device,
        engine=subject.engine,
        effective=subject.effective,
        fingerprint=subject.fingerprint,
        metrics={name: (value,) for name, value in metrics.items()},
        counters=dict(run.counters),
        window_s=_window_s(run),
        verdict=judge(window),
        warnings=(*warnings_of(run), *_unlike_engines(subject), *_low_ceilings(ceilings), *doubts),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        ceilings=ceilings,
        step_time=step_time,
        gpus=window.gpus,
    )


def as_told(
    effective: EffectiveConfig | None, arguments: Mapping[str, JsonValue] | None
) -> EffectiveConfig | None:
    """What a server says of itself, and where it says nothing of its limits, what the user does.

    `arguments` are those that the user says the server was started with.
    """
    if effective is None:
        return None
    told = {
        field: count
        for name, field in _LIMITS.items()
        if getattr(effective, field) is None
        and (count := read_count((arguments or {}).get(name))) is not None
    }
    if not told:
        return effective
    return effective.model_copy(update={**told, "source": (*effective.source, "arguments")})


def window_of(
    subject: Subject,
    run: LoadRun,
    *,
    metrics: Mapping[str, float],
    is_load_ours: bool,
    ceilings: Ceilings | None,
    step_time: StepTimeModel | None,
) -> Window:
    """What a verdict judges of a run; `metrics` are those of our own client, if it made the load.

    Other arguments are as in `profile_of`.
    """
    return Window(
        window_s=_window_s(run),
        counters=run.counters,
        gauges=run.gauges,
        effective=subject.effective,
        load=metrics or None,
        is_load_ours=is_load_ours,
        peak_flops_per_s=None if ceilings is None else ceilings.matrix_flop_per_s,
        peak_bytes_per_s=None if ceilings is None else ceilings.read_bytes_per_s,
        weight_bytes=_weight_bytes(subject),
        kv_bytes_per_token=_kv_bytes_per_token(subject),
        step_time=step_time,
        reusable_prefix_share={}
        if subject.fingerprint is None
        else subject.fingerprint.reusable_prefix_share,
        gpus=_gpus(subject, run),
    )


def profile_baseline(
    study: StudyRow,
    trial: Trial,
    effective: EffectiveConfig | None,
    run: LoadRun,
    *,
    device: Device,
    fingerprint: WorkloadFingerprint,
    ceilings: Ceilings | None,
    probed: ProbeResult | None = None,
    known: StepTimeModel | None = None,
) -> Profile:
    """Judge the run of a study's baseline. `ceilings` are those of this machine.

    They say nothing about an engine that only pretends to compute. `probed` and `known` are as in
    `profile_of`.
    """
    subject = Subject(
        model=study.model,
        endpoint_url="",
        arguments=trial.arguments,
        effective=effective,
        engine=study.engine,
        device=device,
        fingerprint=fingerprint,
    )
    pretends = study.engine.platform == "simulated"
    return profile_of(
        subject,
        run,
        study.goal,
        is_load_ours=True,
        ceilings=None if pretends else ceilings,
        probed=probed,
        known=known,
    )


def runs_here(url: str) -> bool:
    """Whether the server at `url` is on this machine, by the host in it.

    A port that is forwarded to another machine looks as if it were.
    """
    host = (urlsplit(url).hostname or "").lower()
    own = socket.gethostname().lower()
    return readiness.is_loopback(host) or host in ("0.0.0.0", "::", own, own.partition(".")[0])


def device_ceilings(
    engine: EngineInfo, device: Device, store: Store, reporter: Reporter
) -> Ceilings | None:
    """What a device reaches: from the history, or measured now, in seconds, and kept there.

    None for an engine that only pretends to compute, and where it cannot be measured, which is
    said. No server may run on the device meanwhile.
    """
    if engine.platform == "simulated":
        return None
    if (known := store.ceilings(device.key)) is not None:
        return known
    reporter.note("measuring the memory bandwidth and matrix rate of this device, once")
    try:
        measured = measure_ceilings(device) if device.kind != "cuda" else _measured_apart(device)
    except KvtuneError as error:
        reporter.note(f"the ceilings of this device are not known: {error.message}; {error.fix}")
        return None
    store.save_ceilings(measured)
    return measured


def _measured_apart(device: Device) -> Ceilings:
    """Ceilings measured in a process of its own: a CUDA context keeps some of the GPU's memory for
    as long as its process lives, and the servers to come need it."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        try:
            return apart.submit(measure_ceilings, device).result()
        except BrokenProcessPool:
            raise KvtuneError(
                "the process that measured this device died", fix="try kvtune doctor --measure"
            ) from None


def _step_time(
    subject: Subject, run: LoadRun, ceilings: Ceilings | None, probed: ProbeResult | None
) -> tuple[StepTimeModel | None, tuple[str, ...]]:
    """The step-time model, and what the probe left out or why there is no model."""
    doubts = () if probed is None else probed.notes
    if run.gauges.get(ENGINES):
        return None, (*doubts, "no step-time model: requests are spread over several engines")
    sources: list[tuple[Literal["probe", "load"], Observations]] = []
    if probed is not None:
        sources.append(("probe", probed.observations))
    if run.records:
        sources.append(("load", observations(run.records)))
    for source, found in sources:
        model = fit_step_time(
            found,
            source=source,
            weight_bytes=_weight_bytes(subject),
            # What kvtune's plugin does not read is none of the price of a token of context.
            kv_bytes_per_token=None if _has_plugin(subject) else _kv_bytes_per_token(subject),
            ceilings=ceilings,
        )
        if model is not None:
            return model, doubts
    missing = [
        f"no step-time model of the {source}: {reason}"
        for source, found in sources
        for reason in missing_for_fit(found)
    ]
    return None, (*doubts, *missing)


def _unlike_engines(subject: Subject) -> tuple[str, ...]:
    differing = None if subject.effective is None else subject.effective.differs
    if not differing:
        return ()
    return (
        f"the engines behind this address differ in {', '.join(differing)}: each is taken to have "
        "the smallest of the caches, and what else differs to be unknown",
    )


def _gpus(subject: Subject, run: LoadRun) -> tuple[GpuUse, ...]:
    """All visible GPUs, if the server is here and as many share its model, else none.

    Which ones it runs on is not known otherwise.
    """
    engine = subject.engine
    is_on_gpus = runs_here(subject.endpoint_url) if engine is None else engine.platform == "cuda"
    return run.gpus if is_on_gpus and len(run.gpus) == devices_sharing(subject) else ()


def _low_ceilings(ceilings: Ceilings | None) -> tuple[str, ...]:
    if ceilings is None or not may_be_low(ceilings):
        return ()
    return (
        "what this device reaches was measured while it was busy, so that overhead may look like "
        "weight reads: run `kvtune doctor --measure` again while it is idle",
    )


def _window_s(run: LoadRun) -> float:
    """The time that a run's counters are of."""
    return run.duration_s if run.counted_s is None else run.counted_s


def _weight_bytes(subject: Subject) -> int | None:
    """Bytes of weights on each device."""
    total = None if subject.model is None else weight_bytes(subject.model)
    devices = devices_sharing(subject)
    return None if total is None or devices is None else total // devices


def _kv_bytes_per_token(subject: Subject) -> float | None:
    """Bytes of a token's KV on each device: exact for a known model, else as far as reported."""
    effective, arguments = subject.effective, subject.arguments or {}
    shape = None if subject.model is None else model_shape(subject.model)
    predicted = None
    if shape is not None and devices_sharing(subject) is not None:
        predicted = effective_kv_bytes(shape, arguments, effective)
    if predicted is not None or effective is None:
        return predicted
    return reported_kv_bytes(arguments, effective)


def _has_plugin(subject: Subject) -> bool:
    return subject.effective is not None and subject.effective.plugin is not None


def devices_sharing(subject: Subject) -> int | None:
    """How many devices share the weights; `None` where there are several and nobody said."""
    device = subject.device
    if subject.arguments is None and device is not None:
        return 1 if device.kind == "cpu" or device.count == 1 else None
    return prod(read_count((subject.arguments or {}).get(name)) or 1 for name in PARALLEL_SIZES)


def observed_concurrency(run: LoadRun) -> int:
    """The most requests of a run that were in flight at once."""
    events: list[tuple[float, int]] = []
    for record in run.records:
        events += [(record.sent_s, 1), (record.end_s, -1)]
    most = now = 0
    for _, step in sorted(events, key=lambda event: (event[0], event[1])):
        now += step
        most = max(most, now)
    return most
