"""From a stretch of load on a server to a `Profile` with its verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod

from pydantic import JsonValue

from kvtune.autotune.trial import warnings_of
from kvtune.errors import EngineError
from kvtune.policies.capacity import effective_kv_bytes, reported_kv_bytes
from kvtune.policies.checkpoint import model_shape, weight_bytes
from kvtune.policies.settings import read_count
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.scrape import Scraper, counter_resets, counters_delta
from kvtune.profilers.verdict import judge
from kvtune.profilers.window import Window
from kvtune.types import (
    Device,
    EffectiveConfig,
    Endpoint,
    EngineInfo,
    FailureClass,
    Goal,
    LoadRun,
    Profile,
    WorkloadFingerprint,
)

PARALLEL_SIZES = ("tensor-parallel-size", "pipeline-parallel-size")
"""The options whose product is the number of devices that share the weights."""


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


def profile_of(subject: Subject, run: LoadRun, goal: Goal, *, is_load_ours: bool) -> Profile:
    """Judge one run. `is_load_ours` says that nobody else used the server meanwhile."""
    metrics = measure(run, goal) if run.records else {}
    window = Window(
        window_s=run.duration_s,
        counters=run.counters,
        gauges=run.gauges,
        effective=subject.effective,
        load=metrics or None,
        is_load_ours=is_load_ours,
        weight_bytes=_weight_bytes(subject),
        kv_bytes_per_token=_kv_bytes_per_token(subject),
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
        window_s=run.duration_s,
        verdict=judge(window),
        warnings=warnings_of(run),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


async def watch(
    endpoint: Endpoint,
    duration_s: float,
    *,
    interval_s: float = 0.5,
    on_second: Callable[[float], None] | None = None,
) -> LoadRun:
    """Read a server's counters for a while and send nothing else.

    Raises:
        EngineError: /metrics cannot be read.
    """
    gauges: dict[str, list[tuple[float, float]]] = {}
    async with Scraper(endpoint) as scraper:
        before = await scraper.read()
        if before is None:
            raise EngineError(
                FailureClass.REQUEST_ERRORS,
                f"{endpoint.url}/metrics cannot be read: {'; '.join(scraper.problems)}",
                fix="check the address; vLLM serves its metrics on the port of its API",
            )
        start_s = time.perf_counter()
        sampler = asyncio.create_task(scraper.sample_gauges(gauges, start_s, interval_s))
        try:
            while (elapsed_s := time.perf_counter() - start_s) < duration_s:
                if on_second is not None:
                    on_second(elapsed_s)
                await asyncio.sleep(min(1.0, duration_s - elapsed_s))
        finally:
            sampler.cancel()
        window_s = time.perf_counter() - start_s
        after = await scraper.read()
        problems = list(scraper.problems)
    if after is None:
        raise EngineError(
            FailureClass.REQUEST_ERRORS,
            f"{endpoint.url}/metrics went away while it was watched: {'; '.join(problems)}",
            fix="look whether the server is still running",
        )
    if restarted := counter_resets(before, after):
        problems.append(f"the server restarted while it was watched ({restarted[0]} fell)")
    return LoadRun((), window_s, 0.0, counters_delta(before, after), gauges, tuple(problems))


def _weight_bytes(subject: Subject) -> int | None:
    """Bytes of weights on each device."""
    total = None if subject.model is None else weight_bytes(subject.model)
    devices = _devices_sharing(subject)
    return None if total is None or devices is None else total // devices


def _kv_bytes_per_token(subject: Subject) -> float | None:
    """Bytes of a token's KV on each device: exact for a known model, else as far as reported."""
    effective, arguments = subject.effective, subject.arguments or {}
    shape = None if subject.model is None else model_shape(subject.model)
    predicted = None
    if shape is not None and _devices_sharing(subject) is not None:
        predicted = effective_kv_bytes(shape, arguments, effective)
    if predicted is not None or effective is None:
        return predicted
    return reported_kv_bytes(arguments, effective)


def _devices_sharing(subject: Subject) -> int | None:
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
