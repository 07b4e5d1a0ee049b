"""Which trials of a search race the best one so far, and which are measured to their end."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from kvtune.autotune.decide import meets_goal, objective_values
from kvtune.autotune.fidelity import Race, pace_of
from kvtune.autotune.ledger import RUNG_LOSSLESS, RUNG_OF, Entry, RequestSet
from kvtune.autotune.reporting import Reporter
from kvtune.autotune.so_far import SoFar
from kvtune.autotune.standing import rejected
from kvtune.types import Harm, Status, Trial


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """Says who follows the load of a trial and may cut it."""

    so_far: SoFar

    def watch(self, trial: Trial, rung: int) -> Race | None:
        """The race of a trial on a rung; `None` if it is to run to its end."""
        best = self.rival(trial.stack.harm, rung)
        if best is None:
            return None
        goal, number = self.so_far.goal, best.trial.number
        pace = pace_of(number, self.so_far.ledger.records(number), goal)
        return None if pace is None else Race(pace, goal)

    def rival(self, harm: Harm, rung: int) -> Entry | None:
        """Beside whom a trial on a rung may turn out hopeless; `None` if it is to run to its end.

        That is so for the baseline, for confirmations, for the first trial of each rung that may
        change answers, and as long as nothing meets the goal: which trial is closest to it only
        whole runs tell.
        """
        if rung not in RUNG_OF.values():
            return None
        if rung != RUNG_LOSSLESS and not any(
            entry.rung == rung and entry.measurement.status is Status.OK
            for entry in self.so_far.points
        ):
            return None
        return self.best(harm)

    def best(self, harm: Harm) -> Entry | None:
        """The best that meets the goal and may be shipped, among those that harm no more.

        What harms more may turn out to harm too much, and a trial must not be lost to that.
        """
        goal, points = self.so_far.goal, self.so_far.contenders
        out = rejected(points, self.so_far.gates)
        order = list(Harm)
        able = [
            entry
            for entry in points
            if meets_goal(goal, entry.measurement)
            and objective_values(goal, entry.measurement)
            and entry.trial.number not in out
            and order.index(entry.trial.stack.harm) <= order.index(harm)
        ]
        return max(
            able, key=lambda one: fmean(objective_values(goal, one.measurement)), default=None
        )


def finish_cut(so_far: SoFar, requests: RequestSet, reporter: Reporter) -> None:
    """Measure to their end the trials that an earlier run of this study cut, while time is left."""
    for entry in so_far.points:
        if entry.measurement.status is not Status.CUT:
            continue
        trial, may_harm = entry.trial, entry.trial.stack.harm is not Harm.LOSSLESS
        if not so_far.has_time(may_harm=may_harm):
            reporter.note("no time is left to measure to its end what an earlier run cut")
            return
        reporter.phase(f"Measuring trial {trial.number} to its end, which an earlier run cut")
        quality = so_far.judging if may_harm else None
        whole = so_far.ledger.run(
            trial.stack,
            requests,
            repeats=trial.repeats,
            seed=trial.seed,
            rung=entry.rung,
            canary=may_harm,
            again=True,
            afterwards=None if quality is None else quality.at_server,
        )
        reporter.trial(whole.trial, whole.measurement, reused=whole.reused)
