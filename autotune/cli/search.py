"""`kvtune search`: find the least harmful configuration that meets a goal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from pathlib import Path

    from kvtune.autotune.limits import QualityRules
    from kvtune.autotune.reporting import Reporter
    from kvtune.autotune.tune import Tuning
    from kvtune.engines.base import Engine, ServerSpec
    from kvtune.profilers.measure import LoadPlan
    from kvtune.types import Decision, Device, EngineInfo, Harm, Workload

EPILOG = (
    "Example: kvtune search --model ./model --workload requests.jsonl "
    '--goal "p95 ttft <= 800ms" --goal "p95 itl <= 80ms" --quality "needle >= -5pt" --budget 12'
)


def search(
    model: Annotated[str, typer.Option("--model", help="Checkpoint directory or hub id to serve.")],
    workload: Annotated[
        str, typer.Option("--workload", help="Requests to tune for (see kvtune workload).")
    ],
    goal: options.Goals = None,
    budget: Annotated[
        int, typer.Option("--budget", min=1, help="Trials, the stock defaults included.")
    ] = 12,
    budget_time: Annotated[
        str | None, typer.Option("--budget-time", help="Time for everything, such as 15m.")
    ] = None,
    study: Annotated[
        str | None, typer.Option("--study", help="Name of the study [default: from its contents].")
    ] = None,
    workload_format: options.WorkloadFormat = None,
    limit: options.Limit = None,
    heldout_share: Annotated[
        float, typer.Option("--heldout-share", help="Share of requests kept for confirmation.")
    ] = 0.5,
    concurrency: options.Concurrency = None,
    time_scale: options.TimeScale = 1.0,
    natural_stop: options.NaturalStop = False,
    output_tokens: options.OutputTokens = 128,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Replays of the workload a trial.")
    ] = 1,
    finalists: Annotated[
        int, typer.Option("--finalists", min=1, help="Trials to confirm beside the defaults.")
    ] = 2,
    confirm_rounds: Annotated[
        int,
        typer.Option(
            "--confirm-rounds",
            min=2,
            help="Interleaved rounds of confirmation, at most; a clear outcome ends them sooner.",
        ),
    ] = 8,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Measure what decode steps cost on the defaults' server, so that trials can be "
            "forecast; once for a model, engine and device.",
        ),
    ] = True,
    probe_time: Annotated[
        str,
        typer.Option(
            "--probe-time", help="How long the probe may take; never over a tenth of --budget-time."
        ),
    ] = "20s",
    max_harm: Annotated[
        str, typer.Option("--max-harm", help="lossless or near-lossless: what may be tried.")
    ] = "near-lossless",
    explore_lossy: Annotated[
        bool,
        typer.Option("--explore-lossy", help="Try levers that may change answers from the start."),
    ] = False,
    quality: Annotated[
        list[str] | None,
        typer.Option(
            "--quality",
            help='What answers may lose at most, such as "needle >= -1pt" or "kl <= 0.02" '
            "(repeatable) [default: in each category what its suite allows].",
            show_default=False,
        ),
    ] = None,
    quality_size: Annotated[
        str,
        typer.Option(
            "--quality-size",
            help="What finalists that may change answers have to pass: screen, standard or full. "
            "At standard and full they are asked as many items as proving the limits takes; a "
            "screen, which every other such trial is asked, proves next to nothing.",
        ),
    ] = "standard",
    quality_data: Annotated[
        str | None,
        typer.Option(
            "--quality-data",
            help="Your own questions, asked as the suite yours: JSON lines, as for kvtune quality "
            "--data.",
        ),
    ] = None,
    no_quality: Annotated[
        bool,
        typer.Option(
            "--no-quality",
            help="Ask no questions: leaves a long-prompt canary and a look at the answers to the "
            "workload itself.",
        ),
    ] = False,
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
    remeasure: Annotated[
        bool,
        typer.Option(
            "--remeasure",
            help="Measure again what another study knows and what failed in this one.",
        ),
    ] = False,
    no_early_stop: options.NoEarlyStop = False,
    seed: options.Seed = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be searched, and stop.")
    ] = False,
    store: options.StoreUrl = None,
    json: options.Json = False,
) -> None:
    """Search for the configuration with the best goodput that meets the goal.

    Stock defaults are trial 0. Lossless levers come first; fp8 KV is tried when they miss the goal,
    and recommended only if its answers pass the quality suites beside the stock ones. The best
    trials and the defaults are measured again, interleaved, on held-out requests. Ctrl-C ends with
    the best so far; the same command goes on where it stopped.
    """
    import os

    from kvtune.autotune.cli.console import TerminalReporter, print_json
    from kvtune.autotune.exclusive import only_search_of
    from kvtune.autotune.limits import Budget, Rules
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
    from kvtune.errors import BadInput
    from kvtune.kernels.device import detect_device
    from kvtune.profilers.goal import parse_goal
    from kvtune.types import Harm

    if max_harm not in (Harm.LOSSLESS, Harm.NEAR_LOSSLESS):
        raise BadInput(f"--max-harm {max_harm!r} is not known", fix="use lossless or near-lossless")
    check_model(model)
    model = options.resolved_model(model)
    wanted = parse_goal(goal or [])
    base = options.base_arguments(engine_args, kv_memory)
    refuse_secrets_in_command(engine_command or "")
    requests = options.read_workload(
        workload, format=workload_format, limit=limit, heldout_share=heldout_share, seed=seed
    )
    context_tokens = _context_tokens(base, model)
    asked = _quality_rules(
        quality or [],
        quality_size,
        quality_data,
        requests,
        context_tokens,
        no_quality=no_quality,
    )
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
    time_s = options.parse_duration(budget_time) if budget_time else None
    device = detect_device()
    reporter = TerminalReporter()
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
        if dry_run:
            _print_space(info, device, model, base, requests, plan, Harm(max_harm))
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
        )
        if asked is None and max_harm != Harm.LOSSLESS:
            reporter.note(
                "no questions of quality are asked (--no-quality): only a long-prompt canary and "
                "the answers to the workload itself are looked at"
            )
        log_dir = options.log_directory(history, row.name)
        with only_search_of(row.name, log_dir), reporter.live():
            tuning = Tuning(
                study=row,
                store=history,
                bench=Bench(
                    engine=runner,
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
                    max_harm=Harm(max_harm),
                    explore_lossy=explore_lossy,
                    seed=seed,
                    remeasure=remeasure,
                    quality=asked,
                    early_stop=not no_early_stop,
                ),
            )
            decision = tuning.run()
        if json:
            print_json(decision.model_dump_json())
        else:
            _print_decision(tuning, decision)
        raise typer.Exit(_exit_code(tuning, decision))


def _quality_rules(
    texts: list[str],
    size_name: str,
    data: str | None,
    workload: Workload,
    context_tokens: int | None,
    *,
    no_quality: bool,
) -> QualityRules | None:
    """What answers may lose; `None` if nothing is to be asked.

    Raises:
        BadGoal: a limit that cannot be read, or that nothing could be held against.
        BadInput: there is no such size, or a line of the data cannot be used.
        NotFound: there is no such file.
    """
    from kvtune.autotune.cli.quality_subjects import read_size
    from kvtune.autotune.limits import QualityRules
    from kvtune.autotune.quality.sizing import read_limits
    from kvtune.errors import BadInput

    size = read_size(size_name)
    limits = read_limits(texts, size, workload, context_tokens, data)
    if no_quality and (limits or data is not None):
        raise BadInput(
            "--no-quality asks nothing that --quality could be held against, and no data",
            fix="leave one of them out",
        )
    return None if no_quality else QualityRules(limits, size, data)


def _context_tokens(base: options.Arguments, model: str) -> int | None:
    """The context as far as it is known before a server has told it."""
    from kvtune.policies.checkpoint import model_shape
    from kvtune.policies.settings import read_count

    asked = read_count(base.get("max-model-len"))
    shape = None if asked else model_shape(model)
    return asked if shape is None else shape.max_tokens


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


def _print_space(
    info: EngineInfo,
    device: Device,
    model: str,
    base: options.Arguments,
    workload: Workload,
    plan: LoadPlan,
    max_harm: Harm,
) -> None:
    """What would be searched, as far as it is known before anything is measured."""
    from kvtune.autotune.cli.console import stdout
    from kvtune.autotune.space import build_space, dry_run_text
    from kvtune.kernels.device import detect_detail
    from kvtune.policies.base import Context
    from kvtune.policies.checkpoint import model_shape

    situation = Context(
        engine=info,
        device=device,
        detail=detect_detail(),
        model=model_shape(model),
        base_arguments=base,
        fingerprint=workload.fingerprint,
        max_concurrency=plan.concurrency,
    )
    text = dry_run_text(build_space(situation, harm=max_harm))
    stdout.print(text, markup=False, soft_wrap=True)


def _print_decision(tuning: Tuning, decision: Decision) -> None:
    from kvtune.autotune.cli.console import stdout
    from kvtune.autotune.cli.results import print_decision
    from kvtune.policies.stack import describe

    study, number = tuning.study, decision.recommended
    settings = "" if number is None else describe(tuning.store.trial(study, number).trial.stack)
    print_decision(decision, settings, study=study.name, objective=study.goal.objective)
    command = "show" if number is None else "emit --format vllm-yaml -o DIRECTORY --study"
    stdout.print(f"\nNext: kvtune {command} {study.name}", markup=False, soft_wrap=True)


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
