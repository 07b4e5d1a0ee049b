"""Fit the simulation to what was measured on the baseline, and say by how much it misses.

What a decode step costs comes from the step-time model, scaled so that the median gap between
tokens is the one of the load: a machine is not equally fast all the time. Where sequences share
prefixes and steps are shorter than the model says, it is their reads of KV that cost less. What a
prompt token costs is what gives the measured time of a prefill. Whatever else was measured is then
a check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtune.autotune.forecast.noise import noise_of
from kvtune.autotune.forecast.replay import SimulatedRun, System, simulate
from kvtune.autotune.forecast.requests import SimulatedRequest
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.errors import BadInput
from kvtune.profilers.load.arrivals import ClosedLoop, OpenLoop
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.step_shares import SHARED_LEAST_SHARE
from kvtune.profilers.window import PREFILL_S
from kvtune.types import Goal, Interval, LoadRun, StepTimeModel

THROUGHPUT, STEP, FIRST_TOKEN, GOODPUT = (
    "output_tokens_per_s",
    "itl_p50_s",
    "ttft_p50_s",
    "goodput_requests_per_s",
)
TOKEN = "tpot_p50_s"
TOLERATED: Mapping[str, float] = {THROUGHPUT: 0.15, STEP: 0.15, FIRST_TOKEN: 0.3, GOODPUT: 0.15}
"""How far the simulated baseline may be from the measured one, as a share of it. Above it nothing
is forecast for the metric, and for throughput nothing at all. A median wait of a queue that comes
and goes is the least steady of these."""

DRIFT = 2.0
"""How many times slower, or faster, steps under load may be than the model says. On shared machines
the same work took 1.5 times as long forty minutes later."""

CLOSE = 0.01
"""How near to the measured time of a prefill the fitted one is, as a share of it."""

BURSTS = 0.05
"""Share of tokens that come in one message with another above which gaps are no steps."""

_ROUNDS = 3
_SEARCHES = 8
_PREFILL_COUNT = PREFILL_S.removesuffix("_sum") + "_count"


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was measured, on which engine, and how the requests were sent.

    `requests` are those that `run` completed. The first `until_ended` of them to end are looked at.
    `repeats` are the metrics of all runs of the load, by name; `run` is one of these. `together`
    tells how requests arrive that are sent at once.
    """

    requests: Sequence[SimulatedRequest]
    arrivals: OpenLoop | ClosedLoop
    system: System
    run: LoadRun
    goal: Goal
    until_ended: int
    repeats: Mapping[str, Sequence[float]] = field(default_factory=dict)
    together: bool = False

    def replay(self, cost: StepCost) -> SimulatedRun:
        """Simulate the baseline."""
        return simulate(
            self.requests,
            self.arrivals,
            self.system,
            cost,
            until_ended=self.until_ended,
            together=self.together,
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """Costs that reproduce the baseline, as far as they do; `baseline` is as it was simulated.

    `ends` are other costs that give the same mean decode step: one for each end of the intervals of
    the model's parts, a cached token's first and then a sequence's. `drift` is by how much steps
    under load took longer than the model says. `missed` maps a metric to simulated over measured,
    less 1 (0 where both are 0), and `noise` maps it to the standard deviation of what is measured,
    as a share of it.
    """

    baseline: Baseline
    cost: StepCost
    ends: tuple[StepCost, ...]
    drift: float
    simulated: SimulatedRun
    measured: Mapping[str, float]
    missed: Mapping[str, float]
    noise: Mapping[str, float]

    def problem(self, metric: str) -> str:
        """Why `metric` cannot be forecast; empty when it can."""
        if not 1 / DRIFT <= self.drift <= DRIFT:
            return f"steps under load take {self.drift:.2g} times what the step-time model says"
        names = [THROUGHPUT, metric]
        if self.is_zero(metric):
            # That the model has 0 as well says little: it must meet the times behind it.
            names += [name for name in (FIRST_TOKEN, STEP) if name in self.measured]
        for name in names:
            if name not in self.missed:
                if self.is_zero(name):
                    return f"the baseline's {name} is 0, but not that of the model"
                return f"{name} was not measured"
            if abs(self.missed[name]) > TOLERATED[name]:
                return f"the model misses the baseline's {name} by {self.missed[name]:+.0%}"
        return ""

    def is_zero(self, metric: str) -> bool:
        """Whether 0 was measured, as the goodput is where no request keeps the limits."""
        return self.measured.get(metric) == 0


def calibrate(baseline: Baseline, model: StepTimeModel | None) -> Calibration:
    """Fit the costs.

    Without a model half of a decode step is taken to be fixed, and its sequences and their cached
    tokens to cost a quarter each; the ends are then steps that are all of one kind. Prompts that
    are computed in one step take each as long as all of them: where requests that arrive one by one
    miss the throughput, they are tried together.

    Raises:
        BadInput: nothing was measured that costs could be fitted to.
    """
    found = _calibrated(baseline, model)
    if (missed := abs(found.missed.get(THROUGHPUT, 0.0))) <= TOLERATED[THROUGHPUT]:
        return found
    other = _calibrated(replace(baseline, together=True), model)
    return other if abs(other.missed.get(THROUGHPUT, math.inf)) < missed else found


def _calibrated(baseline: Baseline, model: StepTimeModel | None) -> Calibration:
    run = _first_ended(baseline.run, baseline.until_ended)
    measured = measure(run, baseline.goal)
    if FIRST_TOKEN not in measured:
        raise BadInput(
            "no request of the baseline completed", fix="send a load that the server can carry"
        )
    if _is_in_bursts(run):
        # The gaps between messages are no steps.
        del measured[STEP]
    scale = STEP if STEP in measured else TOKEN
    step_s = measured.get(scale)
    if model is None:
        cost = _undecided(baseline, step_s or 0.0, measured[FIRST_TOKEN])
    else:
        parts = model.fixed_s, model.per_sequence_s, model.per_kv_token_s
        cost = StepCost(*(part.estimate for part in parts))
    drift, unshared_s = 1.0, cost.per_kv_token_s
    for _ in range(_ROUNDS):
        cost = _with_prefill(baseline, cost, measured[FIRST_TOKEN])
        found = baseline.replay(cost)
        found_s = measure(found.run, baseline.goal).get(scale)
        if not step_s or not found_s:
            break
        read_s = _read_s(cost, found, step_s - found_s, most_s=drift * unshared_s)
        changed_s = (read_s - cost.per_kv_token_s) * found.mean_resident_tokens
        if found_s + changed_s > 0:  # The median step may read less than a mean one.
            cost, found_s = replace(cost, per_kv_token_s=read_s), found_s + changed_s
        cost, drift = cost.slower(step_s / found_s), drift * step_s / found_s
    simulated = baseline.replay(cost)
    figures = measure(simulated.run, baseline.goal)
    return Calibration(
        baseline=baseline,
        cost=cost,
        ends=_ends(cost, model, simulated),
        drift=1.0 if model is None else drift,
        simulated=simulated,
        measured=measured,
        missed={
            name: figures[name] / measured[name] - 1 if measured[name] else 0.0
            for name in TOLERATED
            if name in measured and name in figures and (measured[name] or not figures[name])
        },
        noise=noise_of(TOLERATED, run, simulated.run, baseline.goal, baseline.repeats),
    )


def _read_s(cost: StepCost, found: SimulatedRun, missing_s: float, *, most_s: float) -> float:
    """The cost of a cached token that makes a step longer by `missing_s`, as far as sharing can.

    Blocks that several sequences read at once cost at most what they cost one.
    """
    shared = found.prefix_hits_tokens >= SHARED_LEAST_SHARE * max(1, found.prefix_queries_tokens)
    if not shared or not found.mean_resident_tokens:
        return cost.per_kv_token_s
    return min(max(0.0, cost.per_kv_token_s + missing_s / found.mean_resident_tokens), most_s)


def _undecided(baseline: Baseline, step_s: float, first_token_s: float) -> StepCost:
    """Costs of a decode step of `step_s` of which nothing else is known."""
    fixed = _with_prefill(baseline, StepCost(step_s), first_token_s)
    seen = baseline.replay(fixed)
    if not seen.mean_sequences:
        return fixed
    return StepCost(
        fixed_s=step_s / 2,
        per_sequence_s=step_s / 4 / seen.mean_sequences,
        per_kv_token_s=step_s / 4 / seen.mean_resident_tokens,
    )


def _is_in_bursts(run: LoadRun) -> bool:
    """Whether messages carry several tokens, as when a client or a server cannot keep up."""
    gaps_s = [gap_s for record in run.records if record.ok for gap_s in record.gaps_s]
    return sum(gap_s == 0 for gap_s in gaps_s) > BURSTS * len(gaps_s)


def _ends(
    cost: StepCost, model: StepTimeModel | None, simulated: SimulatedRun
) -> tuple[StepCost, ...]:
    """Costs at the ends of the parts' intervals; the fixed part makes up for the difference."""
    means = {
        "per_kv_token_s": simulated.mean_resident_tokens,
        "per_sequence_s": simulated.mean_sequences,
    }
    if model is None:
        for name, amount in means.items():
            cost = _moved(cost, name, 0.0, amount)
    found = []
    for name, amount in means.items():
        now: float = getattr(cost, name)
        most = now + cost.fixed_s / amount if amount else now
        part: Interval | None = None if model is None else getattr(model, name)
        low, high = 0.0, most
        if part is not None and part.low is not None and part.high is not None:
            fitted = now / part.estimate if part.estimate > 0 else 1.0
            low, high = part.low * fitted, part.high * fitted
        found += [_moved(cost, name, min(bound, most), amount) for bound in (low, high)]
    return tuple(found)


def _moved(cost: StepCost, name: str, value: float, amount: float) -> StepCost:
    more_s = (value - getattr(cost, name)) * amount
    return replace(cost, **{name: value, "fixed_s": max(cost.fixed_s - more_s, 0.0)})


def _with_prefill(baseline: Baseline, cost: StepCost, first_token_s: float) -> StepCost:
    """The cost of a prompt token that gives the measured mean time of a prefill.

    The engine's own count of that is used where there is one, else the median time to the first
    token, which holds the wait before it too.
    """
    counters = baseline.run.counters
    prefills = counters.get(_PREFILL_COUNT)
    target_s = first_token_s
    seen: Callable[[SimulatedRun], float] = _first_token_p50
    if prefills and PREFILL_S in counters:
        target_s = counters[PREFILL_S] / prefills
        seen = _prefill_mean

    def missing_s(per_token_s: float) -> float:
        return seen(baseline.replay(replace(cost, per_prefill_token_s=per_token_s))) - target_s

    prompt_tokens = sum(request.prompt_tokens for request in baseline.requests)
    high = 2 * target_s * len(baseline.requests) / prompt_tokens
    return replace(cost, per_prefill_token_s=_root(missing_s, high, CLOSE * target_s))


def _root(rising: Callable[[float], float], high: float, close: float) -> float:
    """Where a rising function is within `close` of 0, from 0 on (Illinois method).

    0 if it is above 0 there already.
    """
    low, at_low = 0.0, rising(0.0)
    if at_low >= 0:
        return 0.0
    at_high = rising(high)
    while at_high < 0:
        low, at_low, high = high, at_high, high * 4
        at_high = rising(high)
    middle, side = high, 0
    for _ in range(_SEARCHES):
        middle = high - at_high * (high - low) / (at_high - at_low)
        at_middle = rising(middle)
        if abs(at_middle) <= close:
            break
        if at_middle > 0:
            high, at_high = middle, at_middle
            at_low, side = at_low / 2 if side > 0 else at_low, 1
        else:
            low, at_low = middle, at_middle
            at_high, side = at_high / 2 if side < 0 else at_high, -1
    return middle


def _first_token_p50(done: SimulatedRun) -> float:
    return measure(done.run, Goal())[FIRST_TOKEN]


def _prefill_mean(done: SimulatedRun) -> float:
    return done.prefill_s


def _first_ended(run: LoadRun, count: int) -> LoadRun:
    """The part of a run until so many requests had completed."""
    ended = sorted((record for record in run.records if record.ok), key=lambda one: one.end_s)
    if len(ended) <= count:
        return run
    return replace(run, records=tuple(ended[:count]), duration_s=ended[count - 1].end_s)
