"""What a run of the labelled suite leaves behind, and what counts as right."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, log, sqrt
from statistics import fmean, stdev

from pydantic import BaseModel, ConfigDict
from verdict_parts import Effect, Expected

from kvtune.profilers.statistics import Estimate, paired_ratio_interval
from kvtune.types import Bottleneck, Ceilings, Device, EngineInfo, Interval, StepTimeModel, Verdict

HELPS = 0.08
"""A lever helps if it adds this much and more than nothing in every round, and hurts if it takes as
much."""

FORECAST_NO_CHANGE = 0.03
MEASURED_NO_CHANGE = 0.05

GOODPUT, STEP, FIRST_TOKEN = "goodput_requests_per_s", "itl_p50_s", "ttft_p50_s"
CAPACITY = "capacity_tokens"


class Value(BaseModel):
    """Base of what is written down."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Told(Value):
    """What the profile forecast of one metric of an arm; without a ratio `reason` says why."""

    ratio: Interval | None
    predicted: float | None
    reason: str


class ArmResult(Value):
    """One arm: what was expected, forecast and measured.

    `rounds` hold the metrics of each round, and `problem` says why there are none.
    `kv_tokens` is what the engine reports, of an arm with a server of its own.
    """

    name: str
    expected: Expected
    is_engine: bool
    rounds: tuple[dict[str, float], ...] = ()
    told: dict[str, Told] = {}
    kv_tokens: int | None = None
    problem: str = ""


class RegimeResult(Value):
    """One regime. Verdicts: of `kvtune profile`, without its probe, and from counters alone.

    `twin` holds the rounds of a second server that is started exactly as the baseline is.
    """

    name: str
    truth: tuple[Bottleneck, ...]
    built: str
    goal: str
    arguments: dict[str, str]
    verdict: Verdict | None = None
    unprobed: Verdict | None = None
    counters_only: Verdict | None = None
    step_time: StepTimeModel | None = None
    load_s: float = 0.0
    probe_s: float = 0.0
    verdict_s: float = 0.0
    warnings: tuple[str, ...] = ()
    forecast_problem: str = ""
    counters: dict[str, float] = {}
    baseline: tuple[dict[str, float], ...] = ()
    twin: tuple[dict[str, float], ...] = ()
    arms: tuple[ArmResult, ...] = ()
    load_average: float = 0.0
    wall_s: float = 0.0
    problem: str = ""


class Results(Value):
    """A run of the suite."""

    device: Device
    ceilings: Ceilings
    engine: EngineInfo
    kvtune: str
    model: str
    rounds: int
    seed: int
    measured_at: str
    regimes: tuple[RegimeResult, ...] = ()


class Pair(Value):
    """A forecast of goodput beside its measurement."""

    regime: str
    lever: str
    told: Told
    measured: float
    noise: float

    @property
    def error_points(self) -> float | None:
        """By how many points the forecast change missed the measured one."""
        return None if self.told.ratio is None else 100 * abs(self._estimate - self.measured)

    @property
    def is_sign_right(self) -> bool:
        """Whether the direction was right.

        A forecast below 3%, or below the noise of the measurement, is one of no change; that is
        right if less than 5%, or than twice the noise, was measured.
        """
        told, seen = self._estimate - 1, self.measured - 1
        if abs(told) < max(FORECAST_NO_CHANGE, self.noise):
            return abs(seen) < max(MEASURED_NO_CHANGE, 2 * self.noise)
        return told * seen > 0

    @property
    def is_change(self) -> bool:
        """Whether a change was forecast, however noisy the measurement."""
        return abs(self._estimate - 1) >= FORECAST_NO_CHANGE

    @property
    def is_in_range(self) -> bool:
        """Whether the measurement lies within the forecast range."""
        ratio = self.told.ratio
        if ratio is None or ratio.low is None or ratio.high is None:
            return False
        return ratio.low <= self.measured <= ratio.high

    @property
    def _estimate(self) -> float:
        return 1.0 if self.told.ratio is None else self.told.ratio.estimate


def is_right(regime: RegimeResult, verdict: Verdict | None) -> bool:
    """Whether a verdict is the truth.

    Of a mixed load its two largest shares have to be, and no other word may be named.
    """
    if verdict is None:
        return False
    if len(regime.truth) == 1:
        return verdict.bottleneck is regime.truth[0]
    largest = sorted(verdict.shares, key=lambda name: -verdict.shares[name])[: len(regime.truth)]
    named = verdict.bottleneck in (*regime.truth, Bottleneck.ABSTAIN)
    return named and set(largest) == set(regime.truth)


def ratio(regime: RegimeResult, arm: ArmResult, metric: str = GOODPUT) -> Estimate | None:
    """How many times the baseline's the arm's metric is, round by round."""
    return paired_ratio_interval(_pairs(regime, arm, metric))


def server_noise(results: Results, metric: str = GOODPUT) -> float:
    """Standard deviation of a metric between servers that are started alike, as a share of it.

    From the twins of all regimes together: one pair of servers tells little.
    """
    squares = [
        (log(found.estimate) ** 2) / 2
        for regime in results.regimes
        if (found := paired_ratio_interval(_beside(regime.twin, regime.baseline, metric)))
    ]
    return sqrt(fmean(squares)) if squares else 0.0


def noise(regime: RegimeResult, arm: ArmResult, between: float, metric: str = GOODPUT) -> float:
    """Standard error of an arm's ratio: its rounds', and that of servers (`between`) beside it.

    The arm has a server of its own, and the baseline two where it has a twin; a load of its own
    is sent to the baseline's.
    """
    ratios = [ours / theirs for ours, theirs in _pairs(regime, arm, metric) if theirs]
    within = stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else 0.0
    servers = 1.5 if regime.twin else 2.0
    return hypot(within, between * sqrt(servers)) if arm.is_engine else within


def effect(regime: RegimeResult, arm: ArmResult) -> Effect | None:
    """What the arm did to goodput; `None` where nothing was measured."""
    found = ratio(regime, arm)
    if found is None:
        return None
    rounds = _pairs(regime, arm, GOODPUT)
    if found.estimate >= 1 + HELPS and all(ours > theirs for ours, theirs in rounds):
        return "helps"
    if found.estimate <= 1 - HELPS and all(ours < theirs for ours, theirs in rounds):
        return "hurts"
    return "changes nothing"


def is_as_expected(regime: RegimeResult, arm: ArmResult) -> bool | None:
    """Whether the arm did what the truth says; `None` where that says nothing."""
    did = effect(regime, arm)
    if did is None or arm.expected == "open":
        return None
    return did != "helps" if arm.expected == "does not help" else did == arm.expected


def pairs(results: Results, metric: str = GOODPUT) -> list[Pair]:
    """Every forecast of a metric that has a ratio and was measured."""
    found, between = [], server_noise(results, metric)
    for regime in results.regimes:
        for arm in regime.arms:
            told, measured = arm.told.get(metric), ratio(regime, arm, metric)
            if told is not None and told.ratio is not None and measured is not None:
                found.append(
                    Pair(
                        regime=regime.name,
                        lever=arm.name,
                        told=told,
                        measured=measured.estimate,
                        noise=noise(regime, arm, between, metric),
                    )
                )
    return found


def untold(results: Results, metric: str = GOODPUT) -> list[tuple[RegimeResult, ArmResult, str]]:
    """Levers of the engine that were measured without a forecast of a metric, and why."""
    found = []
    for regime in results.regimes:
        for arm in regime.arms:
            if not arm.is_engine or not arm.rounds:
                continue
            told = arm.told.get(metric)
            if told is None:
                found.append((regime, arm, regime.forecast_problem or "kvtune names no such lever"))
            elif told.ratio is None:
                found.append((regime, arm, told.reason))
    return found


def _pairs(regime: RegimeResult, arm: ArmResult, metric: str) -> list[tuple[float, float]]:
    """The arm's value and the baseline's (the geometric mean of its servers), by round."""
    found = _beside(arm.rounds, regime.baseline, metric)
    twins = _beside(regime.twin, regime.baseline, metric)
    if not arm.is_engine or len(twins) < len(found):
        return found
    return [
        (ours, sqrt(twin * theirs)) for (ours, theirs), (twin, _) in zip(found, twins, strict=False)
    ]


def _beside(
    ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]], metric: str
) -> list[tuple[float, float]]:
    return [
        (one[metric], other[metric])
        for one, other in zip(ours, theirs, strict=False)
        if metric in one and metric in other
    ]
