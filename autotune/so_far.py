"""Where a search stands: what was measured, who would be confirmed now, and the time that is left.

Every part of a search looks here, so that all of them see the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvtune.autotune.confirm import merged
from kvtune.autotune.explore.base import NOT_OF_THE_POINT
from kvtune.autotune.gates import Gates
from kvtune.autotune.ledger import RUNG_CONFIRM, RUNG_REPEAT, Entry, Ledger
from kvtune.autotune.limits import Also, Budget
from kvtune.autotune.missed import Confirmed, hopeful
from kvtune.autotune.objectives import Objectives
from kvtune.autotune.quality.trials import TrialQuality
from kvtune.autotune.spending import Finals, finals, needed_s
from kvtune.autotune.standing import ranked
from kvtune.autotune.twins import pooled, twins
from kvtune.autotune.words import duration
from kvtune.types import Front, Goal, Harm, Measurement


@dataclass(slots=True)
class SoFar:
    """What a search knows now; `until_s` is a time of `clock`.

    `also` is what is wanted beside the goal's own objective, and `favourite` the trial that is
    thought best by all measurements together. `missed` is what confirmations that nothing passed
    say of those that were in them.
    """

    goal: Goal
    ledger: Ledger
    budget: Budget
    quality: TrialQuality | None
    clock: Callable[[], float] = time.monotonic
    until_s: float = math.inf
    also: tuple[Also, ...] = ()
    favourite: int | None = None
    missed: Confirmed = field(default_factory=dict)

    @property
    def points(self) -> list[Entry]:
        """The measured trials without those that measured a point once more."""
        return [entry for entry in self.tried if entry.rung != RUNG_REPEAT]

    @property
    def tried(self) -> list[Entry]:
        """All that a search measured before the confirmation, by number."""
        return [entry for entry in self.ledger.entries if entry.rung != RUNG_CONFIRM]

    def repeats(self, number: int) -> list[Entry]:
        """The trials that measured the point of a trial once more."""
        return [entry for entry in self.tried if entry.trial.parent == number]

    @property
    def twins(self) -> dict[int, int]:
        """The trials that run as another one does, by number."""
        return twins(self.points)

    @property
    def distinct(self) -> list[Entry]:
        """The measured trials, with those that run alike as one, each with its repeats."""
        return pooled([self._with_repeats(entry) for entry in self.points])

    @property
    def contenders(self) -> list[Entry]:
        """The distinct trials that may be confirmed: all, until nothing passed a confirmation."""
        return hopeful(self.goal, self.distinct, self.missed) if self.missed else self.distinct

    @property
    def stock(self) -> Measurement | None:
        """The baseline's measurement, once there is one."""
        return next((e.measurement for e in self.points if e.trial.number == 0), None)

    @property
    def gates(self) -> Gates:
        """What a trial has to pass, by what is known of the baseline now."""
        return Gates(self.stock, self.quality)

    @property
    def objectives(self) -> Objectives:
        """What is wanted, and what measured trials have of it."""
        return Objectives(self.goal, self.also, self.quality)

    @property
    def judging(self) -> TrialQuality | None:
        """Who judges answers, if there is a baseline whose answers they can be compared with."""
        stock = self.stock
        return None if stock is None or stock.failure is not None else self.quality

    def finals(self) -> Finals:
        """Who would be confirmed now."""
        points, gates = self.contenders, self.gates
        first = self.objectives.outstanding(points, gates)
        found = finals(self.goal, points, gates, self.budget, self.quality, self.left_s(), first)
        return found if self.also else self._with_favourite(found)

    def front(self, confirmed: Mapping[int, Measurement]) -> Front | None:
        """The front of the trials, of which some were `confirmed`; None if nothing is wanted beside
        the goal's own objective.
        """
        if not self.also:
            return None
        return self.objectives.front(self.distinct, self.gates, {**self.missed, **confirmed})

    def has_time(self, *, may_harm: bool) -> bool:
        """Whether one more trial can be measured, confirmed, and asked if it `may_harm`."""
        return self.until_s == math.inf or self._needed_s(may_harm=may_harm) <= self.left_s()

    def time_is_spent(self) -> str:
        """How the time budget ends the search where it does not `has_time`."""
        tried = len(self.tried)
        if tried > 1:
            return (
                f"the time budget is spent after {tried} trials: what is left goes to the "
                "confirmation"
            )
        needed_s = self._needed_s(may_harm=False)
        return (
            f"the time budget is spent with the stock defaults: another trial and its confirmation "
            f"take about {duration(needed_s)}, and {duration(max(0.0, self.left_s()))} are left; "
            "give it more time, or a workload of fewer requests"
        )

    def _needed_s(self, *, may_harm: bool) -> float:
        chosen = self.finals().chosen
        return needed_s(self.points, chosen, self.budget, self.quality, may_harm=may_harm)

    def _with_favourite(self, found: Finals) -> Finals:
        """The favourite too, if it may be shipped, as those measured best may have had luck.

        Where questions of quality take time, it is kept for who was chosen before.
        """
        able = ranked(self.goal, self.contenders, self.gates)
        ahead = [
            one
            for one in able
            if one.trial.number == self.favourite and one not in found.chosen
            if self.quality is None or one.trial.stack.harm is Harm.LOSSLESS
        ]
        if not ahead:
            return found
        chosen = [*ahead, *found.chosen][: self.budget.finalists]
        out = [f"trial {one.trial.number}" for one in found.chosen if one not in chosen]
        says = (
            f"trial {self.favourite} is confirmed{f' in place of {out[0]}' if out else ''}: by all "
            "trials together, the search's model takes it for the best"
        )
        return replace(found, chosen=chosen, says=says)

    def _with_repeats(self, entry: Entry) -> Entry:
        again = [one.measurement for one in self.repeats(entry.trial.number)]
        measured = [
            one
            for one in again
            if one.failure is None or one.failure.failure not in NOT_OF_THE_POINT
        ]
        return replace(entry, measurement=merged([entry.measurement, *measured]))

    def left_s(self) -> float:
        """The time that is left; infinite without a limit."""
        return self.until_s - self.clock()
