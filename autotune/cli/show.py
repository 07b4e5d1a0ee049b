"""`kvtune show`: one study or one trial, with everything that is known about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from kvtune.store.database import Store
    from kvtune.store.rows import StudyRow, TrialRow

EPILOG = "Examples: kvtune show    kvtune show my-study    kvtune show my-study/3 --json"


def show(
    reference: Annotated[
        str, typer.Argument(help="Study, the start of its name, or STUDY/TRIAL.")
    ] = "latest",
    store: options.StoreUrl = None,
    json: options.Json = False,
) -> None:
    """Show a study with its trials and decision, or a trial with its figures and failure."""
    with options.open_history(store) as history:
        found = history.resolve(reference)
        if found.trial is not None:
            _show_trial(found.trial, json=json)
        else:
            _show_study(history, found.study, json=json)


def _show_study(history: Store, study: StudyRow, *, json: bool) -> None:
    from json import dumps

    from rich.markup import escape
    from rich.table import Table

    from kvtune.autotune.cli.console import OUTCOME_TEXT, figures_table, print_json, stdout
    from kvtune.policies.stack import describe
    from kvtune.profilers.goal import goal_text

    trials = history.trials(study)
    decision = history.decision(study)
    if json:
        print_json(
            dumps(
                {
                    "study": study.model_dump(mode="json"),
                    "trials": [trial.model_dump(mode="json") for trial in trials],
                    "decision": None if decision is None else decision.model_dump(mode="json"),
                }
            )
        )
        return
    stdout.print(f"[bold]{study.name}[/bold]: {escape(study.model)} on {escape(study.device.name)}")
    stdout.print(
        f"{study.engine.distribution or study.engine.name} {study.engine.version}, workload "
        f"{escape(study.workload_name)}, goal: {escape(goal_text(study.goal))}\n",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("trial", "settings", "status", "goodput req/s", "p95 TTFT s", "p95 ITL s"):
        table.add_column(column, overflow="fold")
    for trial in trials:
        parent = trial.trial.parent
        name = describe(trial.trial.stack) if parent is None else f"confirms {parent}"
        table.add_row(
            str(trial.number),
            escape(name),
            _status(trial),
            *(_mean(trial, key) for key in ("goodput_requests_per_s", "ttft_p95_s", "itl_p95_s")),
        )
    stdout.print(table)
    if decision is not None:
        stdout.print(f"\n{OUTCOME_TEXT[decision.outcome]}: trial {decision.recommended}")
        stdout.print(figures_table(decision.figures, decision.baseline_figures, "recommended"))
        for reason in decision.reasons:
            stdout.print(f"- {escape(reason)}", soft_wrap=True)


def _show_trial(trial: TrialRow, *, json: bool) -> None:
    from rich.markup import escape

    from kvtune.autotune.cli.console import number, print_json, stdout
    from kvtune.policies.stack import describe

    if json:
        print_json(trial.model_dump_json())
        return
    stdout.print(
        f"[bold]{trial.study}/{trial.number}[/bold]: {escape(describe(trial.trial.stack))}"
    )
    for choice in trial.trial.stack.choices:
        for name, value in choice.arguments.items():
            stdout.print(f"  {name}: {value}  [dim]{escape(choice.because)}[/dim]", soft_wrap=True)
    for name, value in trial.trial.base_arguments.items():
        stdout.print(f"  {name}: {value}  [dim]given for every trial[/dim]", soft_wrap=True)
    for attempt in trial.attempts:
        stdout.print(f"  attempt {attempt.started_at[:19]}: {attempt.status}")
    measurement = trial.measurement
    if measurement is None:
        stdout.print("Not measured.")
        return
    failure = measurement.failure
    if failure is not None:
        stdout.print(f"[red]{failure.failure}[/red]: {escape(failure.message)}", soft_wrap=True)
        if failure.fix:
            stdout.print(f"fix: {escape(failure.fix)}", soft_wrap=True)
        if failure.log_excerpt:
            stdout.print(failure.log_excerpt, markup=False, soft_wrap=True)
    for key, values in sorted(measurement.metrics.items()):
        stdout.print(f"  {key}: {', '.join(number(value) for value in values)}")
    if measurement.effective is not None:
        for key, value in measurement.effective.model_dump(exclude={"schema_version"}).items():
            if value is not None:
                stdout.print(f"  [dim]{key}: {escape(str(value))}[/dim]", soft_wrap=True)
    for warning in measurement.warnings:
        stdout.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)


def _status(trial: TrialRow) -> str:
    if trial.measurement is None:
        return str(trial.attempts[-1].status) if trial.attempts else "planned"
    failure = trial.measurement.failure
    return str(trial.measurement.status if failure is None else failure.failure)


def _mean(trial: TrialRow, key: str) -> str:
    values = () if trial.measurement is None else trial.measurement.metrics.get(key, ())
    return f"{sum(values) / len(values):.3g}" if values else "-"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(show)
