"""Measure one trial: start its server, ask the canary, replay the workload, stop the server.

A trial never raises for a server that fails: the outcome is a `Measurement` with a failure class
and no number. Only an interrupt passes through, after the server is stopped.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import kvtune
from kvtune.autotune.interrupts import Interrupts
from kvtune.autotune.replays import PutsLoad, Replays, death, fixed_load, silence
from kvtune.autotune.reporting import Reporter
from kvtune.engines.base import Engine, RunningServer, ServerSpec
from kvtune.errors import BadInput, EngineError, StoreError
from kvtune.policies.capacity import effective_kv_bytes, reported_kv_bytes
from kvtune.policies.checkpoint import model_shape
from kvtune.profilers.load import runtime
from kvtune.profilers.load.client import Watch
from kvtune.profilers.measure import LoadPlan, ask_text
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.quality.canary import run_canary
from kvtune.types import (
    Failure,
    Goal,
    LoadRun,
    Measurement,
    Request,
    Status,
    Trial,
)

AtServer = Callable[[Trial, RunningServer, Measurement], Measurement]
"""Looks at a server once it was measured; returns the measurement with what came of that."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that the trials of a study have in common."""

    engine: Engine
    model: str
    served_model_name: str | None
    environment: dict[str, str]
    plan: LoadPlan
    goal: Goal
    log_dir: Path
    reporter: Reporter
    start_timeout_s: float = 300.0
    interrupts: Interrupts = field(default_factory=Interrupts)
    clock: Callable[[], float] = time.monotonic


def run_trial(
    trial: Trial,
    bench: Bench,
    requests: Sequence[Request],
    *,
    canary: bool,
    label: str = "trial",
    afterwards: AtServer | None = None,
    watch: Watch | None = None,
    load: PutsLoad = fixed_load,
) -> tuple[Measurement, tuple[LoadRun, ...]]:
    """Measure a trial on a server of its own; the raw runs are returned beside the measurement.

    `canary` asks the long-prompt canary before the load. `label` names the log file. `afterwards`
    gets the server once it was measured, before it is stopped, and has the last word on the
    measurement. `load` puts the load on the server, and `watch` may cut the first replay of it,
    which ends the trial. What was measured is not lost to an interrupt: it is held until the caller
    has written the outcome down.

    Raises:
        StoreError: the log cannot be written.
    """
    began = bench.clock()
    spec = ServerSpec(
        model=bench.model,
        served_model_name=bench.served_model_name,
        arguments=trial.arguments,
        environment=bench.environment,
        reusable=trial.parent is None,
    )
    log_path = bench.log_dir / f"{label}-{trial.number}.log"
    try:
        server = bench.engine.launch(
            spec,
            log_path=log_path,
            start_timeout_s=bench.start_timeout_s,
            on_log=bench.reporter.server_log,
        )
    except EngineError as error:
        return _failed(failure_of(error), bench, began), ()
    except OSError as error:
        raise StoreError(
            f"the log {log_path} cannot be written: {error.strerror or error}",
            fix="make room or make its directory writable, and run the same command again",
        ) from error
    with server:
        bench.reporter.ready(server.start_s)
        measurement, runs = _measure(
            trial, bench, requests, server, canary=canary, began=began, watch=watch, load=load
        )
        bench.interrupts.hold()
        if afterwards is not None and measurement.status is Status.OK:
            measurement = afterwards(trial, server, measurement)
        if measurement.failure is None:
            server.keep()
        stopping = bench.clock()
    return measurement.model_copy(update={"stop_s": bench.clock() - stopping}), runs


def _measure(
    trial: Trial,
    bench: Bench,
    requests: Sequence[Request],
    server: RunningServer,
    *,
    canary: bool,
    began: float,
    watch: Watch | None,
    load: PutsLoad,
) -> tuple[Measurement, tuple[LoadRun, ...]]:
    replays = Replays(trial, bench, server)
    answers: tuple[str, ...] | None = None
    try:
        if canary:
            answers = _canary_answers(bench, server)
        loaded = load(replays, requests, watch)
    except OSError as error:
        return _failed(death(server) or silence(error), bench, began, server), ()
    if loaded.failure is not None:
        return _failed(loaded.failure, bench, began, server), loaded.runs
    measurement = measurement_of(loaded.runs, bench.goal, server, wall_s=bench.clock() - began)
    shape = model_shape(bench.model)
    known: dict[str, object] = {
        "metrics": {**measurement.metrics, **loaded.metrics},
        "warmup_s": replays.warmup_s,
        "load_s": replays.load_s,
        "canary_answers": answers,
        "outputs": replays.outputs,
        "kv_bytes_per_token_predicted": None
        if shape is None
        else effective_kv_bytes(shape, trial.arguments, server.effective),
        "kv_bytes_per_token_observed": reported_kv_bytes(trial.arguments, server.effective),
    }
    return measurement.model_copy(update={**known, **loaded.known}), loaded.runs


def _canary_answers(bench: Bench, server: RunningServer) -> tuple[str, ...]:
    report = runtime.run(
        run_canary(
            partial(
                ask_text,
                server.endpoint,
                request_timeout_s=bench.plan.request_timeout_s,
                stall_timeout_s=bench.plan.stall_timeout_s,
                should_stop=server.failure,
            ),
            max_model_len_tokens=server.effective.max_model_len_tokens,
        )
    )
    return tuple(answer.text for answer in report.answers)


def measurement_of(
    runs: Sequence[LoadRun], goal: Goal, server: RunningServer, *, wall_s: float
) -> Measurement:
    """Put the repeats of a trial together, with what the engine says it ran with."""
    per_run = [measure(run, goal) for run in runs]
    names = sorted({name for metrics in per_run for name in metrics})
    effective = server.effective
    return Measurement(
        status=Status.OK,
        metrics={
            name: tuple(metrics[name] for metrics in per_run)
            for name in names
            if all(name in metrics for metrics in per_run)
        },
        effective=effective,
        counters=tuple(dict(run.counters) for run in runs),
        warnings=tuple(
            dict.fromkeys([*server.warnings, *(w for run in runs for w in warnings_of(run))])
        ),
        cache="cold",
        requests_per_repeat=len(runs[0].records),
        start_s=server.start_s,
        wall_s=wall_s,
        versions=versions_of(effective.engine_version),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def warnings_of(run: LoadRun) -> tuple[str, ...]:
    """What makes a replay's figures doubtful, beside what the client itself noticed."""
    from kvtune.profilers.drift import drift_warning

    warnings = list(run.warnings)
    short = sum(
        record.ok
        and record.requested_output_tokens is not None
        and record.output_tokens < record.requested_output_tokens
        for record in run.records
    )
    if short:
        warnings.append(f"{short} requests returned fewer tokens than were asked for")
    if (changed := drift_warning(run.records)) is not None:
        warnings.append(changed)
    return tuple(warnings)


def versions_of(engine_version: str | None) -> dict[str, str]:
    """The versions that a figure depends on."""
    versions = {"kvtune": kvtune.__version__, "python": platform.python_version()}
    if engine_version is not None:
        versions["engine"] = engine_version
    return versions


def failure_of(error: EngineError) -> Failure:
    """What an error of an engine amounts to."""
    return Failure(
        failure=error.failure,
        message=error.message,
        fix=error.fix,
        log_excerpt=error.log_excerpt,
    )


def _failed(
    failure: Failure, bench: Bench, began: float, server: RunningServer | None = None
) -> Measurement:
    return Measurement(
        status=Status.FAILED,
        failure=failure,
        effective=None if server is None else server.effective,
        start_s=None if server is None else server.start_s,
        wall_s=bench.clock() - began,
        versions=versions_of(None),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def check_model(path: str) -> None:
    """Refuse a model that looks like a path and is not there, before anything is started.

    Raises:
        BadInput: nothing is at that path, or it holds no config.json.
    """
    if not path.startswith((".", "/", "~")):
        return
    directory = Path(path).expanduser()
    if not directory.exists():
        raise BadInput(
            f"the model path {path} does not exist",
            fix="give the directory of a checkpoint, or a hub id such as org/name",
        )
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise BadInput(
            f"the model path {path} holds no config.json",
            fix="point at the directory that has config.json and the weights in it",
        )
