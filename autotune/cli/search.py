"""`kvtune search`: find the least harmful configuration that meets a goal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvtune.autotune.cli import options, search_options

if TYPE_CHECKING:
    from pathlib import Path

    from kvtune.autotune.reporting import Reporter
    from kvtune.autotune.tune import Tuning
    from kvtune.engines.base import Engine, ServerSpec
    from kvtune.types import Decision, EngineInfo

EPILOG = (
    "Example: kvtune search --model ./model --workload requests.jsonl "
    '--goal "p95 ttft <= 800ms" --goal "p95 itl <= 80ms" --quality "needle >= -5pt" --budget 12'
)


def search(
    model: search_options.Model,
    workload: search_options.Workload,
    goal: options.Goals = None,
    budget: search_options.Budget = 12,
    budget_time: search_options.BudgetTime = None,
    study: search_options.Study = None,
    workload_format: options.WorkloadFormat = None,
    limit: options.Limit = None,
    heldout_share: search_options.HeldoutShare = 0.5,
    concurrency: options.Concurrency = None,
    time_scale: options.TimeScale = 1.0,
    load_at: search_options.LoadAt = "fixed",
    natural_stop: options.NaturalStop = False,
    output_tokens: options.OutputTokens = 128,
    repeats: search_options.Repeats = 1,
    finalists: search_options.Finalists = 2,
    confirm_rounds: search_options.ConfirmRounds = 8,
    probe: search_options.Probe = True,
    probe_time: search_options.ProbeTime = "20s",
    max_harm: search_options.MaxHarm = "near-lossless",
    max_host_memory: search_options.MaxHostMemory = None,
    explore_lossy: search_options.ExploreLossy = False,
    sampler: search_options.SamplerName = "auto",
    also: search_options.AlsoWanted = None,
    quality: search_options.Quality = None,
    quality_size: search_options.QualitySize = "standard",
    quality_data: search_options.QualityData = None,
    no_quality: search_options.NoQuality = False,
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
    remeasure: search_options.Remeasure = False,
    no_reuse: search_options.NoReuse = False,
    no_early_stop: options.NoEarlyStop = False,
    enough: search_options.Enough = None,
    seed: options.Seed = 0,
    dry_run: search_options.DryRun = False,
    price_per_hour: search_options.PricePerHour = None,
    plain: search_options.Plain = False,
    store: options.StoreUrl = None,
    json: options.Json = False,
) -> None:
    """Search for the configuration with the best goodput that meets the goal.

    Stock defaults are trial 0. Lossless levers come first; 8-bit KV is tried when they miss the
    goal, and recommended only if its answers pass the quality suites beside the stock ones. The
    best trials and the defaults are measured again, interleaved, on held-out requests. Ctrl-C ends
    with the best so far; the same command goes on where it stopped.
    """
    import os

    from kvtune.autotune.cli import results
    from kvtune.autotune.cli.console import print_json
    from kvtune.autotune.cli.live import search_reporter
    from kvtune.autotune.exclusive import only_search_of
    from kvtune.autotune.limits import Also, Budget, Rules
    from kvtune.autotune.reuse import ServerPool
    from kvtune.autotune.study import open_study
    from kvtune.autotune.trial import Bench, check_model
    from kvtune.autotune.tune import Tuning
    from kvtune.engines.base import ServerSpec
    from kvtune.engines.vllm.environment import (
        deployable_environment,
        measured_environment,
        refuse_overrides,
    )
    from kvtune.engines.vllm.secret_names import refuse_secrets_in_command
    from kvtune.kernels.device import detect_device
    from kvtune.profilers.goal import parse_goal
    from kvtune.types import Harm

    harm = search_options.read_harm(max_harm)
    host_bytes = search_options.read_host_memory(max_host_memory)
    may_lack = search_options.read_enough(enough)
    proposing = search_options.read_sampler(sampler)
    check_model(model)
    model = options.resolved_model(model)
    wanted = parse_goal(goal or [])
    base = options.base_arguments(engine_args, kv_memory)
    refuse_secrets_in_command(engine_command or "")
    requests = options.read_workload(
        workload, format=workload_format, limit=limit, heldout_share=heldout_share, seed=seed
    )
    context_tokens = search_options.context_tokens(base, model)
    asked = search_options.quality_rules(
        quality or [],
        quality_size,
        quality_data,
        requests,
        context_tokens,
        no_quality=no_quality,
    )
    beside = search_options.read_also(also or [], harm, asks_quality=asked is not None)
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
    plan = search_options.load_at(load_at, plan, requests, wanted)
    time_s = options.parse_duration(budget_time) if budget_time else None
    device = detect_device()
    reporter = search_reporter(plain=plain or json, price_per_hour=price_per_hour, goal=wanted)
    with (
        options.open_history(store) as history,
        options.make_engine(
            engine, python=engine_python, command=engine_command, cold_start=cold_start
        ) as runner,
    ):
        options.check_arguments(runner, base, model)
        refuse_overrides(base, {}, platform=runner.describe().platform)
        info = _described(
            runner,
            ServerSpec(model, served_model_name, base),
            log_path=options.log_directory(history, "probe") / "probe.log",
            start_timeout_s=start_timeout,
            reporter=reporter,
        )
        space = results.space_of(info, device, model, base, requests, plan, harm, host_bytes, asked)
        search_options.refuse_same_memory(beside, space, base)
        if dry_run:
            results.print_space(space)
            return
        measured = measured_environment(os.environ, platform=info.platform)
        # What reaches a server behind a command is for the command to say.
        environment = {} if engine_command else deployable_environment(measured)
        row = open_study(
            history,
            name=study,
            model=model,
            served_model_name=served_model_name,
            engine=info,
            device=device,
            workload=requests,
            plan=plan,
            goal=wanted,
            base_arguments=base,
            environment=environment,
            repeats=repeats,
            seed=seed,
            server={"command": engine_command, "environment": dict(measured)},
            quality=None if asked is None else asked.settings(),
            max_host_bytes=host_bytes,
        )
        if asked is None and harm is not Harm.LOSSLESS:
            reporter.note(
                "no questions of quality are asked (--no-quality): only a long-prompt canary and "
                "the answers to the workload itself are looked at"
            )
        log_dir = options.log_directory(history, row.name)
        with (
            only_search_of(row.name, log_dir),
            reporter.live(),
            ServerPool(runner, reuse=not no_reuse) as servers,
        ):
            tuning = Tuning(
                study=row,
                store=history,
                bench=Bench(
                    engine=servers,
                    model=model,
                    served_model_name=served_model_name,
                    environment=environment,
                    plan=plan,
                    goal=wanted,
                    log_dir=log_dir,
                    reporter=reporter,
                    start_timeout_s=start_timeout,
                ),
                workload=requests,
                device=device,
                budget=Budget(
                    trials=budget,
                    time_s=time_s,
                    finalists=finalists,
                    confirm_rounds=confirm_rounds,
                    repeats=repeats,
                    probe_s=options.parse_duration(probe_time) if probe else 0.0,
                ),
                rules=Rules(
                    max_harm=harm,
                    explore_lossy=explore_lossy or Also.QUALITY in beside,
                    seed=seed,
                    remeasure=remeasure,
                    quality=asked,
                    early_stop=not no_early_stop,
                    sampler=proposing,
                    also=beside,
                    max_host_bytes=host_bytes,
                    enough=may_lack,
                ),
            )
            decision = tuning.run()
        if json:
            print_json(decision.model_dump_json())
        else:
            results.print_outcome(tuning, decision)
        raise typer.Exit(_exit_code(tuning, decision))


def _described(
    runner: Engine, spec: ServerSpec, *, log_path: Path, start_timeout_s: float, reporter: Reporter
) -> EngineInfo:
    """Which engine this is; behind a command only a server can tell, so one is started for it."""
    info = runner.describe()
    if info.version != "unknown":
        return info
    reporter.phase("Starting one server to learn which vLLM the command starts")
    runner.launch(
        spec, log_path=log_path, start_timeout_s=start_timeout_s, on_log=reporter.server_log
    ).stop()
    return runner.describe()


def _exit_code(tuning: Tuning, decision: Decision) -> int:
    from kvtune.autotune.cli.app import INTERRUPTED
    from kvtune.types import Outcome

    if tuning.interrupted:
        return INTERRUPTED
    if decision.outcome is Outcome.NOTHING_MEASURED:
        return 3
    return 0 if decision.outcome in (Outcome.WINNER, Outcome.KEEP_BASELINE) else 1


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(search)
