"""A recorded surface in the place of servers: searches run on it as on the real thing, in seconds.

What a search measures is drawn from what was recorded: requests of a run of that point, drawn anew,
with fresh noise, on a machine that drifts as the recorded one did. What it chose is then judged by
the truth of the surface, which it never sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

import numpy as np
from pydantic import JsonValue
from surface_file import Header, Recording, effective_of
from surface_spec import Axis, Point, changed
from surface_truth import Truth, truth_of

from kvtune.autotune.explore.candidates import key_of
from kvtune.autotune.explore.prior import Foretell, Foretold, simulated_by
from kvtune.autotune.forecast.predict import make_forecaster
from kvtune.autotune.space import SearchSpace, build_space, infeasible_reason
from kvtune.autotune.trial import AtServer, Bench
from kvtune.engines.vllm.live import live_arguments
from kvtune.kernels.device import DeviceDetail
from kvtune.policies.base import Context
from kvtune.policies.model_shape import ModelShape
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.goal import goal_violations, parse_goal, slo_key
from kvtune.profilers.load.client import TICK_S, ClosedLoop, Watch
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.synthetic import SyntheticSpec, make_requests
from kvtune.types import (
    Choice,
    EffectiveConfig,
    Failure,
    FailureClass,
    Goal,
    Harm,
    LoadRun,
    Measurement,
    PolicyStack,
    Request,
    RequestRecord,
    Status,
    Trial,
)

TIGHT = 0.6
CANARY = ("7194", "5823", "3461")
"""Answers that a recording has not: every point counts as right."""

TOLERATED = 0.03
"""How far a limit may be missed by what a search recommends before it is worth nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search sees of one measurement; no figures if it failed, as `message` tells.

    `server_s` is what the start and the end of its server are of `wall_s`.
    """

    figures: Mapping[str, float]
    wall_s: float
    failure: FailureClass | None = None
    run: LoadRun | None = None
    message: str = ""
    server_s: float = 0.0


class Surface(Protocol):
    """What a search can be run on, and what it is judged by."""

    name: str
    goal: Goal
    axes: tuple[Axis, ...]

    @property
    def points(self) -> Sequence[Point]:
        """Every point that can be measured."""
        ...

    @property
    def effective(self) -> Mapping[Point, EffectiveConfig]:
        """What the engine said that it ran with, where it was recorded."""
        ...

    @property
    def context(self) -> Context:
        """What policies may ask about."""
        ...

    def measured(self, point: Point, random: Random, at_s: float) -> Outcome:
        """One measurement of a point, begun at a time of the search."""
        ...

    def figures(self, point: Point) -> Mapping[str, float]:
        """The true figures of a point; none where it fails."""
        ...

    def foretell(self, random: Random) -> Foretell | None:
        """What simulations say of it to a search with its own baseline; None: nothing."""
        ...


@dataclass(slots=True)
class Judge:
    """What recommendations on a surface are worth: the share of the best that there is."""

    surface: Surface
    worth: dict[Point, float] = field(init=False)
    best: float = field(init=False)

    def __post_init__(self) -> None:
        surface = self.surface
        exact = [worth(surface.figures(point), surface.goal, 0.0) for point in surface.points]
        self.best = max(exact)
        self.worth = {
            point: min(1.0, worth(surface.figures(point), surface.goal, TOLERATED) / self.best)
            if self.best > 0
            else 0.0
            for point in surface.points
        }


def worth(figures: Mapping[str, float], goal: Goal, tolerated: float) -> float:
    """The objective, or 0 where a limit is missed by more than `tolerated`."""
    for violation in goal_violations(goal, figures).values():
        if violation is None or violation > tolerated:
            return 0.0
    return figures.get(goal.objective_metric, 0.0)


def stock_of(axes: Sequence[Axis]) -> Point:
    """The point that sets nothing."""
    return tuple(axis.stock for axis in axes)


def point_of(axes: Sequence[Axis], arguments: Mapping[str, JsonValue]) -> Point:
    """The point that arguments on top of the base ones are at."""
    return tuple(arguments.get(axis.argument, axis.stock) for axis in axes)


def space_of(axes: Sequence[Axis], ctx: Context) -> SearchSpace:
    """What kvtune would search here, cut down to the values that the surface has."""
    built = build_space(ctx, harm=Harm.NEAR_LOSSLESS)
    recorded = {axis.knob: axis.values for axis in axes}
    knobs = []
    for entry in built.knobs:
        values = [value for value in recorded.get(entry.knob.name, ()) if entry.knob.allows(value)]
        if len(values) > 1:
            knob = replace(entry.knob, kind="choice", low=None, high=None, choices=tuple(values))
            knobs.append(replace(entry, knob=knob))
    return SearchSpace(tuple(knobs), built.refusals)


def known_to_fail(axes: Sequence[Axis], point: Point, ctx: Context) -> str | None:
    """Why kvtune would not launch a point; None if it would."""
    arguments = changed(axes, point)
    choice = Choice(policy="surface", parameters={}, arguments=arguments, harm=Harm.LOSSLESS)
    return infeasible_reason(PolicyStack(choices=(choice,)), ctx)


@dataclass(slots=True)
class RecordedSurface:
    """A recording under a goal. `drift`: the machine of a search drifts as the recorded one did."""

    recording: Recording
    goal: Goal
    name: str
    truth: Truth
    drift: bool = True
    axes: tuple[Axis, ...] = field(init=False)
    context: Context = field(init=False)
    effective: Mapping[Point, EffectiveConfig] = field(init=False)
    _figures: dict[Point, Mapping[str, float]] = field(default_factory=dict)
    _foretells: dict[int, Foretell] = field(default_factory=dict)

    def __post_init__(self) -> None:
        header = self.recording.header
        self.axes = tuple(Axis(axis.argument, axis.values, axis.stock) for axis in header.axes)
        self.context = context_of(header)
        self.effective = {
            tuple(line.point): effective_of(line, header)
            for line in self.recording.lines
            if line.ok
        }

    @property
    def points(self) -> Sequence[Point]:
        """Every point that was measured."""
        return list(self.truth.points)

    def measured(self, point: Point, random: Random, at_s: float) -> Outcome:
        """One measurement, drawn anew."""
        known = self.truth.points[point]
        if known.failure is not None:
            return Outcome({}, known.aside_s, known.failure, message=known.message)
        run = known.draw(random, self.truth.slowness(at_s) if self.drift else 1.0)
        wall_s = known.aside_s + run.duration_s
        return Outcome(measure(run, self.goal), wall_s, None, run, server_s=known.server_s)

    def figures(self, point: Point) -> Mapping[str, float]:
        """The true figures of a point."""
        if point not in self._figures:
            self._figures[point] = self.truth.points[point].figures(self.goal)
        return self._figures[point]

    def foretell(self, random: Random) -> Foretell | None:
        """The product's simulation, calibrated on one of the stock measurements."""
        runs = self.truth.points[stock_of(self.axes)].runs
        chosen = random.randrange(len(runs))
        if chosen not in self._foretells:
            header = self.recording.header
            forecaster = make_forecaster(
                requests_of(header),
                plan_of(header),
                runs[chosen],
                self.goal,
                self.context,
                header.step_time,
            )
            self._foretells[chosen] = remembered(simulated_by(forecaster))
        return self._foretells[chosen]


def recorded_surfaces(recording: Recording, *, shrink: bool = True) -> list[RecordedSurface]:
    """A recording under three goals: none, its own, and limits that a good part misses."""
    header, truth = recording.header, truth_of(recording, shrink=shrink)
    goals = goals_of(header, truth)
    return [
        RecordedSurface(recording, goal, f"{header.name}, {kind}", truth)
        for kind, goal in goals.items()
    ]


def goals_of(header: Header, truth: Truth) -> dict[str, Goal]:
    """Three goals for a surface: without limits, its own, and with limits that many points miss.

    The last has each limit of its own goal where three in five of the points that meet that are.
    """
    loose = parse_goal(header.goal)
    free = loose.model_copy(update={"slos": ()})
    told = [found.figures(loose) for found in truth.points.values() if found.failure is None]
    meeting = [figures for figures in told if worth(figures, loose, 0.0) > 0]
    if not meeting:
        return {"no limits": free, "its own limits": loose}
    slos = []
    for slo in loose.slos:
        limit_s = float(np.quantile([one[slo_key(slo)] for one in meeting], TIGHT))
        slos.append(slo.model_copy(update={"limit_s": round(limit_s, 4)}))
    tight = loose.model_copy(update={"slos": tuple(slos)})
    return {"no limits": free, "its own limits": loose, "tight limits": tight}


def context_of(header: Header) -> Context:
    """What policies could have asked about when the surface was recorded."""
    return Context(
        engine=header.engine,
        device=header.device,
        model=ModelShape(**header.model_shape) if header.model_shape else None,  # type: ignore[arg-type]
        baseline=header.effective,
        base_arguments=header.base_arguments,
        fingerprint=fingerprint(requests_of(header)),
        verdict=header.verdict,
        max_concurrency=header.max_concurrency,
        detail=DeviceDetail(None, frozenset(header.cpu_flags)),
    )


def requests_of(header: Header) -> tuple[Request, ...]:
    """The requests of each measurement, but for their tokens."""
    return tuple(make_requests(SyntheticSpec(**header.load), header.seed))  # type: ignore[arg-type]


def plan_of(header: Header) -> LoadPlan:
    """How they were sent."""
    return LoadPlan(
        ClosedLoop(header.concurrency),
        warmup_requests=header.warmup_requests,
        vocab_size=header.vocab_size,
    )


def remembered(foretell: Foretell) -> Foretell:
    """The same, asked once for each arguments."""
    known: dict[str, Foretold | None] = {}

    def asked(arguments: Mapping[str, JsonValue]) -> Foretold | None:
        key = key_of(arguments)
        if key not in known:
            known[key] = foretell(arguments)
        return known[key]

    return asked


@dataclass(slots=True)
class SurfaceRunner:
    """Measures the trials of a real search on a surface; its clock is `now_s`.

    `noise` gives what the next measurement of a point is drawn with, where that is not `random`.
    With `reuse`, a server is changed instead of started anew wherever `ServerPool` does that with
    vLLM on a CPU; the milliseconds that it takes are left out.
    """

    surface: Surface
    random: Random
    now_s: float = 0.0
    noise: Callable[[Point], Random] | None = None
    reuse: bool = False
    _running: frozenset[tuple[str, JsonValue]] | None = None

    def clock(self) -> float:
        """The time of the search."""
        return self.now_s

    def __call__(
        self,
        trial: Trial,
        bench: Bench,
        requests: Sequence[Request],
        *,
        canary: bool,
        label: str = "trial",
        afterwards: AtServer | None = None,
        watch: Watch | None = None,
    ) -> tuple[Measurement, tuple[LoadRun, ...]]:
        """Draw a measurement of the trial's point; there is no server that could be asked.

        `watch` sees its requests end as on a server, and what it spares is no time of the search.
        """
        point = point_of(self.surface.axes, trial.stack.arguments)
        outcomes = [self._on_server(trial, self._measured(point))]
        whole = outcomes[0].run
        if watch is not None and whole is not None:
            run = watched(whole, watch)
            if run.cut:
                wall_s = outcomes[0].wall_s - whole.duration_s + run.duration_s
                self.now_s += wall_s
                found = Measurement(
                    status=Status.CUT,
                    metrics={
                        name: (value,) for name, value in measure(run, self.surface.goal).items()
                    },
                    effective=self.surface.effective.get(point),
                    requests_per_repeat=len(run.records),
                    canary_answers=CANARY if canary else None,
                    wall_s=wall_s,
                    load_s=run.duration_s,
                    share=len(run.records) / len(whole.records),
                    cut=run.cut,
                )
                return found, (run,)
        while len(outcomes) < trial.repeats:
            outcomes.append(self._measured(point))
        wall_s = sum(outcome.wall_s for outcome in outcomes)
        self.now_s += wall_s
        if (failure := outcomes[0].failure) is not None:
            failed = Failure(failure=failure, message=outcomes[0].message)
            return Measurement(status=Status.FAILED, failure=failed, wall_s=wall_s), ()
        names = outcomes[0].figures
        found = Measurement(
            status=Status.OK,
            metrics={name: tuple(one.figures[name] for one in outcomes) for name in names},
            effective=self.surface.effective.get(point),
            requests_per_repeat=len(requests),
            canary_answers=CANARY if canary else None,
            wall_s=wall_s,
            load_s=sum(one.run.duration_s for one in outcomes if one.run is not None),
        )
        return found, tuple(one.run for one in outcomes if one.run is not None)

    def _on_server(self, trial: Trial, outcome: Outcome) -> Outcome:
        """The outcome without the start of a server where the one before could be changed."""
        arguments = {**self.surface.context.base_arguments, **trial.stack.arguments}
        live = live_arguments(arguments, keeps_sizes=True)
        cold = frozenset((name, value) for name, value in arguments.items() if name not in live)
        was, self._running = self._running, None if outcome.failure is not None else cold
        if not self.reuse or was != cold:
            return outcome
        return replace(outcome, wall_s=outcome.wall_s - outcome.server_s)

    def _measured(self, point: Point) -> Outcome:
        random = self.random if self.noise is None else self.noise(point)
        return self.surface.measured(point, random, self.now_s)


def watched(run: LoadRun, watch: Watch) -> LoadRun:
    """A recorded run as far as `watch` lets it go, who is asked as often as by the load client."""
    left = sorted(run.records, key=lambda record: record.end_s)
    seen: list[RequestRecord] = []
    ticks = 0
    while left:
        ticks += 1
        now_s = ticks * TICK_S
        while left and left[0].end_s <= now_s:
            seen.append(left.pop(0))
            watch.saw(seen[-1])
        if left and (cut := watch.verdict(now_s)):
            records = tuple(sorted(seen, key=lambda record: record.index))
            return replace(run, records=records, duration_s=now_s, cut=cut)
    return run
