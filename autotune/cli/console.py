"""What the terminal shows: progress on stderr, results on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status as Spinner
from rich.table import Table

from kvtune.policies.stack import describe
from kvtune.profilers.load.progress import Progress
from kvtune.types import (
    Evidence,
    Interval,
    Measurement,
    Outcome,
    Profile,
    Status,
    Trial,
    Verdict,
)

PLAIN_INTERVAL_S = 5.0

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


class TerminalReporter:
    """Draws progress: a live line on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._spinner: Spinner | None = None
        self._began_s = time.monotonic()
        self._said_s = 0.0
        self._title = ""
        self._starting = False

    @contextmanager
    def live(self) -> Iterator[TerminalReporter]:
        """Show progress for as long as the block runs."""
        if stderr.is_terminal:
            self._spinner = stderr.status("starting")
            self._spinner.start()
        try:
            yield self
        finally:
            if self._spinner is not None:
                self._spinner.stop()
                self._spinner = None

    def phase(self, title: str) -> None:
        """Print the title of a step."""
        self._title = title
        self._starting = True
        self._line(f"[bold]{escape(title)}[/bold]")
        self._update("starting the server")

    def note(self, text: str) -> None:
        """Print a remark."""
        self._line(f"  [dim]{escape(text)}[/dim]")

    def server_log(self, line: str) -> None:
        """Show the newest line of a server that is starting."""
        if self._starting and line.strip():
            self._update(f"starting the server: {line.strip()[:110]}")

    def load(self, progress: Progress) -> None:
        """Show how far a replay is."""
        self._starting = False
        failed = f", {progress.failed} failed" if progress.failed else ""
        self._update(
            f"{progress.done}/{progress.total} requests{failed}, {progress.in_flight} in flight, "
            f"{progress.output_tokens_per_s:.0f} tokens/s"
        )

    def watched(self, elapsed_s: float) -> None:
        """Show how long a server has been watched."""
        self._update(f"watching, {elapsed_s:.0f} s")

    def verdict(self, verdict: Verdict) -> None:
        """Print what the workload is bound by."""
        self._line(
            f"  bound by [bold cyan]{verdict.bottleneck}[/bold cyan] "
            f"({verdict.confidence} confidence): {escape(verdict.summary)}"
        )

    def trial(self, trial: Trial, measurement: Measurement, *, reused: bool) -> None:
        """Print the outcome of a trial."""
        again = " (known, not measured again)" if reused else ""
        name = escape(describe(trial.stack))
        if measurement.status is Status.OK:
            shown = ", ".join(
                f"{label} {measurement.metrics[key][-1]:{form}}"
                for key, label, form in (
                    ("goodput_requests_per_s", "goodput req/s", ".2f"),
                    ("output_tokens_per_s", "tokens/s", ".0f"),
                    ("ttft_p95_s", "p95 TTFT s", ".2f"),
                    ("itl_p95_s", "p95 ITL s", ".3f"),
                )
                if measurement.metrics.get(key)
            )
            self._line(f"  [green]{trial.number}[/green] {name}: {shown}{again}")
        else:
            failure = measurement.failure
            why = f"{failure.failure}: {failure.message}" if failure else str(measurement.status)
            self._line(f"  [red]{trial.number}[/red] {name}: {escape(why)}{again}")

    def _line(self, text: str) -> None:
        stderr.print(f"[dim]{self._elapsed()}[/dim] {text}", soft_wrap=True)
        self._said_s = time.monotonic()

    def _update(self, text: str) -> None:
        if self._spinner is not None:
            self._spinner.update(f"{escape(self._title)}: {escape(text)}")
        elif time.monotonic() - self._said_s > PLAIN_INTERVAL_S:
            self._line(f"  [dim]{escape(text)}[/dim]")

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._began_s)
        return f"{seconds // 60:02d}:{seconds % 60:02d}"


def print_json(text: str) -> None:
    """Write a result for a program."""
    sys.stdout.write(text + "\n")


def print_profile(profile: Profile) -> None:
    """Show a profile: the verdict first, then what it rests on."""
    verdict = profile.verdict
    stdout.print(
        f"\n[bold]{verdict.bottleneck}[/bold] ({verdict.confidence} confidence)\n{verdict.summary}",
        soft_wrap=True,
    )
    stdout.print(evidence_table(verdict.evidence))
    if verdict.missing:
        stdout.print("Missing: " + escape("; ".join(verdict.missing)), soft_wrap=True)
    if verdict.next_experiment:
        stdout.print("Next: " + escape(verdict.next_experiment), soft_wrap=True)
    if profile.effective is not None:
        effective = profile.effective.model_dump(exclude={"schema_version", "source"})
        known = ", ".join(f"{k}={v}" for k, v in effective.items() if v is not None)
        stdout.print(f"[dim]Engine: {escape(known)}[/dim]", soft_wrap=True)
    for warning in profile.warnings:
        stdout.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)


def evidence_table(evidence: tuple[Evidence, ...]) -> Table:
    """The rows behind a verdict."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", "metric", "value", "threshold", "says"):
        table.add_column(column, overflow="fold")
    for row in evidence:
        mark = {True: "[green]yes[/green]", False: "no", None: "[dim]?[/dim]"}[row.holds]
        table.add_row(
            mark,
            escape(row.metric),
            number(row.value, row.unit),
            number(row.threshold, row.unit),
            escape(row.says),
        )
    return table


def figures_table(
    figures: Mapping[str, Interval], baseline: Mapping[str, Interval], name: str
) -> Table:
    """Measured figures of a configuration beside those of the stock defaults."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", name, "stock defaults"):
        table.add_column(column, justify="left" if not column else "right")
    for key in figures:
        table.add_row(key, interval(figures.get(key)), interval(baseline.get(key)))
    return table


def interval(value: Interval | None) -> str:
    """An estimate with its interval, in three significant digits."""
    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return f"{value.estimate:.3g}"
    return f"{value.estimate:.3g} ({value.low:.3g} to {value.high:.3g})"


def number(value: float | None, unit: str = "") -> str:
    """A number in three significant digits with its unit."""
    return "-" if value is None else f"{value:.3g} {unit}".strip()


OUTCOME_TEXT: Mapping[Outcome, str] = {
    Outcome.WINNER: "[bold green]Winner[/bold green]",
    Outcome.KEEP_BASELINE: "[bold]Keep the stock defaults[/bold]",
    Outcome.NO_CLEAR_WINNER: "[bold yellow]No clear winner[/bold yellow]",
    Outcome.INFEASIBLE: "[bold red]Infeasible[/bold red]",
    Outcome.NOTHING_MEASURED: "[bold red]Nothing was measured[/bold red]",
}
