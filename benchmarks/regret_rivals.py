"""The searches that are compared on a surface: kvtune's own, and those that it has to beat.

All start from one measurement of stock, see the same noise for the same seed, and, unless it is
their point not to, leave out what kvtune's arithmetic knows cannot start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random
from statistics import fmean
from typing import ClassVar

import optuna
from optuna.samplers import TPESampler
from optuna.trial import Trial, TrialState
from pydantic import JsonValue
from surface_bench import (
    Outcome,
    RecordedSurface,
    Surface,
    known_to_fail,
    point_of,
    requests_of,
    space_of,
    stock_of,
    worth,
)
from surface_spec import Point, changed
from synthetic_surfaces import REQUESTS

from kvtune.autotune.explore.base import Observation, Proposer
from kvtune.autotune.explore.proposer import ModelProposer
from kvtune.autotune.guesses import first_guesses
from kvtune.profilers.goal import goal_violations

TRIES = 10
"""How often TPE may propose what is known before a point is drawn blindly, as in kvtune."""


class Method:
    """A search on a surface. Ask, measure, tell, in turns; the first one told is stock.

    `random` is for its own choices.
    """

    name: ClassVar[str]
    says: ClassVar[str]
    filters: ClassVar[bool] = True

    def __init__(self, surface: Surface, random: Random) -> None:
        self.surface, self.random = surface, random
        self.stock = stock_of(surface.axes)
        self.seen: dict[Point, list[Outcome]] = {}
        self.able = [point for point in surface.points if self.may_run(point)]

    def ask(self, trials_left: int) -> Point | None:
        """What to measure next; None: nothing is left."""
        raise NotImplementedError

    def tell(self, point: Point, outcome: Outcome, at_s: float) -> None:
        """What came of it, begun at `at_s`."""
        self.seen.setdefault(point, []).append(outcome)

    def recommended(self) -> Point:
        """What would be chosen now: the best mean that meets the goal, or stock."""
        best = max(self.seen, key=lambda point: (self.observed(point), point == self.stock))
        return best if self.observed(best) > 0 else self.stock

    def wants_to_stop(self) -> bool:
        """Whether it would end here if it had a choice."""
        return False

    def observed(self, point: Point) -> float:
        """What a point seems to be worth; 0 if it failed or misses a limit."""
        good = [one.figures for one in self.seen.get(point, ()) if one.failure is None]
        if not good:
            return 0.0
        means = {name: fmean(figures[name] for figures in good) for name in good[0]}
        return worth(means, self.surface.goal, 0.0)

    def may_run(self, point: Point) -> bool:
        """Whether nothing speaks against launching a point, for those that look."""
        if not self.filters:
            return True
        return known_to_fail(self.surface.axes, point, self.surface.context) is None

    def fresh(self) -> list[Point]:
        """What was not measured yet and may run."""
        return [point for point in self.able if point not in self.seen]


class AtRandom(Method):
    """Any new point."""

    name = "random"
    says = "random points, none twice"

    def ask(self, trials_left: int) -> Point | None:
        """One that is new."""
        fresh = self.fresh()
        return self.random.choice(fresh) if fresh else None


class InOrder(Method):
    """The grid from its first point on."""

    name = "grid"
    says = "the grid in its order"

    def ask(self, trials_left: int) -> Point | None:
        """The next one."""
        return next(iter(self.fresh()), None)


class Greedy(Method):
    """One lever after the other, each at the best value so far; then pairs of near-winners."""

    name = "greedy"
    says = "lever by lever, the best value kept, then pairs of second-best values"

    def __init__(self, surface: Surface, random: Random) -> None:
        super().__init__(surface, random)
        self._plan = self._stages()

    def ask(self, trials_left: int) -> Point | None:
        """The next of its stages, then any new point."""
        for point in self._plan:
            if point not in self.seen and point in self.able:
                return point
        fresh = self.fresh()
        return self.random.choice(fresh) if fresh else None

    def _stages(self) -> Iterator[Point]:
        axes = self.surface.axes
        # What may change answers comes last, as in kvtune.
        order = sorted(range(len(axes)), key=lambda at: axes[at].argument == "kv-cache-dtype")
        best = self.stock
        seconds: dict[int, Point] = {}
        for at in order:
            line = [_moved(best, at, value) for value in axes[at].values]
            yield from line
            ranked = sorted(line, key=self.observed, reverse=True)
            best = max((best, ranked[0]), key=self.observed)
            seconds[at] = next(point for point in ranked if point[at] != best[at])
        for one, other in combinations(order, 2):
            yield _moved(_moved(best, one, seconds[one][one]), other, seconds[other][other])


class Tpe(Method):
    """Optuna's TPE by itself: it may propose what it knows, and what cannot start."""

    name = "tpe"
    says = "Optuna's TPE with its defaults: failures are told as such, what is known is paid again"
    filters = False

    def __init__(self, surface: Surface, random: Random) -> None:
        super().__init__(surface, random)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(
            direction="maximize", sampler=self._sampler(random.getrandbits(31))
        )
        self._study.enqueue_trial(self._encoded(self.stock))
        self._open: dict[Point, Trial] = {}
        self._asked()

    def ask(self, trials_left: int) -> Point | None:
        """What TPE proposes."""
        return self._asked()

    def tell(self, point: Point, outcome: Outcome, at_s: float) -> None:
        """Goodput, which has the limits in it, or the failure."""
        super().tell(point, outcome, at_s)
        self._told(point, outcome)

    def _sampler(self, seed: int) -> TPESampler:
        return TPESampler(seed=seed)

    def _asked(self) -> Point:
        trial = self._study.ask()
        values = []
        for axis in self.surface.axes:
            if _is_ordered(axis.values):
                values.append(
                    axis.values[trial.suggest_int(axis.argument, 0, len(axis.values) - 1)]
                )
            else:
                values.append(trial.suggest_categorical(axis.argument, list(axis.values)))
        point = tuple(values)
        self._open[point] = trial
        return point

    def _told(self, point: Point, outcome: Outcome) -> None:
        trial = self._open.pop(point)
        if outcome.failure is not None:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        self._study.tell(trial, outcome.figures[self.surface.goal.objective_metric])

    def _encoded(self, point: Point) -> dict[str, object]:
        return {
            axis.argument: axis.values.index(value) if _is_ordered(axis.values) else value
            for axis, value in zip(self.surface.axes, point, strict=True)
        }


class TpeFiltered(Tpe):
    """TPE as kvtune used it: levers together, limits and failures as constraints, nothing twice."""

    name = "tpe-filtered"
    says = "TPE over all levers together, limits as constraints, with the filter and nothing twice"
    filters = True

    def ask(self, trials_left: int) -> Point | None:
        """What TPE proposes if it is new, else any new point."""
        for _ in range(TRIES):
            point = self._asked()
            if point in self.seen:
                self._told(point, self.seen[point][-1])
            elif point not in self.able:
                self._failed(self._open.pop(point))
            else:
                return point
        fresh = self.fresh()
        if not fresh:
            return None
        self._study.enqueue_trial(self._encoded(self.random.choice(fresh)))
        return self._asked()

    def _sampler(self, seed: int) -> TPESampler:
        return TPESampler(multivariate=True, seed=seed)

    def _told(self, point: Point, outcome: Outcome) -> None:
        trial = self._open.pop(point)
        if outcome.failure is not None:
            self._failed(trial)
            return
        goal = self.surface.goal
        trial.set_constraint("runs", 0.0)
        for text, violation in goal_violations(goal, outcome.figures).items():
            trial.set_constraint(text, 1.0 if violation is None else violation)
        self._study.tell(trial, outcome.figures[goal.objective_metric])

    def _failed(self, trial: Trial) -> None:
        trial.set_constraint("runs", 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)


class Guessed(TpeFiltered):
    """kvtune's search before it had a model: first what the verdict suggests, then TPE."""

    name = "guesses-tpe"
    says = "what the verdict suggests, then TPE with the filter"

    def __init__(self, surface: Surface, random: Random) -> None:
        super().__init__(surface, random)
        context = surface.context
        if context.verdict is not None:
            space = space_of(surface.axes, context)
            for values in first_guesses(space, context.verdict.bottleneck):
                point = tuple(values.get(axis.knob, axis.stock) for axis in surface.axes)
                if point != self.stock:
                    self._study.enqueue_trial(self._encoded(point))


class Forecast(Method):
    """The points in the order of what simulations say of them."""

    name = "forecast"
    says = "in the order of what simulations say, uncorrected"

    def __init__(self, surface: Surface, random: Random) -> None:
        super().__init__(surface, random)
        foretell = surface.foretell(random)
        self._told: dict[Point, float] = {}
        for point in self.able:
            found = foretell(changed(surface.axes, point)) if foretell else None
            self._told[point] = 0.0 if found is None else worth(found.figures, surface.goal, 0.0)

    def ask(self, trials_left: int) -> Point | None:
        """The best of those that are left; any of equals."""
        fresh = self.fresh()
        self.random.shuffle(fresh)
        return max(fresh, key=self._told.__getitem__, default=None)


class Kvtune(Method):
    """kvtune's own search."""

    name = "kvtune"
    says = "kvtune: simulations, corrected by what is measured"

    def __init__(self, surface: Surface, random: Random) -> None:
        super().__init__(surface, random)
        self._space = space_of(surface.axes, surface.context)
        self._proposer = self._made(random)

    def ask(self, trials_left: int) -> Point | None:
        """What it picks; measured points may come again."""
        pick = self._proposer.pick(
            self._space, self.surface.context, seconds_left=float("inf"), trials_left=trials_left
        )
        return None if pick is None else point_of(self.surface.axes, pick.stack.arguments)

    def tell(self, point: Point, outcome: Outcome, at_s: float) -> None:
        """Everything that was measured."""
        super().tell(point, outcome, at_s)
        self._proposer.observe(
            Observation(
                arguments=changed(self.surface.axes, point),
                figures=outcome.figures,
                at_s=at_s,
                wall_s=outcome.wall_s,
                failure=outcome.failure,
            )
        )

    def recommended(self) -> Point:
        """By its model, not by the luckiest measurement."""
        found = self._proposer.recommended(self._space, self.surface.context)
        return self.stock if found is None else point_of(self.surface.axes, found)

    def wants_to_stop(self) -> bool:
        """By its own rule."""
        return bool(self._proposer.stop(self._space, self.surface.context))

    def _made(self, random: Random) -> Proposer:
        return ModelProposer(
            self.surface.goal,
            requests=requests_on(self.surface),
            foretell=self.surface.foretell(random),
            seed=random.getrandbits(31),
        )


class Untold(Kvtune):
    """kvtune's own search where no simulation is at hand."""

    name = "kvtune-untold"
    says = "kvtune without simulations"

    def _made(self, random: Random) -> Proposer:
        return ModelProposer(
            self.surface.goal, requests=requests_on(self.surface), seed=random.getrandbits(31)
        )


def requests_on(surface: Surface) -> int:
    """How many requests a measurement on a surface has."""
    if isinstance(surface, RecordedSurface):
        return len(requests_of(surface.recording.header))
    return REQUESTS


def methods() -> dict[str, type[Method]]:
    """All of them by name, kvtune's first."""
    every = (Kvtune, Untold, Forecast, AtRandom, Tpe, TpeFiltered, Guessed, Greedy, InOrder)
    return {method.name: method for method in every}


def _moved(point: Point, at: int, value: JsonValue) -> Point:
    return (*point[:at], value, *point[at + 1 :])


def _is_ordered(values: Sequence[object]) -> bool:
    return all(type(value) in (int, float) for value in values)
