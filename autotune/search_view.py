"""Where a search stands, as a reader sees it: small values that are taken after each trial."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from kvtune.autotune.decide import mean_metrics, meets_goal, missed_by, objective_values
from kvtune.autotune.ladder import STOCK, Rung
from kvtune.autotune.ledger import Entry
from kvtune.autotune.so_far import SoFar
from kvtune.autotune.spending import confirmation_s, trial_s
from kvtune.autotune.standing import ranked
from kvtune.autotune.words import boundary_text
from kvtune.policies.stack import describe
from kvtune.profilers.goal import slo_key, slo_text
from kvtune.profilers.metrics.base import metric_of
from kvtune.types import Status

State = Literal["done", "open", "closed"]

CUT = "given up early"
OUT = "may not be shipped"


@dataclass(frozen=True, slots=True)
class Margin:
    """A limit of the goal beside what the incumbent has; `value_s` is None where unmeasured."""

    limit: str
    value_s: float | None
    limit_s: float


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The best trial so far. `over_stock` is its objective over the baseline's, if that has one.

    `load` says how much it holds, where that was looked for.
    """

    number: int
    settings: str
    value: float
    over_stock: float | None
    meets_goal: bool
    margins: tuple[Margin, ...]
    load: str = ""


@dataclass(frozen=True, slots=True)
class RungState:
    """A rung of the ladder: whether its settings are tried, which or why not, in `tried` trials."""

    name: str
    state: State
    why: str
    tried: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is left and what it goes to, in seconds; `left_s` is infinite without a limit.

    `trials` is how many more there are at most, and `trial_s` what one takes. A `trial_s` of 0 says
    that nothing was measured yet.
    """

    trials: int
    left_s: float
    trial_s: float
    confirming_s: float
    asking_s: float

    @property
    def affordable(self) -> int:
        """The trials for which there is time before the confirmation."""
        if self.left_s == math.inf or self.trial_s <= 0:
            return self.trials
        spare_s = self.left_s - self.confirming_s - self.asking_s
        return max(0, min(self.trials, math.floor(spare_s / self.trial_s)))

    @property
    def expected_s(self) -> float:
        """About how long all of it takes, and no longer than what is left."""
        planned_s = self.affordable * self.trial_s + self.confirming_s + self.asking_s
        return min(planned_s, max(0.0, self.left_s))


@dataclass(frozen=True, slots=True)
class SearchView:
    """A search between two trials. `unit` is that of the objective.

    `failures` maps a class to how many measurements failed so, and `out` a reason in words to how
    many ran and still are nothing to choose from.
    """

    objective: str
    unit: str
    tried: int
    most: int
    best: Incumbent | None
    plan: Plan
    ladder: tuple[RungState, ...] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    out: Mapping[str, int] = field(default_factory=dict)


def view_of(so_far: SoFar, rungs: Sequence[Rung], top: int, *, is_over: bool = False) -> SearchView:
    """Take down where a search stands now; of its `rungs`, those up to the one at `top` are open.

    `is_over`: there are no more trials, whatever the budget has left.
    """
    goal, budget, points = so_far.goal, so_far.budget, so_far.points
    left = 0 if is_over else max(0, budget.trials - len(so_far.tried))
    quality = so_far.judging
    chosen = so_far.finals().chosen
    return SearchView(
        objective=goal.objective,
        unit=metric_of(goal.objective_metric).unit,
        tried=len(so_far.tried),
        most=budget.trials,
        best=_best(so_far),
        plan=Plan(
            trials=left,
            left_s=so_far.left_s(),
            trial_s=trial_s(points),
            confirming_s=confirmation_s(points, budget),
            asking_s=0.0 if quality is None else quality.expected_s(chosen),
        ),
        ladder=_ladder(points, rungs, top),
        failures=_failures(so_far),
        out=_out(so_far),
    )


def _ladder(points: Sequence[Entry], rungs: Sequence[Rung], top: int) -> tuple[RungState, ...]:
    tried = Counter(e.trial.stack.harm for e in points if e.trial.number)
    found = [RungState(f"{STOCK} stock", "done", "", len(points) - tried.total())]
    for place, rung in enumerate(rungs):
        is_open = place <= top
        why = ", ".join(rung.opens)
        if not rung.opens:
            why = "; ".join(dict.fromkeys(rung.closed.values())) or "nothing to try here"
        elif not is_open:
            why = f"opens if the goal is missed: {why}"
        state: State = "open" if is_open and rung.opens else "closed"
        found.append(RungState(f"{rung.name} {rung.harm}", state, why, tried[rung.harm]))
    return tuple(found)


def _best(so_far: SoFar) -> Incumbent | None:
    """The one that may be shipped and is best, or closest to the goal; the baseline may be it."""
    goal, points = so_far.goal, so_far.distinct
    stock = [e for e in points if e.trial.number == 0 and objective_values(goal, e.measurement)]
    contenders = [*ranked(goal, so_far.contenders, so_far.gates)[:1], *stock]
    if not contenders:
        return None

    def value_of(entry: Entry) -> float:
        return fmean(objective_values(goal, entry.measurement))

    best = max(contenders, key=lambda one: (-missed_by(goal, one.measurement), value_of(one)))
    value = value_of(best)
    before = value_of(stock[0]) if stock else 0.0
    means = mean_metrics(best.measurement)
    return Incumbent(
        number=best.trial.number,
        settings=describe(best.trial.stack),
        value=value,
        over_stock=value / before if before > 0 else None,
        meets_goal=meets_goal(goal, best.measurement),
        margins=tuple(
            Margin(slo_text(slo), means.get(slo_key(slo)), slo.limit_s) for slo in goal.slos
        ),
        load=boundary_text(best.measurement),
    )


def _failures(so_far: SoFar) -> dict[str, int]:
    """How many measurements failed, by class, most frequent first."""
    failures = [entry.measurement.failure for entry in so_far.ledger.entries]
    return dict(Counter(one.failure.value for one in failures if one is not None).most_common())


def _out(so_far: SoFar) -> dict[str, int]:
    """How many measurements gave nothing to choose from although nothing failed."""
    ran = [entry for entry in so_far.ledger.entries if entry.measurement.failure is None]
    cut = [entry for entry in ran if entry.measurement.status is Status.CUT]
    refused = [one for one in ran if one not in cut and so_far.gates.objection(one)]
    return {name: len(of) for name, of in ((CUT, cut), (OUT, refused)) if of}
