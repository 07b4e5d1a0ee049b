"""The product's own search on a surface: its loop, ledger, store and tables, and no server.

What its model recommends after each trial is noted as it goes, as for any other search.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import cast

from pydantic import JsonValue
from regret_noise import begin_s, noise_of
from regret_report import Replay
from regret_rivals import requests_on
from surface_bench import (
    Judge,
    RecordedSurface,
    Surface,
    SurfaceRunner,
    plan_of,
    point_of,
    requests_of,
    space_of,
    stock_of,
)
from surface_spec import Point

from kvtune.autotune.early_stop import EarlyStop
from kvtune.autotune.explore.advice import Advice
from kvtune.autotune.explore.base import Observation, Pick
from kvtune.autotune.explore.loop import Exploration
from kvtune.autotune.explore.proposer import ModelProposer
from kvtune.autotune.forecast.foresight import foresight_of
from kvtune.autotune.ledger import RUNG_BASELINE, Ledger, RequestSet
from kvtune.autotune.limits import ENOUGH, Budget, Rules
from kvtune.autotune.reporting import Quiet
from kvtune.autotune.search import Search
from kvtune.autotune.so_far import SoFar
from kvtune.autotune.space import SearchSpace
from kvtune.autotune.study import open_study
from kvtune.autotune.trial import Bench
from kvtune.engines.base import Engine
from kvtune.policies.base import Context
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.store.database import open_store
from kvtune.types import PolicyStack, Regret, Request, Workload

NAME = "product"
SAYS = "kvtune search itself: its loop, early stops, repeats and stopping rule, with its model"
WHOLE = "product-whole"
WHOLE_SAYS = "the same with `--enough 0`: it does not end before its budget"
ENDLESS_S = 1e6
"""However slow the machine is that replays, nothing is drawn at random for want of time."""

MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class Noting:
    """The model of the search; notes what it would recommend after each trial, and what it took."""

    model: ModelProposer
    surface: Surface
    seen: int = 0
    choices: dict[int, Point] = field(default_factory=dict)
    stops_at: int | None = None
    ask_s: float = 0.0

    def observe(self, observation: Observation) -> None:
        """One trial more."""
        self.seen += 1
        self.model.observe(observation)

    def pick(
        self, space: SearchSpace, ctx: Context, *, seconds_left: float, trials_left: int
    ) -> Pick | None:
        """What the model picks."""
        began_s = time.perf_counter()
        found = self.model.pick(space, ctx, seconds_left=seconds_left, trials_left=trials_left)
        self.ask_s += time.perf_counter() - began_s
        return found

    def stop(self, space: SearchSpace, ctx: Context) -> str:
        """Whether the model would end here; it is asked after every trial."""
        began_s = time.perf_counter()
        chosen = self.model.recommended(space, ctx) or {}
        self.choices[self.seen] = point_of(self.surface.axes, chosen)
        says = self.model.stop(space, ctx)
        if says and self.stops_at is None:
            self.stops_at = self.seen
        self.ask_s += time.perf_counter() - began_s
        return says

    def chance(self, space: SearchSpace, ctx: Context) -> float:
        """As the model."""
        return self.model.chance(space, ctx)

    def left_out(self, space: SearchSpace, ctx: Context) -> Mapping[str, str]:
        """As the model."""
        return self.model.left_out(space, ctx)

    def regret(
        self, recommended: Mapping[str, JsonValue], space: SearchSpace, ctx: Context
    ) -> Regret:
        """As the model."""
        return self.model.regret(recommended, space, ctx)

    def recommended(self, space: SearchSpace, ctx: Context) -> Mapping[str, JsonValue] | None:
        """As the model."""
        return self.model.recommended(space, ctx)


def replay_product(
    surface: Surface,
    judge: Judge,
    seed: int,
    trials: int,
    *,
    name: str = NAME,
    enough: float = ENOUGH,
) -> Replay:
    """One search of at most so many trials, stock among them, and what its choices were worth."""
    random = Random(f"search {seed}")
    model = ModelProposer(
        surface.goal,
        requests=requests_on(surface),
        foretell=surface.foretell(random),
        seed=random.getrandbits(31),
        enough=enough,
    )
    noting = Noting(model, surface)
    runner = SurfaceRunner(surface, random, begin_s(seed), noise=noise_of(surface, seed))
    with ExitStack() as stack:
        memory = str(MEMORY) if MEMORY.is_dir() else None
        directory = Path(stack.enter_context(TemporaryDirectory(dir=memory)))
        exploration = exploration_on(surface, noting, runner, directory, seed, trials, stack)
        exploration.run()
        # What came of the last trial is told before the next question.
        exploration.advice.stop(exploration.rungs[-1].space)
        exploration.advice.end()
        tried = exploration.so_far.tried
        failed = tuple(at for at, one in enumerate(tried) if one.measurement.failure is not None)
        walls_s = tuple(round(one.measurement.wall_s or 0.0, 2) for one in tried)
    chosen = stock_of(surface.axes)
    worth = []
    for number in range(1, trials + 1):
        chosen = noting.choices.get(number, chosen)
        worth.append(round(judge.worth[chosen], 5))
    return Replay(
        surface=surface.name,
        method=name,
        seed=seed,
        worth=tuple(worth),
        failed=failed,
        walls_s=walls_s,
        stops_at=noting.stops_at,
        points=len({point_of(surface.axes, one.trial.stack.arguments) for one in tried}),
        ask_s=round(noting.ask_s / len(tried), 4),
    )


def exploration_on(
    surface: Surface,
    proposer: Noting,
    runner: SurfaceRunner,
    directory: Path,
    seed: int,
    trials: int,
    stack: ExitStack,
) -> Exploration:
    """The search, whose baseline is measured, over what the surface has."""
    ctx, requests, plan = surface.context, _requests(surface), _plan(surface)
    store = stack.enter_context(open_store(directory / "kvtune.db"))
    study = open_study(
        store,
        name="replay",
        model="org/model",
        served_model_name=None,
        engine=ctx.engine,
        device=ctx.device,
        workload=Workload("replay", "replay", requests, (), fingerprint(requests)),
        plan=plan,
        goal=surface.goal,
        base_arguments=ctx.base_arguments,
        environment={},
        repeats=1,
        seed=seed,
    )
    bench = Bench(
        engine=cast(Engine, None),
        model="org/model",
        served_model_name=None,
        environment={},
        plan=plan,
        goal=surface.goal,
        log_dir=directory,
        reporter=Quiet(),
    )
    ledger = Ledger(store, study, bench, remeasure=False, run=runner)
    so_far = SoFar(surface.goal, ledger, Budget(trials=trials), None, runner.clock)
    ledger.watch = EarlyStop(so_far).watch
    asked = RequestSet(requests, "replay")
    ledger.run(PolicyStack(), asked, repeats=1, seed=seed, rung=RUNG_BASELINE, canary=True)
    exploration = Exploration(
        so_far,
        Rules(explore_lossy=True, seed=seed),
        asked,
        ctx,
        Search("replay", store.url, seed=seed),
        foresight_of(store, study, plan),
        Quiet(),
        (),
        proposer,
    )
    cut = space_of(surface.axes, ctx)
    names = {entry.knob.name for entry in cut.knobs}
    exploration.rungs = tuple(
        replace(
            rung,
            space=SearchSpace(
                tuple(
                    entry
                    for entry in cut.knobs
                    if entry.knob.name in {one.knob.name for one in rung.space.knobs}
                ),
                rung.space.refusals,
            ),
            opens=tuple(name for name in rung.opens if name.partition("=")[0] in names),
        )
        for rung in exploration.rungs
    )
    exploration.advice.end()
    exploration.advice = Advice(proposer, so_far, ctx, (), limit_s=ENDLESS_S)
    return exploration


def _requests(surface: Surface) -> tuple[Request, ...]:
    if isinstance(surface, RecordedSurface):
        return requests_of(surface.recording.header)
    return (Request(input_tokens=1, output_tokens=1),)


def _plan(surface: Surface) -> LoadPlan:
    if isinstance(surface, RecordedSurface):
        return plan_of(surface.recording.header)
    return LoadPlan(ClosedLoop(1))
