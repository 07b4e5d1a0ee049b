"""How results are put into words and tables on stdout; readable from 80 columns on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from kvtune.autotune.cli.console import headline, shares_text, stdout
from kvtune.autotune.cli.front_table import print_front
from kvtune.autotune.words import amount, interval
from kvtune.types import Decision, Evidence, Outcome, Profile

if TYPE_CHECKING:
    from kvtune.autotune.cli.options import Arguments
    from kvtune.autotune.limits import QualityRules
    from kvtune.autotune.space import SearchSpace
    from kvtune.autotune.tune import Tuning
    from kvtune.profilers.measure import LoadPlan
    from kvtune.types import Device, EngineInfo, Harm, Workload

OUTCOME_TEXT: Mapping[Outcome, str] = {
    Outcome.WINNER: "[bold green]Winner[/bold green]",
    Outcome.KEEP_BASELINE: "[bold]Keep the stock defaults[/bold]",
    Outcome.NO_CLEAR_WINNER: "[bold yellow]No clear winner[/bold yellow]",
    Outcome.INFEASIBLE: "[bold red]Infeasible[/bold red]",
    Outcome.NOTHING_MEASURED: "[bold red]Nothing was measured[/bold red]",
}


def space_of(
    info: EngineInfo,
    device: Device,
    model: str,
    base: Arguments,
    workload: Workload,
    plan: LoadPlan,
    max_harm: Harm,
    max_host_bytes: int | None,
    quality: QualityRules | None,
) -> SearchSpace:
    """What would be searched, as far as it is known before anything is measured."""
    from kvtune.autotune.quality.sizing import asked_suites, own_suites, scores_limit
    from kvtune.autotune.space import build_space
    from kvtune.kernels.device import detect_detail
    from kvtune.policies.base import Context
    from kvtune.policies.checkpoint import model_shape

    limited = ""
    if quality is not None:
        limited = scores_limit((*asked_suites(), *own_suites(quality.data)), quality.limits)
    situation = Context(
        engine=info,
        device=device,
        detail=detect_detail(),
        model=model_shape(model),
        base_arguments=base,
        fingerprint=workload.fingerprint,
        max_concurrency=plan.concurrency,
        max_host_bytes=max_host_bytes,
        scores_limit=limited,
    )
    return build_space(situation, harm=max_harm)


def print_space(space: SearchSpace) -> None:
    """Show what would be searched."""
    from kvtune.autotune.space import dry_run_text

    stdout.print(dry_run_text(space), markup=False, soft_wrap=True)


def print_outcome(tuning: Tuning, decision: Decision) -> None:
    """Show how a search ended, and the command to go on with."""
    from kvtune.policies.stack import describe

    study, number = tuning.study, decision.recommended
    settings = "" if number is None else describe(tuning.store.trial(study, number).trial.stack)
    print_decision(decision, settings, study=study.name, objective=study.goal.objective)
    trials = tuning.so_far.points
    print_front(decision, {one.trial.number: describe(one.trial.stack) for one in trials})
    is_to_run = number is not None and decision.outcome is not Outcome.INFEASIBLE
    command = "emit --format vllm-yaml -o DIRECTORY --study" if is_to_run else "show"
    stdout.print(f"\nNext: kvtune {command} {study.name}", markup=False, soft_wrap=True)


def print_decision(decision: Decision, settings: str, *, study: str, objective: str) -> None:
    """Show how a search ended; `settings` are those of the recommended trial in one line."""
    stdout.print(f"\n{OUTCOME_TEXT[decision.outcome]} - study {escape(study)}", soft_wrap=True)
    if decision.recommended is not None:
        closest = decision.outcome is Outcome.INFEASIBLE
        stdout.print(
            f"{'Closest' if closest else 'Recommended'}: trial {decision.recommended}: "
            f"[bold]{escape(settings)}[/bold]",
            soft_wrap=True,
        )
        stdout.print(figures_table(decision))
    if decision.gain_ratio is not None:
        stdout.print(f"{objective} is {interval(decision.gain_ratio)} times the stock one")
    for reason in decision.reasons:
        stdout.print(f"- {escape(reason)}", soft_wrap=True)
    if decision.prices:
        stdout.print("\nPrice of harm, the best of each rung beside the best below it:")
    for price in decision.prices:
        stdout.print(f"- {escape(price.says)}", soft_wrap=True)


def print_rejected(decision: Decision) -> None:
    """Show why each other trial was not chosen."""
    by_reason: dict[str, list[str]] = {}
    for trial, reason in sorted(decision.rejected.items()):
        by_reason.setdefault(reason, []).append(str(trial))
    for reason, trials in by_reason.items():
        name = "trial" if len(trials) == 1 else "trials"
        stdout.print(f"- {name} {', '.join(trials)} out: {escape(reason)}", soft_wrap=True)


def print_profile(profile: Profile) -> None:
    """Show a profile: the verdict first, then what it rests on."""
    verdict = profile.verdict
    stdout.print(f"\n{headline(verdict)}\n{escape(verdict.summary)}", soft_wrap=True)
    if verdict.shares:
        text = shares_text(verdict.shares)
        stdout.print(text[0].upper() + text[1:], soft_wrap=True)
    stdout.print()
    stdout.print(evidence_table(verdict.evidence))
    named = {entry.partition(": ")[0] for entry in verdict.missing}
    unknown = {row.metric for row in verdict.evidence if row.value is None} - named
    if unknown:
        stdout.print(f"\n[dim]Not known: {', '.join(sorted(unknown))}[/dim]", soft_wrap=True)
    if verdict.missing:
        stdout.print("\nMissing:")
        for reason, names in _by_reason(verdict.missing).items():
            stdout.print(f"- {escape(', '.join(names))}: {escape(reason)}", soft_wrap=True)
    if verdict.next_experiment:
        stdout.print("\nNext: " + escape(verdict.next_experiment), soft_wrap=True)
    if profile.effective is not None:
        effective = profile.effective.model_dump(exclude={"schema_version", "source"})
        known = ", ".join(f"{k}={v}" for k, v in effective.items() if v is not None)
        stdout.print(f"\n[dim]Engine: {escape(known)}[/dim]", soft_wrap=True)
    for warning in profile.warnings:
        stdout.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)


def evidence_table(evidence: tuple[Evidence, ...]) -> Table:
    """The known rows behind a verdict: values under their names, and where each is from."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    table.add_column("metric", no_wrap=True)
    table.add_column("says")
    for row in evidence:
        if row.value is None:
            continue
        mark = {True: "[green]yes[/green]", False: "no", None: "[dim]?[/dim]"}[row.holds]
        value, threshold = amount(row.value, row.unit), amount(row.threshold, row.unit)
        table.add_row(
            mark,
            f"{escape(row.metric)}\n  [dim]{value} (threshold {threshold})[/dim]",
            f"{escape(row.says)}\n[dim]{escape(row.source)}[/dim]",
        )
    return table


def figures_table(decision: Decision) -> Table:
    """Measured figures of the recommended or closest trial beside those of the stock defaults."""
    chosen = "closest" if decision.outcome is Outcome.INFEASIBLE else "recommended"
    columns = {chosen: decision.figures, "stock defaults": decision.baseline_figures}
    if decision.recommended == decision.baseline:
        del columns[chosen]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for key in decision.figures:
        table.add_row(key, *(interval(figures.get(key)) for figures in columns.values()))
    return table


def _by_reason(missing: tuple[str, ...]) -> dict[str, list[str]]:
    """The names of what is missing, by what is to be done about it."""
    found: dict[str, list[str]] = {}
    for entry in missing:
        name, _, reason = entry.partition(": ")
        found.setdefault(reason, []).append(name)
    return found
