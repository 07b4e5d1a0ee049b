"""The highest load at which a goal holds: which loads to try next, and what the tried ones say.

Loads are steps of a geometric ladder, the same for every trial, so that two of them are compared at
the same ones. A trial begins where the best one so far reached its limit: if it holds more, it goes
up in growing steps until it holds no more, and the last step is cut in two. If it does not hold as
much, it cannot win; one step down tells by how much. What limits are missed by is taken to grow
with load (`profilers.isotonic`), and the boundary lies where they are just met, between two loads
that were tried. Pure: loads and what came of them in, the next load out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

from kvtune.errors import BadInput
from kvtune.profilers.goal import goal_violations
from kvtune.profilers.isotonic import crossing, rising
from kvtune.profilers.load.arrivals import ClosedLoop, OpenLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import Goal, Request

RATIO = 1.25
"""From one step of the ladder to the next."""

NEAR = 1.16
"""Two loads that are no further apart are not worth a third one between them."""

LEAST_REQUESTS = 24
"""At every load, for percentiles to say anything."""

WAVES = 3
"""Requests one after the other in each place of a closed loop: in a single one, all begin at once
and nothing is like in service."""

LEAST_WAVES = 2
"""Where the workload has no more requests; with fewer of them, a load is not tried."""

LOWEST, HIGHEST = 1 / 8, 64
"""The range of rates that are tried, beside the workload's own."""

CLIFF = 2.0
"""What is limited becomes so many times as much from one load to the next that was tried."""

Unit = Literal["requests in flight", "requests/s"]


@dataclass(frozen=True, slots=True)
class Ladder:
    """Loads to try, ascending; `start` is where one begins of whom nothing is known.

    `whole` loads are whole numbers.
    """

    loads: tuple[float, ...]
    start: float
    whole: bool

    @property
    def unit(self) -> Unit:
        """What a load is a number of."""
        return "requests in flight" if self.whole else "requests/s"

    def nearest(self, load: float) -> float:
        """The load that can be tried and is nearest; it need not be a step."""
        within = min(max(load, self.loads[0]), self.loads[-1])
        return float(round(within)) if self.whole else within

    def above(self, load: float, steps: int) -> float | None:
        """The load so many steps up, or the highest; `None` from there."""
        higher = [one for one in self.loads if one > load]
        return higher[min(steps, len(higher)) - 1] if higher else None

    def below(self, load: float, steps: int) -> float | None:
        """The load so many steps down, or the lowest; `None` from there."""
        lower = [one for one in self.loads if one < load]
        return lower[-min(steps, len(lower))] if lower else None

    def between(self, low: float, high: float) -> float | None:
        """The middle of two loads; `None` where they are near enough."""
        if inner := [one for one in self.loads if low < one < high]:
            return inner[len(inner) // 2]
        middle = math.sqrt(low * high)
        if self.whole:
            middle = round(middle)
        return middle if high / low > NEAR and low < middle < high else None


def ladder_of(plan: LoadPlan, requests: Sequence[Request]) -> Ladder:
    """The loads that requests can be sent at, and the plan's own one as the start.

    Raises:
        BadInput: requests that are sent by the clock all arrive at once.
    """
    arrivals = plan.arrivals
    if isinstance(arrivals, ClosedLoop):
        most = max(1, len(requests) // LEAST_WAVES)
        loads = [1]
        while (step := max(loads[-1] + 1, round(RATIO * loads[-1]))) < most:
            loads.append(step)
        return Ladder(
            tuple(map(float, sorted({*loads, most}))), float(min(arrivals.concurrency, most)), True
        )
    offered = _rate(requests) / arrivals.time_scale
    lowest, highest = (math.log(offered * part, RATIO) for part in (LOWEST, HIGHEST))
    steps = range(math.ceil(lowest), math.floor(highest) + 1)
    return Ladder(tuple(RATIO**step for step in steps), offered, False)


def at_load(
    plan: LoadPlan, requests: Sequence[Request], load: float
) -> tuple[LoadPlan, Sequence[Request]]:
    """How which of the requests are sent at a load; the first ones, and fewer where it is low."""
    arrivals = plan.arrivals
    if isinstance(arrivals, ClosedLoop):
        sent = requests[: max(LEAST_REQUESTS, WAVES * int(load))]
        return replace(plan, arrivals=ClosedLoop(int(load)), at_boundary=False), sent
    # So that a low rate takes no longer than the workload's own.
    share = load * arrivals.time_scale / _rate(requests)
    sent = requests[: max(_first_two_times(requests), math.ceil(share * len(requests)))]
    scaled = OpenLoop(_rate(sent) / load, arrivals.max_concurrency)
    return replace(plan, arrivals=scaled, at_boundary=False), sent


def next_load(
    ladder: Ladder, start: float, held: Mapping[float, bool], *, gives_up: bool
) -> float | None:
    """The load to try next, after those of which it is known whether they `held`.

    `None` once enough is known: with `gives_up`, that is one step below a `start` that does not
    hold.
    """
    if not held:
        return start
    low = max((load for load, ok in held.items() if ok), default=None)
    failed = [load for load, ok in held.items() if not ok and (low is None or load > low)]
    steps = 2 ** (len(held) - 1)
    if low is not None and not failed:
        return ladder.above(low, steps)
    if gives_up and not held[start] and len(held) > 1:
        return None
    return ladder.below(min(failed), steps) if low is None else ladder.between(low, min(failed))


class Found(NamedTuple):
    """Where the boundary is: between `low`, which held, and `high`, which did not, at `load`.

    `None` is what was not found, as no load was tried so low or so high.
    """

    low: float | None
    high: float | None
    load: float | None
    is_cliff: bool


def boundary_of(tried: Mapping[float, Sequence[float]]) -> Found:
    """The boundary from all violations (see `violation_of`) that were measured at each load."""
    loads = sorted(tried)
    means = [fmean(tried[load]) for load in loads]
    curve = rising(means, [float(len(tried[load])) for load in loads])
    held = [load for load, mean in zip(loads, means, strict=True) if mean <= 0]
    low = held[-1] if held else None
    high = next((load for load in loads if low is None or load > low), None)
    if low is None or high is None:
        return Found(low, high, low, False)
    at = crossing([math.log(load) for load in loads], curve)
    before, after = curve[loads.index(low)], curve[loads.index(high)]
    load = low if at is None else min(max(math.exp(at), low), high)
    return Found(low, high, load, after - before > math.log(CLIFF))


def violation_of(goal: Goal, metrics: Mapping[str, float]) -> tuple[float, str | None]:
    """Log of value over limit of the limit that is missed most, and that limit in words.

    Infinite where one has no value: requests failed, or were too few.
    """
    worst, text = -math.inf, None
    for limit, excess in goal_violations(goal, metrics).items():
        by = math.inf if excess is None else math.log(max(1 + excess, 1e-9))
        if by > worst:
            worst, text = by, limit
    return worst, text


def check_boundary(plan: LoadPlan, requests: Sequence[Request], goal: Goal) -> None:
    """Refuse what has no boundary, before anything is started.

    Raises:
        BadInput: the goal has no limit that a load could miss, or requests that are sent by the
            clock all arrive at once.
    """
    if not goal.slos:
        raise BadInput(
            "--load-at boundary looks for the highest load that keeps limits, and there are none",
            fix='give a limit, such as --goal "p95 ttft <= 800ms"',
        )
    ladder_of(plan, requests)


def _first_two_times(requests: Sequence[Request]) -> int:
    """How many of the first requests have a rate: not all of a burst that a workload begins with.

    At least `LEAST_REQUESTS`.
    """
    first_s = requests[0].arrival_s
    later = next((n for n, one in enumerate(requests) if one.arrival_s != first_s), 0)
    return max(LEAST_REQUESTS, later + 1)


def _rate(requests: Sequence[Request]) -> float:
    """How many requests arrive a second."""
    times_s = sorted(request.arrival_s or 0.0 for request in requests)
    if times_s[-1] <= times_s[0]:
        raise BadInput(
            "the requests all arrive at once, so that there is no rate to change",
            fix="keep a number of requests in flight with --concurrency",
        )
    return (len(times_s) - 1) / (times_s[-1] - times_s[0])
