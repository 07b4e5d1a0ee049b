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
    epilog="Examples: kvtune history    kvtune history export -o all.jsonl    "
    "kvtune history import all.jsonl",
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
    from rich.table import Table

    from kvtune.autotune.cli.console import number, print_json, stdout
    from kvtune.profilers.goal import goal_text

    with options.open_history(store) as history:
        rows = history.studies()
    if json:
        print_json("[" + ",".join(row.model_dump_json() for row in rows) + "]")
        return
    if not rows:
        stdout.print("No studies yet. Begin with: kvtune search --model PATH --workload FILE")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("study", "begun", "trials", "best", "goal", "outcome"):
        table.add_column(column, overflow="fold")
    for row in rows:
        trials = ", ".join(f"{count} {status}" for status, count in row.trials.items())
        outcome = "-" if row.outcome is None else f"{row.outcome} ({row.recommended})"
        table.add_row(
            row.name,
            row.created_at[:16],
            trials or "none",
            f"{number(row.best_objective)} {row.objective_metric}",
            goal_text(row.goal),
            outcome,
        )
    stdout.print(table)


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
