"""`kvtune profile`: name what holds a workload back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from kvtune.autotune.cli.profile_run import Load, Profiled
    from kvtune.types import Forecast

EPILOG = (
    "Examples:\n\n- kvtune profile --url http://localhost:8000 --duration 60s\n\n"
    "- kvtune profile --model ./model --workload requests.jsonl --concurrency 12\n\n"
    "- kvtune profile --url http://localhost:8000 --probe --probe-time 20s"
)


def profile(
    url: Annotated[
        str | None,
        typer.Option("--url", help="A running server to attach to; it is sent nothing unasked."),
    ] = None,
    api_key: options.ApiKey = None,
    ca_cert: options.CaCert = None,
    metrics_url: options.MetricsUrl = None,
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
    stack: Annotated[
        list[str] | None,
        typer.Option(
            "--stack",
            help="Also forecast this stack (repeatable), as `kvtune plan` takes it, such as "
            '"snapkv:budget_tokens=512 + kivi:bits=4".',
            show_default=False,
        ),
    ] = None,
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
    html: options.Html = None,
    json: options.Json = False,
) -> None:
    """Say what a workload is bound by, with the evidence.

    With --url kvtune attaches to a running server: without a workload it only reads its counters,
    with one it sends that load; --probe adds a few small batches of its own, if nobody else uses
    the server. --model then names the server's checkpoint on this disk, whose
    sizes tell KV reads from weight reads; --engine-args may say how that server was started. With
    --model alone kvtune starts a server, replays the workload and stops it. A server that goes
    away meanwhile gets a profile of what was seen until then, and the exit code is 3. What each
    lever would change is forecast for a workload; without one, only what fits.
    """
    from kvtune.address import read_address
    from kvtune.autotune.cli.console import TerminalReporter
    from kvtune.autotune.cli.profile_run import Known, Load, attached, launched, told_of
    from kvtune.autotune.report.page import check_path
    from kvtune.autotune.trial import check_model
    from kvtune.errors import BadInput, EngineError
    from kvtune.policies.method_stack import parse_stack
    from kvtune.profilers.goal import parse_goal

    if url is None and model is None:
        raise BadInput(
            "profile needs a server: --url of a running one, or --model to start one",
            fix="kvtune profile --url http://localhost:8000, or --model PATH --workload FILE",
        )
    if html is not None:
        check_path(html)
    for name, given in (("--metrics-url", metrics_url), ("--ca-cert", ca_cert)):
        if url is None and given is not None:
            raise BadInput(
                f"{name} is about a running server, and none is named",
                fix="name it with --url, or leave the option out",
            )
    address = None
    if url is not None:
        address = read_address(url, api_key=api_key, ca_cert=ca_cert, metrics_url=metrics_url)
    if model is not None:
        check_model(model)
        model = options.resolved_model(model)
    arguments = options.base_arguments(engine_args, kv_memory)
    wanted = parse_goal(goal or [])
    stacks = {str(one): one for one in map(parse_stack, stack or [])}
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
        load = Load(requests, plan)
    reporter = TerminalReporter()
    with options.open_history(store) as history, reporter.live():
        if address is not None:
            known = Known(model, arguments or None)
            probe_s = probe_limit_s if probe else None
            profiled = attached(address, known, load, watch_s, probe_s, wanted, history, reporter)
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
                profiled = launched(
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
        # Before the forecasts: what was measured is not lost if they are interrupted.
        history.save_profile(profiled.profile)
        told = told_of(
            profiled.profile,
            profiled.run,
            load,
            wanted,
            model,
            arguments,
            tuple(stacks.values()),
            history,
            reporter,
        )
    _show(profiled, load, told, stacks, html, json=json)
    if profiled.run.lost:
        raise typer.Exit(EngineError.exit_code)


def _show(
    profiled: Profiled,
    load: Load | None,
    told: tuple[Forecast, ...],
    asked: Collection[str],
    html: Path | None,
    *,
    json: bool,
) -> None:
    """Print the profile, and write its page."""
    from kvtune.autotune.cli.console import print_json
    from kvtune.autotune.cli.forecasts import print_forecasts
    from kvtune.autotune.cli.profile_run import view_of
    from kvtune.autotune.cli.results import print_profile
    from kvtune.autotune.cli.step_time import print_step_time
    from kvtune.autotune.cli.workload_view import print_profile_view
    from kvtune.autotune.report.page import write_page
    from kvtune.autotune.report.profile_page import profile_page

    result, view = profiled.profile, view_of(profiled, load, told)
    if json:
        print_json(result.model_copy(update={"forecasts": told}).model_dump_json())
    else:
        print_profile(result)
        print_step_time(result.step_time)
        print_profile_view(view)
        print_forecasts(told, asked)
    if html is not None:
        write_page(profile_page(view), html)
        sys.stderr.write(f"wrote {html}\n")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(profile)
