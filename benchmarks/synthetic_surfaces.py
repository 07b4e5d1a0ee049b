"""Surfaces made of formulas whose interactions are known, so that no search is tuned to real ones.

Each is over levers that kvtune has, on a server that there is not. What a search is told beforehand
(`foretell`) is the effect of each lever alone, a good deal off, unless a surface says otherwise:
two of them tell what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random
from statistics import NormalDist, fmean

from pydantic import JsonValue
from surface_bench import Outcome, context_of, point_of
from surface_simulated import QUIRKS, made_up_header, simulated_spec
from surface_spec import MIB, Axis, Point

from kvtune.autotune.explore.prior import Foretell, Foretold
from kvtune.policies.base import Context
from kvtune.profilers.goal import parse_goal
from kvtune.types import EffectiveConfig, FailureClass, Goal

BLOCKS = Axis("block-size", (32, 64, 128, 256), 128)
SEQS = Axis("max-num-seqs", (2, 3, 4, 6, 8, 12, 16, 128), 128)
TOKENS = Axis("max-num-batched-tokens", (256, 512, 1024, 2048), 2048)
DTYPE = Axis("kv-cache-dtype", ("auto", "fp8"), "auto")
RESERVE = Axis("scheduler-reserve-full-isl", (False, True), True)
WATERMARK = Axis("watermark", (0.0, 0.02, 0.05, 0.1), 0.0)

REQUESTS = 64
IN_FLIGHT = 20
NOISE = 0.04
"""Standard deviation of the log of one measurement's speed."""

SPREAD = 0.2
"""Standard deviation of the log of a latency between requests of a run."""

TOLD_SHARE, TOLD_OFF = 0.7, 0.1
"""What a usual prior has of each lever's effect, and by how much the log of a point is off."""

ASIDE_S = 6.5
BASE_RATE = 2.0

Places = Mapping[str, float]
"""Where each lever's value lies among its values, from 0 to 1, by argument."""

Effect = Callable[[Places], float]


@dataclass(frozen=True, slots=True)
class Formula:
    """The log of the rate beside the base rate, and of the two latencies beside what it implies."""

    name: str
    says: str
    axes: tuple[Axis, ...]
    rate: Effect
    ttft: Effect = lambda at: 0.0
    itl: Effect = lambda at: 0.0
    crashes: Callable[[Places], bool] = lambda at: False
    goal: str = "max goodput"
    prior: float | None = None
    """Correlation of what is foretold with the truth; None: the usual prior."""


@dataclass(slots=True)
class FormulaSurface:
    """A formula to search on."""

    formula: Formula
    name: str = field(init=False)
    goal: Goal = field(init=False)
    axes: tuple[Axis, ...] = field(init=False)
    context: Context = field(init=False)
    points: Sequence[Point] = field(init=False)
    effective: Mapping[Point, EffectiveConfig] = field(init=False, default_factory=dict)
    _told: dict[Point, float] = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.formula.name
        self.goal = parse_goal(self.formula.goal)
        self.axes = self.formula.axes
        self.points = list(product(*(axis.values for axis in self.axes)))
        self.context = _roomy_context()
        self._told = self._foretold()

    def measured(self, point: Point, random: Random, at_s: float) -> Outcome:
        """The formula with noise: a slower run is slower in everything."""
        at = self._places(point)
        if self.formula.crashes(at):
            died = FailureClass.CRASH_UNDER_LOAD
            return Outcome({}, 2 * ASIDE_S, died, message="the formula says so")
        slow = random.gauss(0, NOISE)
        figures = self._figures(at, slow, random)
        return Outcome(figures, ASIDE_S + REQUESTS / figures["requests_per_s"])

    def figures(self, point: Point) -> Mapping[str, float]:
        """The formula without noise."""
        at = self._places(point)
        return {} if self.formula.crashes(at) else self._figures(at, 0.0, None)

    def foretell(self, random: Random) -> Foretell:
        """What is expected before anything is measured."""

        def foretold(arguments: Mapping[str, JsonValue]) -> Foretold | None:
            point = point_of(self.axes, arguments)
            if point not in self._told:
                return None
            rate = BASE_RATE * math.exp(self._told[point])
            return Foretold(self._of_rate(rate, 1.0, 1.0, 0.0, None), course=point)

        return foretold

    def _foretold(self) -> dict[Point, float]:
        """The log of the rate that is expected of each point."""
        truth = {point: self.formula.rate(self._places(point)) for point in self.points}
        middle = fmean(truth.values())
        spread = math.sqrt(fmean((value - middle) ** 2 for value in truth.values())) or 0.1
        off = {point: Random(f"{self.name} {point}").gauss(0, 1) for point in self.points}
        share = self.formula.prior
        if share is not None:
            left = math.sqrt(1 - share**2)
            return {
                point: share * (truth[point] - middle) + left * spread * off[point]
                for point in self.points
            }
        alone = [
            {
                value: fmean(truth[point] for point in self.points if point[index] == value)
                for value in axis.values
            }
            for index, axis in enumerate(self.axes)
        ]
        return {
            point: TOLD_SHARE
            * sum(effect[value] - middle for effect, value in zip(alone, point, strict=True))
            + TOLD_OFF * off[point]
            for point in self.points
        }

    def _places(self, point: Point) -> Places:
        return {
            axis.argument: axis.values.index(value) / (len(axis.values) - 1)
            for axis, value in zip(self.axes, point, strict=True)
        }

    def _figures(self, at: Places, slow: float, random: Random | None) -> dict[str, float]:
        rate = BASE_RATE * math.exp(self.formula.rate(at) - slow)
        return self._of_rate(
            rate, math.exp(self.formula.ttft(at)), math.exp(self.formula.itl(at)), slow, random
        )

    def _of_rate(
        self, rate: float, ttft: float, itl: float, slow: float, random: Random | None
    ) -> dict[str, float]:
        """A closed loop: a third of a request's time goes by before its first token."""
        each_s = IN_FLIGHT / rate
        p95 = math.exp(NormalDist().inv_cdf(0.95) * SPREAD)
        middle = {"ttft": ttft * each_s / 3, "itl": itl * each_s * 2 / 3 / 40}
        share = 1.0
        for slo in self.goal.slos:
            away = math.log(slo.limit_s / middle[slo.metric]) / SPREAD
            share *= NormalDist().cdf(away)
        if random is not None:
            share = sum(random.random() < share for _ in range(REQUESTS)) / REQUESTS
        return {
            "requests_per_s": rate,
            "good_share_ratio": share,
            "goodput_requests_per_s": rate * share,
            **{f"{name}_p95_s": value * p95 for name, value in middle.items()},
        }


def synthetic_surfaces() -> list[FormulaSurface]:
    """All of them."""
    return [FormulaSurface(formula) for formula in _formulas()]


def _roomy_context() -> Context:
    """A server on which everything fits, bound by its cache, 20 requests in flight."""
    spec = simulated_spec(QUIRKS[0])
    context = context_of(made_up_header(spec))
    pool = 512 * MIB
    base = {**context.base_arguments, "kv-cache-memory-bytes": pool}
    baseline = context.baseline
    if baseline is None or baseline.num_gpu_blocks is None:
        raise ValueError("a recording has a baseline")
    blocks = baseline.num_gpu_blocks * pool // (48 * MIB)
    seen = {"kv_cache_memory_bytes": pool, "num_gpu_blocks": blocks}
    return replace(
        context,
        base_arguments=base,
        baseline=baseline.model_copy(update=seen),
        max_concurrency=IN_FLIGHT,
    )


def _near(at: float, best: float, width: float) -> float:
    """1 at the best place, falling off as a bell."""
    return math.exp(-(((at - best) / width) ** 2) / 2)


def _formulas() -> tuple[Formula, ...]:
    four = (BLOCKS, SEQS, TOKENS, DTYPE)
    b, s, t, q = (axis.argument for axis in four)
    r, w = RESERVE.argument, WATERMARK.argument
    limits = "max goodput where p95 ttft <= 3s and p95 itl <= 250ms"

    def additive(at: Places) -> float:
        return 0.5 * (1 - at[b]) + 0.6 * _near(at[s], 0.7, 0.4) + 0.2 * at[t] - 0.1 * at[q]

    def pair(at: Places) -> float:
        both = 0.7 if at[b] == 0 and 0.5 < at[s] < 0.8 else 0.0
        return both + 0.1 * (1 - at[b]) + 0.1 * at[s] + 0.1 * at[t]

    def ridge(at: Places) -> float:
        return -2.5 * (at[b] + at[s] - 1) ** 2 + 0.3 * at[s] + 0.1 * at[t]

    def narrow(at: Places) -> float:
        away = (at[b] - 1 / 3) ** 2 + (at[s] - 5 / 7) ** 2 + (at[t] - 2 / 3) ** 2
        return 0.9 * math.exp(-away / (2 * 0.2**2)) - 0.3 * away

    def rising(at: Places) -> float:
        return 0.9 * min(1.0, at[s] / 0.6) + 0.2 * (1 - at[b]) + 0.1 * at[t]

    def toward_crash(at: Places) -> float:
        return 0.7 * _near(at[s], 0.6, 0.35) + 0.5 * (1 - at[b]) + 0.2 * at[t] - 0.1 * at[q]

    def flat(at: Places) -> float:
        return 0.005 * at[s] - 0.005 * at[b]

    def fp8_wins(at: Places) -> float:
        wide = at[s] > 0.7
        return 0.4 * at[s] + 0.2 * (1 - at[b]) + at[q] * (0.35 if wide else -0.1)

    def many(at: Places) -> float:
        return additive(at) + 0.25 * (1 - at[r]) * (1 - at[w]) + 0.15 * at[r] * at[w]

    return (
        Formula("additive", "each lever by itself", four, additive),
        Formula("pair", "small blocks and a middling width, and only both", four, pair),
        Formula("ridge", "the right width depends on the block", four, ridge),
        Formula("narrow", "one small hill", four, narrow),
        Formula(
            "cliff",
            "a plateau that ends where first tokens come too late",
            four,
            rising,
            ttft=lambda at: 1.2 if at[s] > 0.75 and at[t] < 0.5 else 0.0,
            itl=lambda at: 0.8 * max(0.0, at[s] - 0.75) / 0.25,
            goal=limits,
        ),
        Formula(
            "crash-corner",
            "a quarter of the points dies under load, towards the best of the rest",
            four,
            toward_crash,
            crashes=lambda at: at[s] > 0.5 and at[b] < 0.4,
        ),
        Formula("flat", "nothing matters", four, flat),
        Formula("fp8-wins", "fp8 pays off only where many run at once", four, fp8_wins),
        Formula("many-levers", "six levers, 2,048 points", (*four, RESERVE, WATERMARK), many),
        Formula("told-nothing", "a ridge, and forecasts that mean nothing", four, ridge, prior=0.0),
        Formula("told-wrong", "a pair, and forecasts that mislead", four, pair, prior=-0.5),
    )
