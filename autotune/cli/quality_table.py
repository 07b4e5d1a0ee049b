"""How a quality report is put into words and tables on stdout; readable from 80 columns on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from kvtune.autotune.cli.console import stdout
from kvtune.autotune.quality import words
from kvtune.types import NegativeSample, QualityFigure, QualityReport

if TYPE_CHECKING:
    from kvtune.store.rows import QualityReportRow

OUTCOME_TEXT: Mapping[str, str] = {
    "pass": "[green]pass[/green]",
    "fail": "[red]fail[/red]",
    "unclear": "[yellow]unclear[/yellow]",
}
SHOWN_CHARACTERS = 200
SHOWN_SAMPLES = 6


def print_report(report: QualityReport) -> None:
    """Show the outcome, the figures that tell, why, and answers that broke."""
    stdout.print(
        f"\n[bold]{OUTCOME_TEXT[report.outcome]}[/bold]: {escape(report.candidate)} beside "
        f"{escape(report.baseline)}\n",
        soft_wrap=True,
    )
    stdout.print(f"{escape(words.verdict(report))}\n", soft_wrap=True)
    shown = words.telling(report.figures)
    _print_figures(shown)
    stdout.print()
    for outcome in ("fail", "unclear"):
        for reason, names in _reasons(shown, outcome).items():
            stdout.print(
                f"- {OUTCOME_TEXT[outcome]} {escape(', '.join(names))}: {escape(reason)}",
                soft_wrap=True,
            )
    for suite, reason in report.skipped.items():
        stdout.print(f"- not judged: {escape(suite)}: {escape(reason)}", soft_wrap=True)
    if report.samples:
        stdout.print("\nBroken now, fine with the baseline:")
    for sample in report.samples[:SHOWN_SAMPLES]:
        _print_sample(sample)
    if (more := len(report.samples) - SHOWN_SAMPLES) > 0:
        stdout.print(f"[dim]and {more} more: --html FILE shows them side by side[/dim]")
    for warning in report.warnings:
        stdout.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)


def print_list(rows: Sequence[QualityReportRow]) -> None:
    """A line for each report that is kept."""
    if not rows:
        stdout.print("No quality reports yet. Begin with: kvtune quality --help")
    for row in rows:
        found = row.report
        stdout.print(
            f"{row.id[:8]}  {row.created_at[:16].replace('T', ' ')}  "
            f"{OUTCOME_TEXT[found.outcome]}  {escape(found.candidate)} beside "
            f"{escape(found.baseline)}; {escape(found.model)}, {found.size}",
            soft_wrap=True,
        )


def print_trials(rows: Sequence[QualityReportRow]) -> None:
    """A line for each report on a trial of a study, by trial, the newest of each size first."""
    for row in sorted(rows, key=lambda row: row.trial or 0):
        stdout.print(
            f"- trial {row.trial} {OUTCOME_TEXT[row.report.outcome]}: "
            f"{escape(words.summary(row.report))} [dim](kvtune history quality {row.id[:8]})[/dim]",
            soft_wrap=True,
        )


def _print_figures(figures: list[QualityFigure]) -> None:
    """A table for each metric of each suite; outcomes that decide nothing have no colour."""
    blocks = groupby(figures, key=lambda each: (each.suite, each.metric, each.unit))
    for (suite, metric, unit), block in blocks:
        table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", min_width=7)
        table.add_column("category", no_wrap=True)
        table.add_column("n", justify="right", min_width=3)
        table.add_column("baseline", justify="right", min_width=8)
        table.add_column("candidate", justify="right", min_width=9)
        table.add_column("change (90%)", justify="right", min_width=18, no_wrap=True)
        table.add_column("floor", justify="right", min_width=11)
        for figure in block:
            table.add_row(
                OUTCOME_TEXT[figure.outcome] if figure.decides else f"[dim]{figure.outcome}[/dim]",
                escape(figure.category or "all"),
                str(figure.items),
                words.number(figure.baseline, unit),
                words.number(figure.candidate, unit),
                words.change(figure.change, unit),
                words.span(figure.floor, unit),
            )
        heading = f"[bold]{escape(suite)}[/bold] {escape(metric)}"
        stdout.print(f"{heading}, changes in {words.unit_of_change(unit)}")
        stdout.print(table)


def _reasons(figures: list[QualityFigure], outcome: str) -> dict[str, list[str]]:
    """The figures with an outcome by why they have it, so that a reason is told once."""
    found: dict[str, list[str]] = {}
    for figure in figures:
        if figure.outcome == outcome:
            found.setdefault(figure.because, []).append(words.name(figure))
    return found


def _print_sample(sample: NegativeSample) -> None:
    why = f" ({sample.detail})" if sample.detail else ""
    stdout.print(f"- {escape(sample.suite)}/{escape(sample.item)}{escape(why)}", soft_wrap=True)
    for who, text in (("baseline ", sample.baseline), ("candidate", sample.candidate)):
        line = " ".join(text.split()) or "(nothing)"
        cut = line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."
        stdout.print(f"    [dim]{who}[/dim] {escape(cut)}", soft_wrap=True)
