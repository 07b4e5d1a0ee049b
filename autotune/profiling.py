"""From a stretch of load on a server to a `Profile` with its verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvtune.errors import BadInput, EngineError
from kvtune.policies.model_shape import ModelShape, read_model_shape
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

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is profiled: the server and what is known about it beside its counters."""

    model: str
    endpoint_url: str
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
        weight_bytes=weight_bytes(subject.model),
        kv_bytes_per_token=_kv_bytes_per_token(subject),
    )
    return Profile(
        model=subject.model,
        endpoint_url=subject.endpoint_url,
        device=subject.device,
        engine=subject.engine,
        effective=subject.effective,
        fingerprint=subject.fingerprint,
        metrics={name: (value,) for name, value in metrics.items()},
        counters=dict(run.counters),
        window_s=run.duration_s,
        verdict=judge(window),
        warnings=run.warnings,
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


def model_shape(model: str) -> ModelShape | None:
    """The shape of a model on this disk; `None` for a hub id or an architecture not known."""
    path = Path(model).expanduser()
    if not path.exists():
        return None
    try:
        return read_model_shape(path)
    except BadInput:
        return None


def weight_bytes(model: str) -> int | None:
    """Size of a model's weight files on this disk; `None` for a hub id."""
    path = Path(model).expanduser()
    if not path.is_dir():
        return None
    for pattern in WEIGHT_FILES:
        if files := list(path.glob(pattern)):
            return sum(file.stat().st_size for file in files)
    return None


def _kv_bytes_per_token(subject: Subject) -> float | None:
    effective = subject.effective
    if effective is not None and effective.kv_cache_memory_bytes and effective.kv_cache_size_tokens:
        return effective.kv_cache_memory_bytes / effective.kv_cache_size_tokens
    shape = model_shape(subject.model)
    return None if shape is None else shape.kv_bytes_per_token(shape.dtype_bytes)


def vocab_size(model: str) -> int | None:
    """The number of token ids of a model on this disk."""
    shape = model_shape(model)
    return None if shape is None else shape.vocab_size


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
