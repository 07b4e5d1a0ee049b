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
from kvtune.autotune.contamination import contamination
from kvtune.autotune.interrupts import Interrupts
from kvtune.autotune.reporting import Reporter
from kvtune.engines.base import Engine, RunningServer, ServerSpec
from kvtune.errors import BadInput, EngineError, StoreError
from kvtune.policies.capacity import effective_kv_bytes, reported_kv_bytes
from kvtune.policies.checkpoint import model_shape
from kvtune.profilers.load import runtime
from kvtune.profilers.load.cache import reset_prefix_cache
from kvtune.profilers.load.client import Watch
from kvtune.profilers.measure import (
    LoadPlan,
    ask_text,
    replay_workload,
    sent_requests,
    without_text,
)
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.quality.canary import run_canary
from kvtune.profilers.quality.traffic import health
from kvtune.types import (
    Failure,
    FailureClass,
    Goal,
    LoadRun,
    Measurement,
    OutputHealth,
    Request,
    Status,
    Trial,
    fingerprint_of,
)

TOLERATED_ERROR_SHARE = 0.01
"""A replay with more failed requests than this is a failure. Latencies leave failed requests out,
and the slowest are the first to fail: a p99 is about one request in a hundred, so with more than
that missing it would describe a load that the server did not carry."""

DYING_S = 2.0
"""How long a crash may take from the first connection that is cut to the end of the process."""


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
) -> tuple[Measurement, tuple[LoadRun, ...]]:
    """Measure a trial on a server of its own; the raw runs are returned beside the measurement.

    `canary` asks the long-prompt canary before the load. `label` names the log file. `afterwards`
    gets the server once it was measured, before it is stopped, and has the last word on the
    measurement. `watch` may cut the first repeat, which ends the trial. What was measured is not
    lost to an interrupt: it is held until the caller has written the outcome down.

    Raises:
        StoreError: the log cannot be written.
    """
    began = bench.clock()
    spec = ServerSpec(
        model=bench.model,
        served_model_name=bench.served_model_name,
        arguments=trial.arguments,
        environment=bench.environment,
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
            trial, bench, requests, server, canary=canary, began=began, watch=watch
        )
        bench.interrupts.hold()
        if afterwards is not None and measurement.status is Status.OK:
            measurement = afterwards(trial, server, measurement)
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
) -> tuple[Measurement, tuple[LoadRun, ...]]:
    runs: list[LoadRun] = []
    replays_s = 0.0
    answers: tuple[str, ...] | None = None
    outputs: OutputHealth | None = None
    try:
        if canary:
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
            answers = tuple(answer.text for answer in report.answers)
        for repeat in range(trial.repeats):
            if repeat:
                runtime.run(reset_prefix_cache(server.endpoint))
            replaying = bench.clock()
            run = runtime.run(
                replay_workload(
                    server.endpoint,
                    requests,
                    bench.plan,
                    salt=salt_of(trial, repeat),
                    max_model_len_tokens=server.effective.max_model_len_tokens,
                    on_progress=bench.reporter.load,
                    should_stop=server.failure,
                    keep_text=repeat == 0,
                    watch=watch if repeat == 0 else None,
                )
            )
            replays_s += bench.clock() - replaying
            if repeat == 0:
                outputs = outputs_of(run, requests, bench.plan, server)
                run = without_text(run)
            failure = death(server, run) or request_failure(run)
            if failure is None and not run.cut:
                failure = contamination(run, requests, bench.plan, server.effective)
            if failure is not None:
                return _failed(failure, bench, began, server), tuple(runs)
            runs.append(run)
            if run.cut:
                break
    except OSError as error:
        failure = death(server) or _silence(error)
        return _failed(failure, bench, began, server), tuple(runs)
    measurement = measurement_of(runs, bench.goal, server, wall_s=bench.clock() - began)
    shape = model_shape(bench.model)
    load_s = sum(run.duration_s for run in runs)
    known: dict[str, object] = {
        "warmup_s": max(0.0, replays_s - load_s),
        "load_s": load_s,
        "canary_answers": answers,
        "outputs": outputs,
        "kv_bytes_per_token_predicted": None
        if shape is None
        else effective_kv_bytes(shape, trial.arguments, server.effective),
        "kv_bytes_per_token_observed": reported_kv_bytes(trial.arguments, server.effective),
    }
    if cut := runs[0].cut:
        sent = sent_requests(
            requests, bench.plan, max_model_len_tokens=server.effective.max_model_len_tokens
        )
        share = len(runs[0].records) / len(sent)
        known |= {"status": Status.CUT, "share": share, "cut": cut, "outputs": None}
    return measurement.model_copy(update=known), tuple(runs)


def outputs_of(
    run: LoadRun, requests: Sequence[Request], plan: LoadPlan, server: RunningServer
) -> OutputHealth:
    """What the answers of a replay that kept their text look like."""
    sent = sent_requests(requests, plan, max_model_len_tokens=server.effective.max_model_len_tokens)
    return health(
        ((sent[record.index], record) for record in run.records),
        block_tokens=server.effective.block_size_tokens,
    )


def death(server: RunningServer, run: LoadRun | None = None) -> Failure | None:
    """What the server died of. One that cut connections may take a moment until it is gone."""
    is_silent = run is None or not (run.records or run.cut)
    suspect = is_silent or (run is not None and any(not record.ok for record in run.records))
    until_s = time.monotonic() + (DYING_S if suspect else 0.0)
    while (failure := server.failure()) is None and time.monotonic() < until_s:
        time.sleep(0.05)
    return failure


def _silence(error: OSError) -> Failure:
    """The failure that an unanswered question is where the server itself seems fine."""
    hangs = str(error).startswith(("stalled", "timeout"))
    return Failure(
        failure=FailureClass.HANG_UNDER_LOAD if hangs else FailureClass.REQUEST_ERRORS,
        message=f"the server stopped answering: {error}",
        fix="read the server's log",
    )


def salt_of(trial: Trial, repeat: int) -> int:
    """What makes the prompts of this repeat differ from every other repeat's of the study."""
    return int(fingerprint_of([trial.seed, trial.number, trial.repeats, repeat])[:7], 16)


def request_failure(run: LoadRun) -> Failure | None:
    """The failure that a replay's request errors amount to, if they do."""
    if not run.records and not run.cut:
        return Failure(
            failure=FailureClass.HANG_UNDER_LOAD,
            message="; ".join(run.warnings) or "the server answered no request of the warm-up",
            fix="read the server's log",
        )
    failed = [record for record in run.records if not record.ok]
    if len(failed) <= TOLERATED_ERROR_SHARE * len(run.records):
        return None
    stalled = sum("stalled" in (record.error or "") for record in failed)
    kind = (
        FailureClass.HANG_UNDER_LOAD if stalled > len(failed) / 2 else FailureClass.REQUEST_ERRORS
    )
    return Failure(
        failure=kind,
        message=f"{len(failed)} of {len(run.records)} requests failed; the first: "
        f"{failed[0].error or 'no token came back'}",
        fix="read the server's log; lower the load or raise the request timeout",
    )


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
