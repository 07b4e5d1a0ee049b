"""Keeps with a study what its search said on the way to the decision."""

from __future__ import annotations

from kvtune.autotune.reporting import Reporter, StepKind
from kvtune.autotune.rounds import Confirming
from kvtune.autotune.search_view import SearchView
from kvtune.autotune.words import verdict_text
from kvtune.profilers.load.progress import Progress
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import Measurement, Trial, Verdict


class KeepsSteps:
    """Passes all on to `reporter`, and keeps steps, notes and the verdict with the study.

    What a study has been told before is not kept again, so that a search that is run once more adds
    only what is new.
    """

    def __init__(self, reporter: Reporter, store: Store, study: StudyRow) -> None:
        self._reporter, self._store, self._study = reporter, store, study
        self._kept = {(row.step, row.says) for row in store.steps(study)}

    def phase(self, title: str) -> None:
        """Pass it on."""
        self._reporter.phase(title)

    def note(self, text: str) -> None:
        """Pass it on and keep it."""
        self._reporter.note(text)
        self._keep("note", text)

    def step(self, kind: StepKind, says: str, *, trial: int | None = None) -> None:
        """Pass it on and keep it."""
        self._reporter.step(kind, says, trial=trial)
        self._keep(kind, says, trial)

    def server_log(self, line: str) -> None:
        """Pass it on."""
        self._reporter.server_log(line)

    def ready(self, start_s: float) -> None:
        """Pass it on."""
        self._reporter.ready(start_s)

    def load(self, progress: Progress) -> None:
        """Pass it on."""
        self._reporter.load(progress)

    def asked(self, done: int, total: int) -> None:
        """Pass it on."""
        self._reporter.asked(done, total)

    def verdict(self, verdict: Verdict) -> None:
        """Pass it on and keep it."""
        self._reporter.verdict(verdict)
        self._keep("verdict", f"{verdict_text(verdict)}: {verdict.summary}")

    def trial(self, trial: Trial, measurement: Measurement, *, reused: bool) -> None:
        """Pass it on; the store has the trial."""
        self._reporter.trial(trial, measurement, reused=reused)

    def standing(self, view: SearchView) -> None:
        """Pass it on."""
        self._reporter.standing(view)

    def confirming(self, state: Confirming) -> None:
        """Pass it on."""
        self._reporter.confirming(state)

    def _keep(self, kind: StepKind, says: str, trial: int | None = None) -> None:
        if (kind, says) not in self._kept:
            self._kept.add((kind, says))
            self._store.save_step(self._study, kind, says, trial=trial)
