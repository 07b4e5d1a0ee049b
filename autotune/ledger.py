"""Measure points and write them down; what is known already is not measured again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from kvtune.autotune.decide import CANNOT_START
from kvtune.autotune.trial import AtServer, Bench, run_trial, versions_of
from kvtune.profilers.load.client import Watch
from kvtune.store.database import Store
from kvtune.store.key import point_key
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Harm,
    LoadRun,
    Measurement,
    PolicyStack,
    Request,
    RequestRecord,
    Status,
    Trial,
)

RUNG_BASELINE, RUNG_LOSSLESS, RUNG_NEAR_LOSSLESS, RUNG_LOSSY = 0, 1, 2, 3
RUNG_REPEAT, RUNG_CONFIRM = 8, 9
RUNG_OF: Mapping[Harm, int] = {
    Harm.LOSSLESS: RUNG_LOSSLESS,
    Harm.NEAR_LOSSLESS: RUNG_NEAR_LOSSLESS,
    Harm.LOSSY: RUNG_LOSSY,
}
"""The rung that a trial is tried on, by what it does at worst."""


@dataclass(frozen=True, slots=True)
class RequestSet:
    """The requests of a replay and the digest that identifies them."""

    requests: tuple[Request, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A point with its outcome; `reused` when it was known before. `rung` is why it was tried.

    What was measured in one `sitting` was measured by one process in a row.
    """

    trial: Trial
    measurement: Measurement
    reused: bool
    rung: int = RUNG_LOSSLESS
    sitting: str = ""


NOW = "now"
"""The sitting of what this ledger had measured itself."""


class TrialRunner(Protocol):
    """Measures one trial, as `run_trial` does on a server of its own."""

    def __call__(
        self,
        trial: Trial,
        bench: Bench,
        requests: Sequence[Request],
        *,
        canary: bool,
        label: str,
        afterwards: AtServer | None,
        watch: Watch | None,
    ) -> tuple[Measurement, tuple[LoadRun, ...]]:
        """The outcome, and the raw run of each repeat."""


class Ledger:
    """The trials of one study: runs them on the bench and keeps them in the store.

    `remeasure` measures a point again although another study knows it, or it failed or was cut in
    this one. `watch` says who follows the load of a trial on a rung and may cut it; nobody without.
    """

    def __init__(
        self,
        store: Store,
        study: StudyRow,
        bench: Bench,
        *,
        remeasure: bool,
        run: TrialRunner = run_trial,
    ) -> None:
        self._store = store
        self._study = study
        self._bench = bench
        self._remeasure = remeasure
        self._run_trial = run
        self.watch: Callable[[Trial, int], Watch | None] | None = None
        rows = store.trials(study)
        self._planned = {row.number: row.trial for row in rows}
        self._rungs = {row.number: row.rung or RUNG_BASELINE for row in rows}
        self._sittings = {row.number: row.measured_by for row in rows}
        self._measured = {
            row.number: row.measurement
            for row in rows
            if row.measured and row.measurement
            if not remeasure or row.measurement.status is Status.OK
        }
        # Everything is compared with the baseline: a crash of it that need not come again (unlike a
        # bad argument) must not spoil the study for good.
        self._transient = {
            number
            for number, measurement in self._measured.items()
            if number == 0 or self._planned[number].parent is not None
            if measurement.failure is not None and measurement.failure.failure not in CANNOT_START
        }

    @property
    def entries(self) -> list[Entry]:
        """Every measured trial of the study, by number."""
        return [
            self._entry(number, measurement, reused=True)
            for number, measurement in sorted(self._measured.items())
        ]

    def sitting(self, stack: PolicyStack, *, parent: int, seed: int) -> str | None:
        """In which sitting this round of a confirmation was measured; `None` if none counts."""
        return next(
            (
                self._sittings[number]
                for number, trial in self._planned.items()
                if trial.parent == parent
                and trial.seed == seed
                and trial.stack.arguments == stack.arguments
                and number in self._measured
                and number not in self._transient
            ),
            None,
        )

    def number_of(
        self, stack: PolicyStack, *, repeats: int, seed: int, parent: int | None = None
    ) -> int:
        """The number under which `run` keeps this point."""
        return self._trial(stack, repeats=repeats, seed=seed, parent=parent).number

    def runs(self, trial: Trial, requests: RequestSet, *, canary: bool) -> list[LoadRun]:
        """The raw runs behind a trial's measurement."""
        return self._store.runs_of(self._key(trial, requests, canary=canary))

    def records(self, number: int) -> list[tuple[RequestRecord, ...]]:
        """The raw record of every request of a trial, one tuple a repeat."""
        return self._store.records(self._study, number)

    def run(
        self,
        stack: PolicyStack,
        requests: RequestSet,
        *,
        repeats: int,
        seed: int,
        rung: int,
        canary: bool,
        parent: int | None = None,
        optuna_number: int | None = None,
        again: bool = False,
        afterwards: AtServer | None = None,
    ) -> Entry:
        """Measure a point, or find it; `again` measures it although it is known.

        `afterwards` gets the server of a point that was measured now; see `run_trial`.

        Whatever ends it before there is an outcome passes through, an interrupt too; the attempt
        is then stored as stopped.
        """
        trial = self._trial(stack, repeats=repeats, seed=seed, parent=parent)
        self._rungs.setdefault(trial.number, rung)
        again = again or trial.number in self._transient
        if trial.number in self._measured and not again:
            return self._entry(trial.number, self._measured[trial.number], reused=True)
        key = self._key(trial, requests, canary=canary)
        planning = {"optuna_number": optuna_number, "rung": rung}
        if not self._remeasure and not again:
            known = self._store.reuse(self._study, trial, key, **planning)
            if known is not None:
                return self._keep(trial, known, reused=True)
        attempt = self._store.begin_attempt(self._study, trial, key, **planning)
        with self._bench.interrupts.scope():
            measurement, runs = self._attempt(
                attempt, trial, requests, rung, canary=canary, afterwards=afterwards
            )
            self._store.finish_attempt(attempt, measurement, runs)
            return self._keep(trial, measurement, reused=False)

    def _attempt(
        self,
        attempt: str,
        trial: Trial,
        requests: RequestSet,
        rung: int,
        *,
        canary: bool,
        afterwards: AtServer | None,
    ) -> tuple[Measurement, tuple[LoadRun, ...]]:
        label = "trial" if trial.parent is None else "confirm"
        try:
            return self._run_trial(
                trial,
                self._bench,
                requests.requests,
                canary=canary,
                label=label,
                afterwards=afterwards,
                watch=None if self.watch is None else self.watch(trial, rung),
            )
        except BaseException:
            stopped = Measurement(status=Status.STOPPED, versions=versions_of(None))
            self._store.finish_attempt(attempt, stopped, ())
            raise

    def _keep(self, trial: Trial, measurement: Measurement, *, reused: bool) -> Entry:
        self._planned[trial.number] = trial
        self._measured[trial.number] = measurement
        self._sittings[trial.number] = NOW
        self._transient.discard(trial.number)
        return self._entry(trial.number, measurement, reused=reused)

    def _entry(self, number: int, measurement: Measurement, *, reused: bool) -> Entry:
        return Entry(
            self._planned[number],
            measurement,
            reused,
            self._rungs[number],
            self._sittings[number],
        )

    def _trial(self, stack: PolicyStack, *, repeats: int, seed: int, parent: int | None) -> Trial:
        """The trial of this point that the study has already, else one with the next number."""
        trial = Trial(
            number=max(self._planned, default=-1) + 1,
            stack=stack,
            base_arguments=dict(self._study.base_arguments),
            repeats=repeats,
            seed=seed,
            parent=parent,
        )
        for number, planned in self._planned.items():
            same = planned.model_copy(update={"number": trial.number, "stack": stack})
            if same == trial and planned.stack.arguments == stack.arguments:
                return self._planned[number]
        self._planned[trial.number] = trial
        return trial

    def _key(self, trial: Trial, requests: RequestSet, *, canary: bool) -> str:
        settings: dict[str, JsonValue] = {
            **self._bench.plan.key(),
            "canary": canary,
            "repeats": trial.repeats,
            "seed": trial.seed,
            "goal": self._study.goal.model_dump(mode="json"),
            "server": self._study.settings.get("server"),
            "checkpoint": checkpoint_signature(self._study.model),
        }
        return point_key(
            model=self._study.model,
            engine=self._study.engine,
            device=self._study.device,
            workload_digest=requests.digest,
            arguments=trial.arguments,
            settings=settings,
        )


def checkpoint_signature(model: str) -> list[JsonValue]:
    """What tells a checkpoint from another one that was written to the same place.

    Name, size and time of change of its files; empty for a hub id.
    """
    directory = Path(model)
    if not directory.is_dir():
        return []
    files = sorted(file for file in directory.iterdir() if file.is_file())
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
