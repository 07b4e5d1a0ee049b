"""`kvtune history`: what was measured before, and moving it between stores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtune.autotune.cli import options

app = typer.Typer(
    name="history",
    help="List what was measured before; export and import it as JSON lines.",
    epilog="Examples:\n\n- kvtune history\n\n- kvtune history forecasts\n\n"
    "- kvtune history quality\n\n"
    "- kvtune history export -o all.jsonl\n\n- kvtune history import all.jsonl",
    invoke_without_command=True,
)


@app.callback(invoke_without_command=True)
def studies(
    context: typer.Context, store: options.StoreUrl = None, json: options.Json = False
) -> None:
    """List the studies, the newest first."""
    if context.invoked_subcommand is not None:
        context.obj = store
        return
    from rich.markup import escape

    from kvtune.autotune.cli.console import print_json, stdout
    from kvtune.autotune.words import amount
    from kvtune.profilers.goal import goal_text
    from kvtune.profilers.metrics.base import metric_of

    with options.open_history(store) as history:
        rows = history.studies()
    if json:
        print_json("[" + ",".join(row.model_dump_json() for row in rows) + "]")
        return
    if not rows:
        stdout.print("No studies yet. Begin with: kvtune search --model PATH --workload FILE")
        return
    longest = max(len(row.name) for row in rows)
    for row in rows:
        counts = ", ".join(f"{count} {status}" for status, count in row.trials.items())
        parts = [row.created_at[:16].replace("T", " "), f"trials: {counts or 'none'}"]
        if row.best_objective is not None:
            unit = metric_of(row.objective_metric).unit
            parts.append(f"best {amount(row.best_objective, unit)}")
        if row.outcome is not None:
            which = "" if row.recommended is None else f": trial {row.recommended}"
            parts.append(row.outcome.replace("-", " ") + which)
        name = f"[bold]{escape(row.name)}[/bold]" + " " * (longest - len(row.name))
        stdout.print(f"{name}  {'; '.join(parts)}", soft_wrap=True)
        stdout.print(f"    [dim]{escape(goal_text(row.goal))}[/dim]", soft_wrap=True)


@app.command("forecasts", epilog="Example: kvtune history forecasts --html forecasts.html")
def forecasts(
    context: typer.Context,
    store: options.StoreUrl = None,
    html: options.Html = None,
    json: options.Json = False,
) -> None:
    """Compare what levers were expected to do with what trials measured later."""
    from kvtune.autotune.cli.console import print_json
    from kvtune.autotune.cli.forecasts import print_calibration
    from kvtune.autotune.forecast.score import scores
    from kvtune.autotune.report.calibration_page import calibration_page
    from kvtune.autotune.report.page import write_page
    from kvtune.autotune.strict_json import strict_json

    with options.open_history(store or context.obj) as history:
        told = history.forecasts()
    if html is not None:
        write_page(calibration_page(told), html)
        sys.stderr.write(f"wrote {html}\n")
    if json:
        print_json(strict_json({"forecasts": told, "scores": scores(told)}))
        return
    print_calibration(told)


@app.command("profiles", epilog="Example: kvtune history profiles")
def profiles(
    context: typer.Context, store: options.StoreUrl = None, json: options.Json = False
) -> None:
    """List the profiles, the newest first, with what each found."""
    from rich.markup import escape

    from kvtune.autotune.cli.console import headline, print_json, stdout
    from kvtune.autotune.strict_json import strict_json

    with options.open_history(store or context.obj) as history:
        rows = history.profiles()
    if json:
        print_json(strict_json(rows))
        return
    if not rows:
        stdout.print("No profiles yet. Begin with: kvtune profile --url http://localhost:8000")
        return
    for row in rows:
        profile = row.profile
        device = "device not known" if profile.device is None else profile.device.name
        when = row.created_at[:16].replace("T", " ")
        stdout.print(
            f"{row.id[:8]}  {when}  {headline(profile.verdict)}; "
            f"{escape(profile.model)} on {escape(device)}",
            soft_wrap=True,
        )


@app.command("quality", epilog="Example: kvtune history quality 3fa9c2d1 --html quality.html")
def quality(
    context: typer.Context,
    report: Annotated[
        str, typer.Argument(help="The start of a report's id [default: list them].")
    ] = "",
    store: options.StoreUrl = None,
    html: options.Html = None,
    json: options.Json = False,
) -> None:
    """List the quality reports, the newest first, or show one again."""
    from kvtune.autotune.cli.console import print_json
    from kvtune.autotune.cli.quality_table import print_list, print_report
    from kvtune.autotune.report.page import write_page
    from kvtune.autotune.report.quality_page import quality_page
    from kvtune.autotune.strict_json import strict_json
    from kvtune.errors import BadInput

    with options.open_history(store or context.obj) as history:
        rows = [row for row in history.quality_reports() if row.id.startswith(report)]
    if (report or html is not None) and len(rows) != 1:
        raise BadInput(
            f"{len(rows)} quality reports have an id that begins with {report!r}",
            fix="name one; kvtune history quality lists them",
        )
    if html is not None:
        write_page(quality_page(rows[0].report), html)
        sys.stderr.write(f"wrote {html}\n")
    if json:
        print_json(strict_json(rows))
    elif report:
        print_report(rows[0].report)
    else:
        print_list(rows)


@app.command("export", epilog="Example: kvtune history export --study latest -o study.jsonl")
def export(
    context: typer.Context,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write [default: stdout].")
    ] = None,
    study: Annotated[
        str | None, typer.Option("--study", help="Only this study [default: everything].")
    ] = None,
    store: options.StoreUrl = None,
) -> None:
    """Write the history as JSON lines, raw records included."""
    from kvtune.errors import BadInput

    with options.open_history(store or context.obj) as history:
        row = history.resolve(study).study if study is not None else None
        if output is None:
            history.export(sys.stdout, row)
            return
        try:
            with output.open("w") as stream:
                count = history.export(stream, row)
        except OSError as error:
            raise BadInput(
                f"{output} cannot be written: {error.strerror}", fix="choose another file"
            ) from error
    sys.stderr.write(f"wrote {count} rows to {output}\n")


@app.command("import", epilog="Example: kvtune history import study.jsonl")
def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A file that kvtune history export wrote.")],
    store: options.StoreUrl = None,
    json: options.Json = False,
) -> None:
    """Add an exported history to this one; what is known already is skipped."""
    from dataclasses import asdict
    from json import dumps

    from kvtune.autotune.cli.console import print_json, stdout
    from kvtune.errors import BadInput

    try:
        stream = file.open()
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}", fix="check the path") from error
    with stream, options.open_history(store or context.obj) as history:
        report = history.import_(stream)
    if json:
        print_json(dumps(asdict(report)))
        return
    stdout.print(f"added {sum(report.added.values())}, known {sum(report.skipped.values())} rows")
    for old, new in report.renamed.items():
        stdout.print(f"study {old} is called {new} here", markup=False)
