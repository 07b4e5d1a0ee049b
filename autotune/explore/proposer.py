"""Proposes trials: a prior from simulations, corrected by what was measured, noise included.

Every point that may be tried is a candidate. What simulations expect of it is the mean of a model
of each response, which measurements move. The next trial is the one whose measurement should better
the choice most, by the chance that it runs at all and, where time is short, by its seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import JsonValue

from kvtune.autotune.explore.acquire import Outlook, surprise, worth
from kvtune.autotune.explore.base import NOT_OF_THE_POINT, Observation, Pick
from kvtune.autotune.explore.candidates import key_of
from kvtune.autotune.explore.crashes import chance_to_run
from kvtune.autotune.explore.durations import seconds_of_trials
from kvtune.autotune.explore.likeness import Floats, Ints
from kvtune.autotune.explore.noise import Noise
from kvtune.autotune.explore.prior import Foretell, Foretold, Prior
from kvtune.autotune.explore.reasons import Aim, Known, because
from kvtune.autotune.explore.region import Region
from kvtune.autotune.explore.regret import excess, expected_loss, regret_of
from kvtune.autotune.explore.responses import LEAST_RATE, RATE, SHARE, responses_of, score
from kvtune.autotune.explore.stopping import why_stop
from kvtune.autotune.explore.surrogate import Beliefs, fit
from kvtune.autotune.explore.weighing import weighing_of
from kvtune.autotune.limits import ENOUGH, Also
from kvtune.autotune.space import SearchSpace
from kvtune.policies.base import Context
from kvtune.profilers.metrics.base import metric_of
from kvtune.types import Goal, Interval, Regret

SCALES: Mapping[str, float] = {RATE: 1.0, SHARE: 4.0}
LIMIT_SCALE = 2.0
"""How large differences of each response are beside those of a log rate: an odds of 1 is passed at
a slope of a quarter, and tails of latencies move more than means."""

MISSED, MISSED_BLIND = 0.3, 0.4
"""What a simulation misses, in natural logs of a rate; and points differ by without one."""

FAILURE_COST = 0.05
"""What a launch that fails costs, as a share of the best objective: a trial that taught little."""

LEAST_GAIN, LEAST_AGAIN = 0.005, 0.002
"""Share of the best objective that one more trial must add by itself: of a new point, and of one
that was measured before. Where none does, the next trial goes to where the best may still hide: a
look one step ahead sees no worth in what takes two."""

ALIKE = 0.9
"""Of points that are worth this part of the most, the one with the fewest settings is tried."""

_NORMAL = np.array([-1.5, -0.8, -0.25, 0.25, 0.8, 1.5])
"""A handful of draws of the noise of one measurement."""


@dataclass(frozen=True, slots=True)
class _View:
    """What is believed of a region now. `runs` is 0 where a point failed or lies outside.

    `seen` are the points that were tried, `measured` those of them that have figures, and `settled`
    those that another trial could tell nothing of: given up early, or lost to the machine.
    """

    region: Region
    outlook: Outlook
    runs: Floats
    measured: Ints
    seen: frozenset[int]
    settled: Ints

    @property
    def is_open(self) -> bool:
        """Whether there is a point that nobody tried."""
        return len(self.seen) < len(self.region.points)


class ModelProposer:
    """Learns from observations, and chooses what to measure by what should better the choice most.

    Args:
        goal: whose objective and limits count.
        requests: how many a run has.
        foretell: what is expected of arguments before they are measured; None: nothing is.
        noise: standard deviation of one measurement of a response in natural logs, by its name.
        seed: of all draws. With equal observations and seeds the same is proposed.
        patience_s: how long simulations may take before an answer; what is not simulated by then
            is left for the next question.
        also: further objectives. Each trial is then chosen by another weight of all of them, and
            no trial is needless: every one may show another part of the front.
        enough: the share of the best objective whose expected loss ends the search; 0: none does.
    """

    def __init__(
        self,
        goal: Goal,
        *,
        requests: int = 64,
        foretell: Foretell | None = None,
        noise: Mapping[str, float] | None = None,
        seed: int = 0,
        patience_s: float = math.inf,
        also: Sequence[Also] = (),
        enough: float = ENOUGH,
    ) -> None:
        self._goal, self._requests, self._seed, self._also = goal, requests, seed, also
        self._patience_s, self._enough = patience_s, enough
        self._prior = Prior(foretell)
        self._noise = Noise(noise or {}, requests)
        self._seen: list[Observation] = []
        self._regions: dict[str, Region] = {}
        self._views: dict[str, tuple[int, _View]] = {}

    def observe(self, observation: Observation) -> None:
        """Learn from one measurement, failed or not."""
        self._seen.append(observation)

    def pick(
        self, space: SearchSpace, ctx: Context, *, seconds_left: float, trials_left: int
    ) -> Pick | None:
        """What to measure next; None when every point was tried. Not before the baseline was."""
        view = self._view(space, ctx)
        if not view.is_open:
            return None
        weighed = self._weighed(view, ctx)
        gains = self._gains(weighed)
        best = weighed.outlook.expected()[view.measured].max(initial=0.0)
        least = LEAST_AGAIN if int(gains.argmax()) in view.seen else LEAST_GAIN
        if float(gains.max()) <= least * best:
            return self._pick(view, self._surprising(weighed), Aim.LOOK)
        seconds = self._seconds(view)
        if float(np.mean(seconds)) * trials_left > seconds_left:
            gains = gains / seconds
        near = [int(row) for row in np.flatnonzero(gains >= ALIKE * gains.max())]
        points = view.region.points
        row = min(near, key=lambda at: (points[at].stack.cost, -gains[at]))
        return self._pick(view, row, Aim.GAIN)

    def stop(self, space: SearchSpace, ctx: Context) -> str:
        """Why the search may end before its budget; empty when it should go on."""
        view = self._view(space, ctx)
        best = self._best(view)
        if best is None or self._also:
            return ""
        return why_stop(
            trials=sum(one.task == 1 for one in self._seen),
            lost=expected_loss(excess(view.outlook, best, view.runs)),
            enough=self._enough,
            among=view.region.extent,
        )

    def chance(self, space: SearchSpace, ctx: Context) -> float:
        """The probability that an unmeasured point of `space` meets all limits of the goal."""
        view = self._view(space, ctx)
        fresh = [row for row in range(len(view.region.points)) if row not in view.seen]
        if not fresh:
            return 0.0
        held = view.outlook.drawn_to_hold()[:, fresh] * view.runs[fresh]
        return float(held.max(axis=1).mean())

    def recommended(self, space: SearchSpace, ctx: Context) -> Mapping[str, JsonValue] | None:
        """The arguments of the measured point that is thought best; None if none meets the goal."""
        view = self._view(space, ctx)
        best = self._best(view)
        if best is None:
            return None
        at = view.region.row_of
        return next(one.arguments for one in self._good() if at(one.arguments) == best)

    def regret(
        self, recommended: Mapping[str, JsonValue], space: SearchSpace, ctx: Context
    ) -> Regret:
        """How far the point with these arguments may be from the best one of `space`.

        Raises:
            ValueError: no point of `space` is served by them.
        """
        view = self._view(space, ctx)
        if (row := view.region.row_of(recommended)) is None:
            raise ValueError(f"no point of this space is served by {dict(recommended)!r}")
        return regret_of(view.outlook, row, view.runs, view.region.extent)

    def left_out(self, space: SearchSpace, ctx: Context) -> Mapping[str, str]:
        """Map a knob, or `knob=value`, to why it is tried only in stacks where it matters."""
        return self._view(space, ctx).region.left_out()

    # --- what is believed ---

    def _view(self, space: SearchSpace, ctx: Context) -> _View:
        name = key_of({e.knob.name: list(e.knob.choices) for e in space.knobs})
        if name not in self._regions:
            self._regions[name] = Region(space, ctx, self._prior, self._foretold_score, self._seed)
        count, view = self._views.get(name, (-1, None))
        if view is None or count != len(self._seen):
            region = self._regions[name]
            until_s = time.monotonic() + self._patience_s
            for one in self._seen:
                region.include(one.arguments)
            region.look(until_s)
            if view is not None:
                likely = view.outlook.expected() * (view.runs > 0)
                best = self._best(view)
                region.grow([int(likely.argmax()), *([] if best is None else [best])], until_s)
            view = self._believed(region)
            self._views[name] = len(self._seen), view
        return view

    def _believed(self, region: Region) -> _View:
        inside = len(region.points)
        outside: dict[str, Mapping[str, JsonValue]] = {}
        rows: list[int] = []
        for one in self._seen:
            row = region.row_of(one.arguments)
            if row is None:
                outside.setdefault(key_of(one.arguments), one.arguments)
                row = inside + list(outside).index(key_of(one.arguments))
            rows.append(row)
        field = region.field(list(outside.values()))
        arguments = [*(point.stack.arguments for point in region.points), *outside.values()]
        told = self._told(arguments)
        failures = [one.failure for one in self._seen]
        tasks = np.array([one.task for one in self._seen])
        runs = chance_to_run(field, np.array(rows, dtype=np.intp), failures, tasks)
        runs[inside:] = 0.0
        mine = [(row, one) for row, one in zip(rows, self._seen, strict=True) if one.task == 1]
        for row, one in mine:
            if one.failure is not None and one.failure not in NOT_OF_THE_POINT:
                runs[row] = 0.0
        good = {row for row, one in mine if one.failure is None and one.figures and row < inside}
        measured = np.array(sorted(row for row in good if runs[row] > 0), dtype=np.intp)
        beliefs: dict[str, Beliefs] = {}
        for at, name in enumerate(self._names()):
            samples = self._noise.samples(name, rows, self._seen, self._responses)
            beliefs[name] = fit(
                field,
                samples,
                told.get(name, np.zeros(len(arguments))),
                scale=SCALES.get(name, LIMIT_SCALE),
                noise=self._noise.variance(name, samples),
                centre=MISSED if name in told else MISSED_BLIND,
                seed=self._seed + at,
            )
        seen = frozenset(row for row, _ in mine if row < inside)
        whole = {row for row, one in mine if one.failure is None and one.share == 1}
        settled = np.array(sorted(seen - whole), dtype=np.intp)
        return _View(region, Outlook(beliefs), runs, measured, seen, settled)

    def _names(self) -> list[str]:
        """The responses that were measured, the rate among them in any case."""
        found = dict.fromkeys([RATE])
        for one in self._good():
            found |= dict.fromkeys(self._responses(one.figures))
        return list(found)

    def _told(self, arguments: Sequence[Mapping[str, JsonValue]]) -> dict[str, Floats]:
        """What is foretold of each response, less what is foretold of the baseline; (points,)."""
        stock = self._prior.of({})
        if stock is None:
            return {}
        base = self._responses(stock.figures)
        found = {name: np.zeros(len(arguments)) for name in base}
        for at, one in enumerate(arguments):
            known = self._prior.of(one)
            for name, value in () if known is None else self._responses(known.figures).items():
                if name in found:
                    found[name][at] = value - base[name]
        return found

    def _foretold_score(self, told: Foretold) -> float:
        """How good a point would be if ratios to the baseline were as foretold."""
        stock = self._prior.of({})
        base = {} if stock is None else self._responses(stock.figures)
        real = next((self._responses(o.figures) for o in self._good() if not o.arguments), base)
        responses = self._responses(told.figures)
        return score(
            {
                name: value - base.get(name, 0.0) + real.get(name, base.get(name, 0.0))
                for name, value in responses.items()
            }
        )

    def _responses(self, figures: Mapping[str, float]) -> dict[str, float]:
        return responses_of(figures, self._goal, self._requests)

    def _good(self) -> list[Observation]:
        return [one for one in self._seen if one.failure is None and one.figures]

    # --- what follows from it ---

    def _surprising(self, view: _View) -> int:
        """The point that nobody tried which may be the best by most; else the likeliest one.

        A look that promises little is not worth a launch that may fail.
        """
        fresh = np.array([row not in view.seen for row in range(len(view.region.points))])
        runs = view.runs[: len(fresh)] * fresh
        safe = np.where(runs >= ALIKE * runs.max(), runs, 0.0)
        hopes = surprise(view.outlook, view.measured)[: len(fresh)] * safe
        likely = view.outlook.expected()[: len(fresh)] * safe
        return int((hopes if hopes.max() > 0 else likely).argmax())

    def _weighed(self, view: _View, ctx: Context) -> _View:
        """What is believed, where there are further objectives by a weight of each."""
        if not self._also:
            return view
        at, points = view.region.row_of, view.region.points
        rows = [(row, one.costs) for one in self._good() if (row := at(one.arguments)) is not None]
        likely = np.maximum(view.outlook.expected() * view.runs, LEAST_RATE)
        seed = (self._seed, len(self._seen))
        weighing = weighing_of(self._also, points, rows, ctx, expected=likely, seed=seed)
        return replace(view, outlook=replace(view.outlook, weighing=weighing))

    def _gains(self, view: _View) -> Floats:
        """What a trial of each point adds, less what it costs if it fails."""
        gains = worth(view.outlook, view.measured) * view.runs
        best = float(view.outlook.expected()[view.measured].max(initial=0.0))
        found: Floats = gains - FAILURE_COST * best * (1 - view.runs)
        found[view.settled] = np.minimum(found[view.settled], 0.0)
        return found

    def _best(self, view: _View) -> int | None:
        """The measured point that is thought best among those that rather meet the goal."""
        holds = view.outlook.chance_to_hold()
        able = [int(row) for row in view.measured if holds[row] >= 0.5]
        expected = view.outlook.expected()
        return max(able, key=lambda row: expected[row], default=None)

    def _seconds(self, view: _View) -> Floats:
        """What a trial of each point takes."""
        rates = {
            at: math.exp(found[RATE])
            for at, one in enumerate(self._seen)
            if one.share == 1 and RATE in (found := self._responses(one.figures))
        }
        walls_s = [one.wall_s for one in self._seen]
        return seconds_of_trials(walls_s, rates, np.exp(view.outlook.beliefs[RATE].mean))

    def _pick(self, view: _View, row: int, aim: Aim) -> Pick:
        point = view.region.points[row]
        again = row in view.seen
        noise = np.exp(np.sqrt(view.outlook.beliefs[RATE].noise) * _NORMAL)
        drawn = (view.outlook.drawn()[:, row, None] * noise).ravel()
        low, high = (float(one) for one in np.quantile(drawn, (0.05, 0.95)))
        unit = metric_of(self._goal.objective_metric).unit
        middle = float(view.outlook.middle()[row])
        expected = Interval(
            estimate=middle,
            low=min(low, middle),
            high=max(high, middle),
            unit=unit,
            confidence=0.9,
            repeats=len(self._good()),
            method="draws of the search's model",
        )
        best = self._best(view)
        known = Known(
            measured=len(self._good()),
            is_simulated=self._prior.of(point.stack.arguments) is not None,
            best=None if best is None else float(view.outlook.middle()[best]),
        )
        why = because(Aim.AGAIN if again else aim, expected, known)
        return Pick(dict(point.values), point.stack, why, expected, again)
