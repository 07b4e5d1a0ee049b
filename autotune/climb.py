"""Look for the highest load at which the goal holds, on the one running server of a trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

from kvtune.autotune.boundary import (
    Ladder,
    at_load,
    boundary_of,
    ladder_of,
    next_load,
    violation_of,
)
from kvtune.autotune.early_stop import EarlyStop
from kvtune.autotune.fidelity import Missed
from kvtune.autotune.ledger import RUNG_OF
from kvtune.autotune.replays import Loaded, Replays, death, undisturbed
from kvtune.autotune.so_far import SoFar
from kvtune.autotune.trial import AtServer, Bench, run_trial
from kvtune.autotune.words import load_text
from kvtune.profilers.load.client import Watch
from kvtune.profilers.metrics.base import measure
from kvtune.types import (
    Boundary,
    Failure,
    FailureClass,
    LoadLevel,
    LoadRun,
    Measurement,
    Request,
    Status,
    Trial,
)

LOW, HIGH, AT = "boundary_low", "boundary_high", "boundary_load"


@dataclass(frozen=True, slots=True)
class Rival:
    """A trial that holds a load, which another one has to hold too if it is to win."""

    trial: int
    load: float


def climb(
    replays: Replays,
    requests: Sequence[Request],
    watch: Watch | None,
    *,
    start: float | None = None,
    rival: Rival | None = None,
    may_cut: bool = True,
) -> Loaded:
    """Try loads until the boundary is known; see `boundary` for which.

    It begins at `start`, or at the load of the plan. Without a chance against `rival`, it ends
    early. With `may_cut`, a load above one that held is tried only until it surely does not hold.
    `watch` sees nothing of it: it compares runs at one load, and these are at many.
    """
    way = _Climb(replays, requests, ladder_of(replays.bench.plan, requests), may_cut)
    begin = way.ladder.start if start is None else start
    begin = way.ladder.nearest(begin)
    while True:
        held = {load: fmean(found) <= 0 for load, found in way.tried.items()}
        load = next_load(way.ladder, begin, held, gives_up=rival is not None)
        if load is None:
            return way.loaded(rival)
        if failure := way.measure(load):
            return Loaded(failure=failure)


@dataclass(slots=True)
class _Climb:
    """What came of each load so far."""

    replays: Replays
    requests: Sequence[Request]
    ladder: Ladder
    may_cut: bool
    tried: dict[float, list[float]] = field(default_factory=dict)
    worst: dict[float, str | None] = field(default_factory=dict)
    runs: dict[float, list[LoadRun]] = field(default_factory=dict)
    overload: Failure | None = None

    def measure(self, load: float) -> Failure | None:
        """Put the server under a load; the failure that ends the trial, if it is one.

        Requests that time out are none: the load is too high, and the server still runs.
        """
        bench = self.replays.bench
        plan, sent = at_load(bench.plan, self.requests, load)
        bench.reporter.phase(f"Trying {load_text(load, self.ladder.unit)}")
        held = any(found and fmean(found) <= 0 for found in self.tried.values())
        self.tried[load], self.runs[load] = [], []
        for _ in range(repeats := self.replays.trial.repeats):
            # Who may be shown as the lowest load, and who has repeats to come, is measured whole.
            is_over_early = self.may_cut and held and repeats == 1
            watch = Missed(bench.goal, len(sent)) if is_over_early else None
            if self.replays.count:
                plan = replace(plan, warmup_requests=0, warmup_most=None)
            run, failure = undisturbed(self.replays, sent, plan, watch=watch)
            violation, worst = math.inf, None
            if failure is None:
                violation, worst = violation_of(bench.goal, measure(run, bench.goal))
            elif not _timed_out(run, failure) or death(self.replays.server):
                return failure
            else:
                self.overload = failure
            self.tried[load].append(violation)
            self.worst[load] = worst
            self.runs[load].append(run)
        return None

    def loaded(self, rival: Rival | None) -> Loaded:
        """The figures of the highest load that held, else of the lowest that was tried."""
        found = boundary_of(self.tried)
        shown = min(self.tried) if found.low is None else found.low
        if math.isinf(fmean(self.tried[shown])) and self.overload is not None:
            return Loaded(failure=self.overload)
        known: dict[str, object] = {"boundary": self._boundary(is_cliff=found.is_cliff)}
        is_lowest = shown <= self.ladder.loads[0]
        if found.low is None and rival is not None and not is_lowest:
            known |= {
                "status": Status.CUT,
                "share": shown / rival.load,
                "outputs": None,
                "cut": f"holds less than {load_text(shown, self.ladder.unit)}, and trial "
                f"{rival.trial} holds {load_text(rival.load, self.ladder.unit)}",
            }
        figures = {LOW: found.low, HIGH: found.high, AT: found.load}
        metrics = {name: (value,) for name, value in figures.items() if value is not None}
        return Loaded(tuple(self.runs[shown]), metrics=metrics, known=known)

    def _boundary(self, *, is_cliff: bool) -> Boundary:
        means = {load: fmean(found) for load, found in self.tried.items()}
        levels = tuple(
            LoadLevel(
                load=load,
                violation=None if math.isinf(mean) else mean,
                worst=self.worst[load],
            )
            for load, mean in means.items()
        )
        return Boundary(unit=self.ladder.unit, levels=levels, is_cliff=is_cliff)


def _timed_out(run: LoadRun, failure: Failure) -> bool:
    """Whether all that failed is requests that took too long."""
    errors = [record.error or "" for record in run.records if not record.ok]
    is_late = bool(errors) and all(error.startswith("timeout: not complete") for error in errors)
    return failure.failure is FailureClass.REQUEST_ERRORS and is_late


@dataclass(frozen=True, slots=True)
class Climbs:
    """A `TrialRunner` that measures each trial at its own boundary.

    With `may_cut`, a trial that does not hold what the best one does is not measured further, nor
    is a load that surely does not hold.
    """

    so_far: Callable[[], SoFar]
    may_cut: bool

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
        """Measure a trial as `run_trial` does."""
        start, rival = self._beginning(trial)
        return run_trial(
            trial,
            bench,
            requests,
            canary=canary,
            label=label,
            afterwards=afterwards,
            watch=watch,
            load=partial(climb, start=start, rival=rival, may_cut=self.may_cut),
        )

    def _beginning(self, trial: Trial) -> tuple[float | None, Rival | None]:
        """Where to begin: at one's own boundary if it is known, else at that of the best so far."""
        so_far = self.so_far()
        if trial.parent is not None:
            own = [one for one in so_far.points if one.trial.number == trial.parent]
            return (_held(own[0].measurement) if own else None), None
        if trial.number == 0:
            return None, None
        stop, harm = EarlyStop(so_far), trial.stack.harm
        best = stop.best(harm)
        start = None if best is None else _held(best.measurement)
        is_race = self.may_cut and stop.rival(harm, RUNG_OF[harm]) is not None
        if best is None or start is None or not is_race:
            return start, None
        return start, Rival(best.trial.number, start)


def _held(found: Measurement) -> float | None:
    """The highest load that a trial held, in the mean of its repeats."""
    values = found.metrics.get(LOW)
    return fmean(values) if values else None
