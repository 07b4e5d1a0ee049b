"""`kvtune report`: the whole evidence of a study's decision on one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtune.autotune.cli import options

EPILOG = "Examples:\n\n- kvtune report -o report.html\n\n- kvtune report my-study --json"


def report(
    study: Annotated[str, typer.Argument(help="Study, or the start of its name.")] = "latest",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Page to write, in one file [default: report.html, none with --json].",
            show_default=False,
        ),
    ] = None,
    store: options.StoreUrl = None,
    json: options.Json = False,
) -> None:
    """Write a study's decision with all its evidence as one page to read in a browser.

    It holds the decision and what to run, the winner against stock, the trail from the verdict to
    the emitted files, and every trial. It loads nothing from anywhere.
    """
    from kvtune.autotune.cli.console import print_json
    from kvtune.autotune.report.page import check_path, write_page
    from kvtune.autotune.report.study_json import study_json
    from kvtune.autotune.report.study_page import study_page
    from kvtune.autotune.report.study_view import study_view

    if output is None and not json:
        output = Path("report.html")
    if output is not None:
        check_path(output)
    with options.open_history(store) as history:
        view = study_view(history, history.resolve(study).study)
    if output is not None:
        write_page(study_page(view), output)
        sys.stderr.write(f"wrote {output}\n")
    if json:
        print_json(study_json(view))


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(report)
