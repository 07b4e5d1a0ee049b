"""What the terminal shows: progress on stderr, results on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.status import Status as Spinner

from kvtune.autotune.cli.standing_words import line_of
from kvtune.autotune.reporting import StepKind
from kvtune.autotune.words import amount, boundary_text, duration, times_of
from kvtune.profilers.load.progress import Progress
from kvtune.types import Bottleneck, Goal, Measurement, Status, Trial, Verdict

if TYPE_CHECKING:
    from kvtune.autotune.rounds import Confirming
    from kvtune.autotune.search_view import SearchView

PLAIN_INTERVAL_S = 5.0

LEFT_OVER_LEAST_SHARE = 0.02
"""Less than this is rounding."""

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


class TerminalReporter:
    """Draws progress: a live line on a terminal, a line every few seconds elsewhere.

    With a `price_per_hour` it ends with what the time has cost. Trials are told by what the `goal`
    limits.
    """

    def __init__(self, *, price_per_hour: float | None = None, goal: Goal | None = None) -> None:
        self._price_per_hour = price_per_hour
        self._goal = goal or Goal()
        self._spinner: Spinner | None = None
        self._began_s = time.monotonic()
        self._said_s = 0.0
        self._title = ""
        self._starting = False
        self._stood = 0

    @contextmanager
    def live(self) -> Iterator[TerminalReporter]:
        """Show progress for as long as the block runs."""
        if stderr.is_terminal:
            self._spinner = stderr.status("starting")
            self._spinner.start()
        with self._closing():
            try:
                yield self
            finally:
                if self._spinner is not None:
                    self._spinner.stop()
                    self._spinner = None

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Print what it has cost when the block ends, however it ends."""
        try:
            yield
        finally:
            if self._price_per_hour is not None:
                each = f"{self._price_per_hour:g} an hour"
                self._line(f"took {self._elapsed()}, which cost {self._spent():.2f} at {each}")

    def phase(self, title: str) -> None:
        """Print the title of a step."""
        self._title = title.partition(": ")[0]
        self._starting = True
        self._line(f"[bold]{escape(title)}[/bold]")
        self._update("starting the server")

    def note(self, text: str) -> None:
        """Print a remark."""
        self._line(f"  [dim]{escape(text)}[/dim]")

    def step(self, kind: StepKind, says: str, *, trial: int | None = None) -> None:
        """Print what leads to the decision."""
        self._line(f"  {escape(says)}")

    def server_log(self, line: str) -> None:
        """Show the newest line of a server that is starting."""
        if self._starting and line.strip():
            self._update(f"starting the server: {line.strip()}")

    def ready(self, start_s: float) -> None:
        """Show that the server is up; what it logs from now on is its own affair."""
        self._starting = False
        self._update(f"ready after {start_s:.1f} s")

    def load(self, progress: Progress) -> None:
        """Show how far a replay is."""
        failed = f", {progress.failed} failed" if progress.failed else ""
        self._update(
            f"{progress.done}/{progress.total} requests{failed}, {progress.in_flight} in flight, "
            f"{progress.output_tokens_per_s:.0f} tokens/s"
        )

    def asked(self, done: int, total: int) -> None:
        """Show how many questions are answered."""
        self._starting = False
        self._update(f"{done}/{total} questions answered")

    def watched(self, elapsed_s: float) -> None:
        """Show how long a server has been watched."""
        self._update(f"watching, {elapsed_s:.0f} s")

    def verdict(self, verdict: Verdict) -> None:
        """Print what the workload is bound by."""
        self._line(f"  {headline(verdict)}: {escape(verdict.summary)}")
        if verdict.shares:
            self._line(f"  [dim]{shares_text(verdict.shares)}[/dim]")

    def trial(self, trial: Trial, measurement: Measurement, *, reused: bool) -> None:
        """Print the outcome of a trial, below the title that says what it is."""
        again = " (known, not measured again)" if reused else ""
        parent = trial.parent
        name = f"trial {trial.number}" if parent is None else f"trial {parent} again"
        if measurement.status is Status.OK:
            shown = _figures(measurement, self._goal)
            load = boundary_text(measurement)
            shown += f"; {escape(load)}" if load else ""
            self._line(f"  [green]{name}[/green]: {shown}{again}")
        else:
            failure = measurement.failure
            why = f"{failure.failure}: {failure.message}" if failure else str(measurement.status)
            colour = "yellow" if measurement.status is Status.CUT else "red"
            said = escape(measurement.cut or why)
            self._line(f"  [{colour}]{name}[/{colour}]: {said}{again}")

    def standing(self, view: SearchView) -> None:
        """Print where a search stands, once after each trial."""
        if view.tried != self._stood:
            self._stood = view.tried
            self._line(f"  [dim]{escape(line_of(view, self._price_per_hour))}[/dim]")

    def confirming(self, state: Confirming) -> None:
        """Say nothing: each measurement of a confirmation has a line."""

    def _line(self, text: str) -> None:
        stderr.print(f"[dim]{self._elapsed()}[/dim] {text}", soft_wrap=True)
        self._said_s = time.monotonic()

    def _update(self, text: str) -> None:
        if self._spinner is not None:
            # A line that wraps would leave its end behind when it is drawn again.
            self._spinner.update(escape(f"{self._title}: {text}"[: stderr.width - 4]))
        elif time.monotonic() - self._said_s > PLAIN_INTERVAL_S:
            self._line(f"  [dim]{escape(text)}[/dim]")

    def _spent(self) -> float:
        """What the time since the start has cost."""
        return (time.monotonic() - self._began_s) / 3600 * (self._price_per_hour or 0.0)

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._began_s)
        return f"{seconds // 60:02d}:{seconds % 60:02d}"


def print_json(text: str) -> None:
    """Write a result for a program."""
    sys.stdout.write(text + "\n")


def _figures(measurement: Measurement, goal: Goal) -> str:
    """What matters of a measurement, the means of its repeats."""
    means = {name: fmean(values) for name, values in measurement.metrics.items() if values}
    rates = {
        "goodput_requests_per_s": ("goodput ", "req/s"),
        "output_tokens_per_s": ("", "tokens/s"),
    }
    found = [
        f"{label}{amount(means[key], unit)}" for key, (label, unit) in rates.items() if key in means
    ]
    times = times_of(goal).items()
    return ", ".join(
        [*found, *(f"{name} {duration(means[key])}" for key, name in times if key in means)]
    )


def headline(verdict: Verdict) -> str:
    """The verdict in a few words, with markup."""
    if verdict.bottleneck is Bottleneck.ABSTAIN:
        return "[bold]no verdict[/bold]"
    by = "" if verdict.bottleneck is Bottleneck.IDLE else "bound by "
    return f"{by}[bold cyan]{verdict.bottleneck}[/bold cyan] ({verdict.confidence} confidence)"


def shares_text(shares: Mapping[Bottleneck, float]) -> str:
    """How a mean step divides, largest share first; what is left over is said to be."""
    parts = [f"{share:.0%} {bottleneck}" for bottleneck, share in shares.items() if share >= 0.005]
    if (rest := 1 - sum(shares.values())) >= LEFT_OVER_LEAST_SHARE:
        parts.append(f"{rest:.0%} not told apart")
    return f"of a mean step: {', '.join(parts)}"
