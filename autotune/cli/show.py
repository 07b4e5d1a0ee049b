"""`kvtune show`: one study or one trial, with everything that is known about it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from pydantic import JsonValue

    from kvtune.store.database import Store
    from kvtune.store.rows import StudyRow, TrialRow
    from kvtune.types import Boundary, Goal, OutputHealth

EPILOG = "Examples:\n\n- kvtune show\n\n- kvtune show my-study\n\n- kvtune show my-study/3 --json"


def show(
    reference: Annotated[
        str, typer.Argument(help="Study, the start of its name, or STUDY/TRIAL.")
    ] = "latest",
    store: options.StoreUrl = None,
    json: options.Json = False,
) -> None:
    """Show a study with its trials and decision, or a trial with its figures and failure.

    Of both, what the quality suites found is shown too.
    """
    with options.open_history(store) as history:
        found = history.resolve(reference)
        if found.trial is not None:
            _show_trial(history, found.trial, json=json)
        else:
            _show_study(history, found.study, json=json)


def _show_study(history: Store, study: StudyRow, *, json: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from kvtune.autotune.cli.console import print_json, stdout
    from kvtune.autotune.cli.front_table import print_front
    from kvtune.autotune.cli.quality_table import print_trials
    from kvtune.autotune.cli.results import print_decision, print_rejected
    from kvtune.autotune.ledger import RUNG_CONFIRM
    from kvtune.autotune.strict_json import strict_json
    from kvtune.autotune.words import times_of
    from kvtune.policies.stack import describe
    from kvtune.profilers.goal import goal_text

    trials = history.trials(study)
    decision = history.decision(study)
    reports = history.quality_reports(study)
    if json:
        shown = [
            report.model_dump(mode="json", exclude={"report": {"points", "samples"}})
            for report in reports
        ]
        print_json(
            strict_json({"study": study, "trials": trials, "decision": decision, "quality": shown})
        )
        return
    stdout.print(
        f"[bold]{escape(study.name)}[/bold]: {escape(study.model)} on {escape(study.device.name)}",
        soft_wrap=True,
    )
    stdout.print(
        f"{study.engine.distribution or study.engine.name} {study.engine.version}, workload "
        f"{escape(study.workload_name)}, goal: {escape(goal_text(study.goal))}\n",
        soft_wrap=True,
    )
    objective = study.goal.objective_metric
    unit = "req/s" if objective.startswith("goodput") else "tokens/s"
    figures = {objective: f"{study.goal.objective}\n{unit}"}
    figures |= {key: f"{name}\ns" for key, name in times_of(study.goal).items()}
    if study.settings.get("load_at") == "boundary":
        figures["boundary_load"] = "highest\nload"
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("trial", "settings", "status"):
        table.add_column(column, overflow="fold")
    for column in figures.values():
        table.add_column(column, justify="right")
    for trial in trials:
        parent = trial.trial.parent
        again = "confirms" if trial.rung == RUNG_CONFIRM else "repeats"
        name = describe(trial.trial.stack) if parent is None else f"{again} {parent}"
        table.add_row(
            str(trial.number),
            escape(name),
            _status(trial, study.goal),
            *(_mean(trial, key) for key in figures),
        )
    stdout.print(table)
    if decision is not None:
        chosen = next((row for row in trials if row.number == decision.recommended), None)
        settings = "" if chosen is None else describe(chosen.trial.stack)
        print_decision(decision, settings, study=study.name, objective=study.goal.objective)
        print_rejected(decision)
        print_front(decision, {row.number: describe(row.trial.stack) for row in trials})
    print_trials(reports)


def _show_trial(history: Store, trial: TrialRow, *, json: bool) -> None:
    from rich.markup import escape

    from kvtune.autotune.cli.console import print_json, stdout
    from kvtune.autotune.cli.quality_table import print_trials
    from kvtune.autotune.ledger import RUNG_CONFIRM
    from kvtune.autotune.strict_json import strict_json
    from kvtune.autotune.words import START_KINDS, amount, boundary_text
    from kvtune.policies.stack import describe

    reports = history.quality_reports(trial.study, trial.number)
    if json:
        print_json(strict_json({**trial.model_dump(mode="json"), "quality": reports}))
        return
    stdout.print(
        f"[bold]{escape(trial.study)}/{trial.number}[/bold]: {escape(describe(trial.trial.stack))}",
        soft_wrap=True,
    )
    if trial.trial.parent is not None:
        why = ", to confirm it" if trial.rung == RUNG_CONFIRM else ""
        stdout.print(f"  measures trial {trial.trial.parent} again{why}")
    for choice in trial.trial.stack.choices:
        for name, value in choice.arguments.items():
            _print_setting(name, value, choice.because)
    for name, value in trial.trial.base_arguments.items():
        _print_setting(name, value, "given for every trial")
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
    if measurement.cut:
        stdout.print(f"[yellow]{escape(measurement.cut)}[/yellow]; until then:", soft_wrap=True)
    if measurement.boundary is not None:
        stdout.print(f"  {escape(boundary_text(measurement))}", soft_wrap=True)
        _print_loads(measurement.boundary)
    for key, values in sorted(measurement.metrics.items()):
        stdout.print(f"  {key}: {', '.join(amount(value) for value in values)}")
    if measurement.outputs is not None:
        _print_outputs(measurement.outputs)
    print_trials(reports)
    if measurement.effective is not None:
        for key, value in measurement.effective.model_dump(exclude={"schema_version"}).items():
            if value is not None:
                about = f" ({START_KINDS[value]})" if key == "start_kind" else ""
                said = escape(f"{value}{about}")
                stdout.print(f"  [dim]{key}: {said}[/dim]", soft_wrap=True)
    for warning in measurement.warnings:
        stdout.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)


def _status(trial: TrialRow, goal: Goal) -> str:
    from kvtune.autotune.decide import meets_goal
    from kvtune.types import Status

    found = trial.measurement
    if found is None:
        return str(trial.attempts[-1].status) if trial.attempts else "planned"
    if found.failure is not None:
        return str(found.failure.failure)
    is_missed = found.status is Status.OK and not meets_goal(goal, found)
    return "misses" if is_missed else str(found.status)


def _print_setting(name: str, value: JsonValue, because: str) -> None:
    from rich.markup import escape

    from kvtune.autotune.cli.console import stdout

    said = f"  {name}: {escape(str(value))}  [dim]{escape(because)}[/dim]"
    stdout.print(said, soft_wrap=True)


def _print_loads(boundary: Boundary) -> None:
    """Show what came of each load that was tried."""
    from rich.markup import escape

    from kvtune.autotune.cli.console import stdout
    from kvtune.autotune.words import load_text

    for level in sorted(boundary.levels, key=lambda one: one.load):
        said = "requests timed out"
        if level.violation is not None:
            said = f"{math.exp(level.violation):.0%} of the limit, {level.worst}"
        held = "holds" if level.held else "fails"
        load = load_text(level.load, boundary.unit)
        stdout.print(f"    [dim]{held} {load}: {escape(said)}[/dim]", soft_wrap=True)


def _print_outputs(outputs: OutputHealth) -> None:
    from rich.markup import escape

    from kvtune.autotune.cli.console import stdout
    from kvtune.profilers.quality.traffic import summary

    stdout.print(f"  outputs: {summary(outputs)}", soft_wrap=True)
    for example in outputs.examples:
        said = f"{example.kind}: {example.why}: {example.text!r}"
        stdout.print(f"    [dim]request {example.request}, {escape(said)}[/dim]", soft_wrap=True)


def _mean(trial: TrialRow, key: str) -> str:
    from kvtune.autotune.words import amount

    values = () if trial.measurement is None else trial.measurement.metrics.get(key, ())
    return amount(sum(values) / len(values) if values else None)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(show)
