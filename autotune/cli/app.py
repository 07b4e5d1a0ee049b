"""The `kvtune` command. Nothing heavy is imported here, so that `--help` answers at once."""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

import kvtune
from kvtune.autotune.cli import (
    doctor,
    emit,
    history,
    plan,
    policies,
    profile,
    quality,
    report,
    search,
    serve,
    show,
    workload,
)

INTERRUPTED = 130

app = typer.Typer(
    name="kvtune",
    help="Find, prove and emit the KV-cache policy that a vLLM workload needs.",
    epilog="Example: kvtune search --model ./model --workload requests.jsonl "
    '--goal "p95 ttft <= 800ms"',
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvtune {kvtune.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Find, prove and emit the KV-cache policy that a vLLM workload needs."""


for _command in (profile, search, quality, emit, serve, show, report, plan, policies, doctor):
    _command.register(app)
for _group in (history, workload):
    app.add_typer(_group.app)


def main() -> None:
    """Run the command line and exit with its code.

    0 done, 1 goal infeasible, no clear winner or quality lost, 2 bad input, 3 engine failure,
    4 quality unclear, 130 interrupted.
    """
    signal.signal(signal.SIGTERM, _terminated)
    from kvtune.errors import KvtuneError

    try:
        app()
    except KvtuneError as error:
        _explain(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _ignore_signals()
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            _ignore_signals()
        # Whoever read our output has seen enough (`kvtune show | head`); Typer calls that a 1.
        if isinstance(ended.__context__, BrokenPipeError):
            sys.exit(0)
        raise


def _explain(error: Exception) -> None:
    from kvtune.errors import EngineError, KvtuneError

    message = getattr(error, "message", str(error))
    fix = error.fix if isinstance(error, KvtuneError) else ""
    if "--json" in sys.argv:
        kind = error.failure.value if isinstance(error, EngineError) else type(error).__name__
        sys.stdout.write(json.dumps({"error": message, "fix": fix, "kind": kind}) + "\n")
        return
    if isinstance(error, EngineError) and error.log_excerpt:
        sys.stderr.write("--- from the server's log ---\n" + error.log_excerpt.rstrip() + "\n---\n")
    sys.stderr.write(f"error: {message}\n")
    if fix:
        sys.stderr.write(f"  fix: {fix}\n")


def _ignore_signals() -> None:
    """All that is left is to exit; an impatient second Ctrl-C would only change the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _terminated(number: int, frame: FrameType | None) -> None:
    """A polite kill ends kvtune as Ctrl-C does: servers stopped, results kept."""
    raise KeyboardInterrupt
