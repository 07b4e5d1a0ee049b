"""kvtune's model and races on a recorded surface, with and without what makes trials cheap."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from surface_bench import (
    Judge,
    RecordedSurface,
    SurfaceRunner,
    plan_of,
    point_of,
    requests_of,
    space_of,
    stock_of,
)
from surface_spec import Point

from kvtune.autotune.baseline import measure_baseline
from kvtune.autotune.early_stop import EarlyStop
from kvtune.autotune.explore.advice import observations
from kvtune.autotune.explore.base import Pick
from kvtune.autotune.explore.proposer import ModelProposer
from kvtune.autotune.ledger import (
    RUNG_LOSSLESS,
    RUNG_NEAR_LOSSLESS,
    RUNG_REPEAT,
    Ledger,
    RequestSet,
)
from kvtune.autotune.limits import Budget
from kvtune.autotune.reporting import Quiet
from kvtune.autotune.so_far import SoFar
from kvtune.autotune.space import SearchSpace
from kvtune.autotune.study import open_study
from kvtune.autotune.trial import Bench
from kvtune.engines.base import RunningServer
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.policies.base import Context
from kvtune.profilers.fingerprint import fingerprint
from kvtune.store.database import Store, open_store
from kvtune.store.rows import StudyRow
from kvtune.types import Harm, Measurement, Status, Trial, Workload


@dataclass(frozen=True, slots=True)
class Way:
    """How a search goes about its trials: does it cut hopeless ones, does it end by itself?"""

    name: str
    cuts: bool
    stops: bool


WAYS = (
    Way("fixed", cuts=False, stops=False),
    Way("cuts", cuts=True, stops=False),
    Way("stops", cuts=False, stops=True),
    Way("adaptive", cuts=True, stops=True),
)


@dataclass(frozen=True, slots=True)
class Spent:
    """What one search took, and what its pick is worth as a share of the best."""

    surface: str
    way: str
    seed: int
    pick: Point
    worth: float
    servers_s: float
    launches: int
    failed_launches: int
    cut: int


class Endless(ModelProposer):
    """The search's model without its rule for ending."""

    def stop(
        self, space: SearchSpace, ctx: Context, *, seconds_left: float, trials_left: int
    ) -> str:
        """Never."""
        return ""


def spent(surface: RecordedSurface, judge: Judge, way: Way, seed: int, trials: int) -> Spent:
    """Search once. With the same seed, every way meets the same noise from the same moment on.

    Trials alone are counted: what follows is the same for every way.
    """
    # Where in the recording's time the search begins, so that each meets another drift.
    began_s = Random(f"begin {seed}").random() * 3600
    runner = SurfaceRunner(surface, Random(f"{surface.name} {seed}"), now_s=began_s)
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "kvtune.db") as store:
        study, bench = _study(surface, store, seed, Path(folder))
        ledger = Ledger(store, study, bench, remeasure=False, run=runner)
        so_far = SoFar(surface.goal, ledger, Budget(trials=trials), None, runner.clock)
        if way.cuts:
            ledger.watch = EarlyStop(so_far).watch
        requests = requests_of(surface.recording.header)
        tuned = RequestSet(requests, fingerprint(requests).digest)
        measure_baseline(so_far, tuned, Quiet(), seed=seed, afterwards=_unasked)
        random = Random(f"search {seed}")
        maker = ModelProposer if way.stops else Endless
        proposer = maker(
            surface.goal, foretell=surface.foretell(random), seed=random.getrandbits(31)
        )
        space = space_of(surface.axes, surface.context)
        _explore(so_far, proposer, space, surface.context, tuned, seed)
        chosen = proposer.recommended(space, surface.context)
        measured = [entry.measurement for entry in so_far.tried]
    pick = stock_of(surface.axes) if chosen is None else point_of(surface.axes, chosen)
    return Spent(
        surface=surface.name,
        way=way.name,
        seed=seed,
        pick=pick,
        worth=judge.worth[pick],
        servers_s=runner.now_s - began_s,
        launches=len(measured),
        failed_launches=sum(one.status is Status.FAILED for one in measured),
        cut=sum(one.status is Status.CUT for one in measured),
    )


def _explore(
    so_far: SoFar,
    proposer: ModelProposer,
    space: SearchSpace,
    ctx: Context,
    tuned: RequestSet,
    seed: int,
) -> None:
    """Pick, measure and tell, until the budget is used up or nothing is left to gain."""
    told, forever_s = 0, float("inf")
    while True:
        seen = observations(so_far.tried, so_far.gates)
        for one in seen[told:]:
            proposer.observe(one)
        told, left = len(seen), so_far.budget.trials - len(seen)
        if left <= 0 or proposer.stop(space, ctx, seconds_left=forever_s, trials_left=left):
            return
        following = proposer.pick(space, ctx, seconds_left=forever_s, trials_left=left)
        if following is None:
            return
        _measure(so_far, following, tuned, seed)


def _measure(so_far: SoFar, following: Pick, tuned: RequestSet, seed: int) -> None:
    """Measure a pick as a search does: a point that is known is measured once more."""
    stack = following.stack
    known = next((e for e in so_far.points if e.trial.stack.arguments == stack.arguments), None)
    if known is not None:
        rung, parent = RUNG_REPEAT, known.trial.number
        seed += 1000 + len(so_far.repeats(parent))
    else:
        rung = RUNG_LOSSLESS if stack.harm is Harm.LOSSLESS else RUNG_NEAR_LOSSLESS
        parent = None
    so_far.ledger.run(
        stack, tuned, repeats=1, seed=seed, rung=rung, canary=parent is None, parent=parent
    )


def _study(
    surface: RecordedSurface, store: Store, seed: int, folder: Path
) -> tuple[StudyRow, Bench]:
    header = surface.recording.header
    requests, plan = requests_of(header), plan_of(header)
    workload = Workload(surface.name, "", requests, (), fingerprint(requests))
    study = open_study(
        store,
        name=None,
        model=header.model,
        served_model_name=None,
        engine=header.engine,
        device=header.device,
        workload=workload,
        plan=plan,
        goal=surface.goal,
        base_arguments=header.base_arguments,
        environment={},
        repeats=1,
        seed=seed,
    )
    bench = Bench(
        engine=SimulatedEngine(),
        model=header.model,
        served_model_name=None,
        environment={},
        plan=plan,
        goal=surface.goal,
        log_dir=folder,
        reporter=Quiet(),
    )
    return study, bench


def _unasked(trial: Trial, server: RunningServer, found: Measurement) -> Measurement:
    """There is no server that could be asked."""
    return found


def same_pick(one: Spent, other: Spent, tolerated: float = 0.01) -> bool:
    """Whether two searches end on the same point, or on two that are worth the same."""
    return one.pick == other.pick or abs(one.worth - other.worth) <= tolerated


def saved(pairs: Sequence[tuple[Spent, Spent]]) -> list[float]:
    """The shares of time that the second of each pair saved, where both found the same."""
    return [1 - mine.servers_s / fixed.servers_s for fixed, mine in pairs if same_pick(fixed, mine)]
