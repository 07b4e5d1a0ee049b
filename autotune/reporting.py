"""What long work says while it runs; the command line draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from kvtune.autotune.rounds import Confirming
from kvtune.profilers.load.progress import Progress
from kvtune.types import Measurement, Trial, Verdict

if TYPE_CHECKING:
    from kvtune.autotune.search_view import SearchView

StepKind = Literal["verdict", "rung", "unlock", "stop", "note"]
"""What a step of a search is: what the load is bound by, which settings are tried from here on, why
those that may change answers are, why no more are, and all else worth a remark."""


class Reporter(Protocol):
    """Receives what happens, as it happens. Never raises and never slows the measurement."""

    def phase(self, title: str) -> None:
        """A new step of the work begins."""

    def note(self, text: str) -> None:
        """Something worth reading that is not an error."""

    def step(self, kind: StepKind, says: str, *, trial: int | None = None) -> None:
        """What leads to the decision, worth keeping; `trial` is the number of what it is about."""

    def server_log(self, line: str) -> None:
        """One line of the log of a server that is starting."""

    def ready(self, start_s: float) -> None:
        """The server serves, `start_s` seconds after its launch; its load is next."""

    def load(self, progress: Progress) -> None:
        """How far a replay is."""

    def asked(self, done: int, total: int) -> None:
        """How many questions of quality suites are answered."""

    def verdict(self, verdict: Verdict) -> None:
        """What the workload is bound by."""

    def trial(self, trial: Trial, measurement: Measurement, *, reused: bool) -> None:
        """A trial has ended; `reused` says that it was known before."""

    def standing(self, view: SearchView) -> None:
        """Where a search stands, after each trial and before the confirmation."""

    def confirming(self, state: Confirming) -> None:
        """Where its confirmation stands, before each measurement and after the last."""


class Quiet:
    """A reporter that says nothing."""

    def phase(self, title: str) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def step(self, kind: StepKind, says: str, *, trial: int | None = None) -> None:
        """Note it."""
        self.note(says)

    def server_log(self, line: str) -> None:
        """Say nothing."""

    def ready(self, start_s: float) -> None:
        """Say nothing."""

    def load(self, progress: Progress) -> None:
        """Say nothing."""

    def asked(self, done: int, total: int) -> None:
        """Say nothing."""

    def verdict(self, verdict: Verdict) -> None:
        """Say nothing."""

    def trial(self, trial: Trial, measurement: Measurement, *, reused: bool) -> None:
        """Say nothing."""

    def standing(self, view: SearchView) -> None:
        """Say nothing."""

    def confirming(self, state: Confirming) -> None:
        """Say nothing."""
