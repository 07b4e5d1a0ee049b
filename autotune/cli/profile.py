"""`kvtune profile`: name what holds a workload back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtune.autotune.cli.console import TerminalReporter
    from kvtune.engines.base import Engine
    from kvtune.profilers.measure import LoadPlan
    from kvtune.profilers.probe import ProbeResult
    from kvtune.store.database import Store
    from kvtune.types import (
        Ceilings,
        Device,
        EffectiveConfig,
        Endpoint,
        EngineInfo,
        Failure,
        Forecast,
        Goal,
        LoadRun,
        Profile,
        Workload,
    )

EPILOG = (
    "Examples:\n\n- kvtune profile --url http://localhost:8000 --duration 60s\n\n"
    "- kvtune profile --model ./model --workload requests.jsonl --concurrency 12\n\n"
    "- kvtune profile --url http://localhost:8000 --probe --probe-time 20s"
)


@dataclass(frozen=True, slots=True)
class _Load:
    """The workload to send and how to send it."""

    workload: Workload
    plan: LoadPlan


@dataclass(frozen=True, slots=True)
class _Known:
    """What the user says of a server that runs already: its checkpoint and its arguments."""

    model: str | None
    arguments: options.Arguments | None


def profile(
    url: Annotated[
        str | None, typer.Option("--url", help="A running server to attach to; never disturbed.")
    ] = None,
    model: options.Model = None,
    workload: options.WorkloadFile = None,
    duration: Annotated[
        str, typer.Option("--duration", help="How long to watch without a workload.")
    ] = "30s",
    probe: Annotated[
        bool | None,
        typer.Option(
            "--probe/--no-probe",
            help="Measure what decode steps cost with small batches on the idle server, afterwards "
            "[default: on for a server that kvtune starts, off with --url].",
            show_default=False,
        ),
    ] = None,
    probe_time: Annotated[
        str, typer.Option("--probe-time", help="How long the probe may take.")
    ] = "30s",
    goal: options.Goals = None,
    workload_format: options.WorkloadFormat = None,
    limit: options.Limit = None,
    concurrency: options.Concurrency = None,
    time_scale: options.TimeScale = 1.0,
    natural_stop: options.NaturalStop = False,
    output_tokens: options.OutputTokens = 128,
    kv_memory: options.KvMemory = None,
    engine_args: options.EngineArgs = "",
    served_model_name: options.ServedModelName = None,
    engine: options.EngineName = "vllm",
    engine_python: options.EnginePython = None,
    engine_command: options.EngineCommand = None,
    cold_start: options.ColdStart = False,
    start_timeout: options.StartTimeout = 300.0,
    request_timeout: options.RequestTimeout = 300.0,
    stall_timeout: options.StallTimeout = 120.0,
    store: options.StoreUrl = None,
    json: options.Json = False,
) -> None:
    """Say what a workload is bound by, with the evidence.

    With --url kvtune attaches to a running server: without a workload it only reads its counters,
    with one it sends that load; --probe adds a few small batches of its own, if nobody else uses
    the server. --model then names the server's checkpoint on this disk, whose
    sizes tell KV reads from weight reads; --engine-args may say how that server was started. With
    --model alone kvtune starts a server, replays the workload and stops it.
    """
    from kvtune.autotune.cli.console import TerminalReporter, print_json
    from kvtune.autotune.cli.forecasts import print_forecasts
    from kvtune.autotune.cli.results import print_profile
    from kvtune.autotune.cli.step_time import print_step_time
    from kvtune.autotune.trial import check_model
    from kvtune.errors import BadInput
    from kvtune.profilers.goal import parse_goal

    if url is None and model is None:
        raise BadInput(
            "profile needs a server: --url of a running one, or --model to start one",
            fix="kvtune profile --url http://localhost:8000, or --model PATH --workload FILE",
        )
    if model is not None:
        check_model(model)
        model = options.resolved_model(model)
    arguments = options.base_arguments(engine_args, kv_memory)
    wanted = parse_goal(goal or [])
    watch_s = options.parse_duration(duration)
    probe_limit_s = options.parse_duration(probe_time)
    load = None
    if workload is not None:
        requests = options.read_workload(workload, format=workload_format, limit=limit)
        plan = options.make_plan(
            requests,
            model=model,
            concurrency=concurrency,
            time_scale=time_scale,
            natural_stop=natural_stop,
            output_tokens=output_tokens,
            request_timeout_s=request_timeout,
            stall_timeout_s=stall_timeout,
        )
        load = _Load(requests, plan)
    reporter = TerminalReporter()
    with options.open_history(store) as history:
        with reporter.live():
            if url is not None:
                known = _Known(model, arguments or None)
                probe_s = probe_limit_s if probe else None
                result, run = _attached(url, known, load, watch_s, probe_s, wanted, reporter)
            elif load is None:
                raise BadInput(
                    "a server that kvtune starts gets no traffic of its own",
                    fix="name the requests to replay: --workload FILE",
                )
            else:
                runner = options.make_engine(
                    engine, python=engine_python, command=engine_command, cold_start=cold_start
                )
                with runner:
                    if engine_args:
                        options.check_arguments(runner, arguments, str(model))
                    result, run = _launched(
                        runner,
                        str(model),
                        served_model_name,
                        arguments,
                        start_timeout,
                        options.log_directory(history, "profile"),
                        load,
                        probe_limit_s if probe is not False else None,
                        wanted,
                        history,
                        reporter,
                    )
            told = _told(result, run, load, wanted, model, arguments, history, reporter)
        history.save_profile(result)
    if json:
        print_json(result.model_copy(update={"forecasts": told}).model_dump_json())
    else:
        print_profile(result)
        print_step_time(result.step_time)
        print_forecasts(told)


def _attached(
    url: str,
    known: _Known,
    load: _Load | None,
    watch_s: float,
    probe_s: float | None,
    goal: Goal,
    reporter: TerminalReporter,
) -> tuple[Profile, LoadRun]:
    from kvtune.autotune.profiling import Subject, profile_of, watch
    from kvtune.autotune.trial import request_failure
    from kvtune.engines.vllm.attach import attach
    from kvtune.errors import EngineError
    from kvtune.profilers.load import runtime

    reporter.phase(f"Attaching to {url}")
    endpoint, effective = attach(url)
    if known.model is not None and known.arguments is None:
        reporter.note(
            "the weights are taken to be on one device; if they are not, say so with "
            '--engine-args "--tensor-parallel-size N"'
        )
    if load is None:
        reporter.note(f"watching {endpoint.model} for {watch_s:g} s; nothing is sent")
        run = runtime.run(watch(endpoint, watch_s, on_second=reporter.watched))
    else:
        run = _replayed(endpoint, effective, load, reporter)
        if (failure := request_failure(run)) is not None:
            raise EngineError(failure.failure, failure.message, failure.fix)
    probed = None
    if probe_s is not None:
        probed = _probed(endpoint, effective, probe_s, known.model, reporter, is_ours=False)
    subject = Subject(
        model=known.model,
        served_name=endpoint.model,
        arguments=known.arguments,
        endpoint_url=endpoint.url,
        effective=effective,
        fingerprint=None if load is None else load.workload.fingerprint,
    )
    return profile_of(subject, run, goal, is_load_ours=False, probed=probed), run


def _launched(
    runner: Engine,
    model: str,
    served_model_name: str | None,
    arguments: options.Arguments,
    start_timeout_s: float,
    log_directory: Path,
    load: _Load,
    probe_s: float | None,
    goal: Goal,
    history: Store,
    reporter: TerminalReporter,
) -> tuple[Profile, LoadRun]:
    from kvtune.autotune.profiling import Subject, profile_of
    from kvtune.autotune.trial import death, request_failure
    from kvtune.engines.base import ServerSpec
    from kvtune.errors import EngineError
    from kvtune.kernels.device import detect_device

    info, device = runner.describe(), detect_device()
    ceilings = _ceilings(info, device, history, reporter)
    reporter.phase(f"Starting {info.name} {info.version} with {model}")
    server = runner.launch(
        ServerSpec(model=model, served_model_name=served_model_name, arguments=arguments),
        log_path=log_directory / "server.log",
        start_timeout_s=start_timeout_s,
        on_log=reporter.server_log,
    )
    with server:
        reporter.ready(server.start_s)
        run = _replayed(
            server.endpoint, server.effective, load, reporter, should_stop=server.failure
        )
        failure = death(server, run) or request_failure(run)
        probed = None
        if failure is None and probe_s is not None:
            probed = _probed(
                server.endpoint,
                server.effective,
                probe_s,
                model,
                reporter,
                is_ours=True,
                should_stop=server.failure,
            )
    if failure is not None:
        raise EngineError(failure.failure, failure.message, failure.fix, failure.log_excerpt)
    subject = Subject(
        model=model,
        served_name=server.endpoint.model,
        arguments=arguments,
        endpoint_url=server.endpoint.url,
        effective=server.effective,
        engine=info,
        device=device,
        fingerprint=load.workload.fingerprint,
    )
    profiled = profile_of(subject, run, goal, is_load_ours=True, ceilings=ceilings, probed=probed)
    return profiled, run


def _told(
    profile: Profile,
    run: LoadRun,
    load: _Load | None,
    goal: Goal,
    model: str | None,
    arguments: options.Arguments,
    history: Store,
    reporter: TerminalReporter,
) -> tuple[Forecast, ...]:
    """What each lever would change; kept until a search measures it."""
    from kvtune.autotune.forecast.tell import forecasts_of

    if load is None:
        return ()
    reporter.note("forecasting what each lever would change")
    requests, plan = load.workload.requests, load.plan
    told = forecasts_of(profile, run, requests, plan, goal, model=model, arguments=arguments)
    if told.missing:
        reporter.note(f"nothing is forecast: {told.missing}")
    history.save_forecasts(told.subject, told.forecasts)
    return told.forecasts


def _ceilings(
    engine: EngineInfo, device: Device, history: Store, reporter: TerminalReporter
) -> Ceilings | None:
    """What the device reaches: from the history, or measured now and kept there."""
    from kvtune.errors import KvtuneError
    from kvtune.kernels.ceilings import measure_ceilings

    if engine.platform == "simulated":
        return None
    if (known := history.ceilings(device.key)) is not None:
        return known
    reporter.note("measuring the memory bandwidth and matrix rate of this device, once")
    try:
        measured = measure_ceilings(device)
    except KvtuneError as error:
        reporter.note(f"the ceilings of this device are not known: {error.message}; {error.fix}")
        return None
    history.save_ceilings(measured)
    return measured


def _probed(
    endpoint: Endpoint,
    effective: EffectiveConfig | None,
    probe_s: float,
    model: str | None,
    reporter: TerminalReporter,
    *,
    is_ours: bool,
    should_stop: Callable[[], Failure | None] | None = None,
) -> ProbeResult:
    from kvtune.policies.checkpoint import vocab_size
    from kvtune.profilers.load import runtime
    from kvtune.profilers.measure import UNKNOWN_VOCAB_SIZE
    from kvtune.profilers.probe import probe
    from kvtune.profilers.probe_plan import plan_probe

    plan = plan_probe(effective, budget_s=probe_s)
    if not plan.problem:
        reporter.note(f"probing decode steps: {plan.cost()}; Ctrl-C ends the probe only")
    known = None if model is None else vocab_size(model)
    return runtime.run(
        probe(
            endpoint,
            effective,
            budget_s=probe_s,
            salt=options.fresh_salt(),
            vocab_size=known or UNKNOWN_VOCAB_SIZE,
            resets_cache=is_ours,
            on_progress=reporter.load,
            should_stop=should_stop,
        )
    )


def _replayed(
    endpoint: Endpoint,
    effective: EffectiveConfig | None,
    load: _Load,
    reporter: TerminalReporter,
    *,
    should_stop: Callable[[], Failure | None] | None = None,
) -> LoadRun:
    from kvtune.profilers.load import runtime
    from kvtune.profilers.measure import replay_workload

    reporter.note(f"replaying {len(load.workload.requests)} requests of {load.workload.name}")
    return runtime.run(
        replay_workload(
            endpoint,
            load.workload.requests,
            load.plan,
            salt=options.fresh_salt(),
            max_model_len_tokens=None if effective is None else effective.max_model_len_tokens,
            on_progress=reporter.load,
            should_stop=should_stop,
        )
    )


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(profile)
