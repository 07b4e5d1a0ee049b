"""kvtune's own search on a recorded surface, with and without what makes its trials cheap."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from regret_noise import begin_s, noise_of
from regret_product import Noting, exploration_on
from regret_rivals import requests_on
from surface_bench import Judge, RecordedSurface, SurfaceRunner, point_of, stock_of
from surface_spec import Point

from kvtune.autotune.explore.proposer import ModelProposer
from kvtune.autotune.limits import ENOUGH
from kvtune.types import Status


@dataclass(frozen=True, slots=True)
class Way:
    """How a search goes about its trials.

    Does it cut hopeless ones, does it end by itself, does it change running servers?
    """

    name: str
    cuts: bool = False
    stops: bool = False
    reuses: bool = False


WAYS = (
    Way("fixed"),
    Way("cuts", cuts=True),
    Way("stops", stops=True),
    Way("reuses", reuses=True),
    Way("adaptive", cuts=True, stops=True, reuses=True),
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


def spent(surface: RecordedSurface, judge: Judge, way: Way, seed: int, trials: int) -> Spent:
    """Search once. With the same seed, the n-th measurement of a point is the same in every way.

    Trials alone are counted: what follows is the same for every way.
    """
    random = Random(f"search {seed}")
    model = ModelProposer(
        surface.goal,
        requests=requests_on(surface),
        foretell=surface.foretell(random),
        seed=random.getrandbits(31),
        enough=ENOUGH if way.stops else 0.0,
    )
    began_s = begin_s(seed)
    noise = noise_of(surface, seed)
    runner = SurfaceRunner(surface, random, began_s, noise=noise, reuse=way.reuses)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        noting = Noting(model, surface)
        search = exploration_on(surface, noting, runner, folder, seed, trials, stack)
        if not way.cuts:
            search.so_far.ledger.watch = None
        search.run()
        space = search.rungs[-1].space
        # What came of the last trial is told before the next question.
        search.advice.stop(space)
        search.advice.end()
        chosen = model.recommended(space, surface.context)
        measured = [entry.measurement for entry in search.so_far.tried]
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


def same_pick(one: Spent, other: Spent, tolerated: float = 0.01) -> bool:
    """Whether two searches end on the same point, or on two that are worth the same."""
    return one.pick == other.pick or abs(one.worth - other.worth) <= tolerated


def saved(pairs: Sequence[tuple[Spent, Spent]]) -> list[float]:
    """The shares of time that the second of each pair saved, where both found the same."""
    return [1 - mine.servers_s / fixed.servers_s for fixed, mine in pairs if same_pick(fixed, mine)]
