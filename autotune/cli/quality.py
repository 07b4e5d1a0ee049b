"""`kvtune quality`: what a configuration does to answers, beside a baseline's."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtune.autotune.cli import options

FAILED = 1
UNCLEAR = 4

EPILOG = (
    "Exit codes: 0 pass, 1 fail, 4 unclear (not enough evidence), 2 bad input, "
    "3 engine failure.\n\n"
    "Examples:\n\n"
    '- kvtune quality --model ./model --candidate "--kv-cache-dtype fp8" --size screen\n\n'
    "- kvtune quality --url-baseline http://a:8000 --url-candidate http://b:8000 "
    '--limit "needle >= -1pt"\n\n'
    '- kvtune quality --model ./model --reference --candidate "snapkv:budget_tokens=512"'
)


def quality(
    candidate: Annotated[
        str,
        typer.Option(
            "--candidate",
            help="Arguments of the server to judge, or with --reference a stack of methods.",
        ),
    ] = "",
    baseline: Annotated[
        str,
        typer.Option(
            "--baseline",
            help="Arguments (or stack) to compare with [default: stock, the full cache].",
            show_default=False,
        ),
    ] = "",
    model: options.Model = None,
    url_candidate: Annotated[
        str | None, typer.Option("--url-candidate", help="A running server to judge.")
    ] = None,
    url_baseline: Annotated[
        str | None, typer.Option("--url-baseline", help="A running server to compare with.")
    ] = None,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference", help="Ask the reference engine (PyTorch) instead of servers; slow."
        ),
    ] = False,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite",
            help="A suite to ask (repeatable) [default: all, or at sizes beyond screen those that "
            "limits are about].",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            "--size",
            help="screen (seconds), standard (minutes) or full. Beside --limit, standard and full "
            "ask as many items as it takes to prove the limits. Without, standard has 12 to 30 "
            "items a category: they can prove that not 8 to 18 points were lost, not that 5 were "
            "not.",
        ),
    ] = "standard",
    items: Annotated[
        int | None,
        typer.Option(
            "--items",
            min=1,
            help="Items of each category [default: by size, or as many as the limits need].",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            help='What counts, and what may be lost at most, such as "needle >= -1pt" or '
            '"kl <= 0.02" (repeatable) [default: every category, by its suite\'s own margin].',
            show_default=False,
        ),
    ] = None,
    workload: options.WorkloadFile = None,
    workload_format: options.WorkloadFormat = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="Your own questions for the suite yours: JSON lines."),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Restart the baseline before it is asked again, so that restarts count as noise; "
            "always done at size full.",
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ask again what was answered before.")
    ] = False,
    seed: options.Seed = 0,
    kv_memory: options.KvMemory = None,
    engine_args: options.EngineArgs = "",
    served_model_name: options.ServedModelName = None,
    engine: options.EngineName = "vllm",
    engine_python: options.EnginePython = None,
    engine_command: options.EngineCommand = None,
    cold_start: options.ColdStart = False,
    api_key: options.ApiKey = None,
    ca_cert: options.CaCert = None,
    start_timeout: options.StartTimeout = 300.0,
    request_timeout: options.RequestTimeout = 300.0,
    store: options.StoreUrl = None,
    html: options.Html = None,
    json: options.Json = False,
) -> None:
    """Judge whether a configuration answers as well as a baseline, and say where it does not.

    Both are asked the same items, the baseline twice, so that what it differs from itself is known.
    Each category of each suite passes, fails, or is unclear where the items cannot tell; the worst
    decides. --baseline and --candidate come on top of --engine-args, and nothing that the server
    accepts is refused: also KV formats that kvtune never tries by itself. The baseline's answers
    are kept, and so is what was answered before Ctrl-C.
    """
    import math
    from contextlib import ExitStack

    from kvtune.autotune.cli.console import TerminalReporter, print_json
    from kvtune.autotune.cli.quality_subjects import (
        Servers,
        chosen_suites,
        read_size,
        stack_subject,
        workload_prompts,
    )
    from kvtune.autotune.cli.quality_table import print_report
    from kvtune.autotune.quality.answers import fitting
    from kvtune.autotune.quality.prices import ITEM_S
    from kvtune.autotune.quality.run import QualityRun
    from kvtune.autotune.quality.sizing import questions_for
    from kvtune.autotune.quality.subjects import ReferenceModel
    from kvtune.autotune.trial import check_model
    from kvtune.errors import BadInput
    from kvtune.profilers.quality.limits import parse_limits
    from kvtune.profilers.quality.suite import Size, SuitePlan

    limits = parse_limits(limit or [])
    plan = SuitePlan(
        size=read_size(size),
        seed=seed,
        per_category=items,
        workload=workload_prompts(workload, workload_format),
        data=data,
        protects=reference,
    )
    is_full = plan.size is Size.FULL
    chosen = chosen_suites(suite or [], has_data=data is not None)
    if model is not None:
        check_model(model)
        model = options.resolved_model(model)
    elif reference:
        raise BadInput("the reference engine needs a checkpoint", fix="name it: --model PATH")
    if reference and (url_baseline or url_candidate):
        raise BadInput(
            "--reference asks no server", fix="leave out --url-baseline, --url-candidate"
        )
    reporter = TerminalReporter()
    with ExitStack() as open_things:
        history = open_things.enter_context(options.open_history(store))
        if reference:
            checkpoint = ReferenceModel(str(model))
            theirs, ours = (stack_subject(checkpoint, words) for words in (baseline, candidate))
        else:
            runner = None
            if model is not None:
                runner = options.make_engine(
                    engine, python=engine_python, command=engine_command, cold_start=cold_start
                )
                open_things.enter_context(runner)
            servers = Servers(
                runner,
                str(model),
                served_model_name,
                options.base_arguments(engine_args, kv_memory),
                options.log_directory(history, "quality"),
                start_timeout,
                request_timeout,
                api_key,
                ca_cert,
            )
            theirs = servers.subject("baseline", baseline, url_baseline)
            ours = servers.subject("candidate", candidate, url_candidate)
        # What fits their context decides how many items there are, and whether they are enough.
        plan = fitting(plan, theirs, ours)
        questions = questions_for(chosen, plan, limits, keep=bool(suite))
        if limits:
            minutes = math.ceil(3 * questions.count * ITEM_S / 60)
            slow = "" if reference else f": some {minutes} min where a server answers two a second"
            reporter.note(
                f"{questions.count} items are asked of the candidate, and twice of the "
                f"baseline{slow}"
            )
        for doubt in questions.doubts:
            reporter.note(doubt)
        run = QualityRun(questions, history, reporter, restarts=restart or is_full, reuse=not fresh)
        open_things.enter_context(reporter.live())
        try:
            report = run.compare(str(model or url_candidate), theirs, ours)
        except KeyboardInterrupt:
            reporter.note("answers so far are kept; the same command goes on from there")
            raise
    if html is not None:
        from kvtune.autotune.report.page import write_page
        from kvtune.autotune.report.quality_page import quality_page

        write_page(quality_page(report), html)
        reporter.note(f"wrote {html}")
    if json:
        print_json(report.model_dump_json())
    else:
        print_report(report)
    if report.outcome != "pass":
        raise typer.Exit(FAILED if report.outcome == "fail" else UNCLEAR)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(quality)
