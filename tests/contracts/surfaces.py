"""Surfaces of a search: a formula over the places of knobs, measured with noise."""

import functools
import math
import random
from dataclasses import dataclass, replace

from contracts.forecast_baseline import CPU, context

from kvtune.autotune.explore.base import Observation
from kvtune.autotune.explore.candidates import candidate, candidates, key_of, place
from kvtune.autotune.explore.prior import Foretold
from kvtune.autotune.space import SearchSpace, build_space
from kvtune.types import FailureClass, Goal, Harm, Slo

GOAL = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=1.0),))
CTX = replace(context(device=CPU, blocks=4000), max_concurrency=20)
SMALL = ("block_size", "max_num_seqs", "max_num_batched_tokens")
LARGE = (*SMALL, "kv_cache_dtype", "watermark")


@functools.cache
def space_of(names=SMALL):
    whole = build_space(CTX, harm=Harm.NEAR_LOSSLESS)
    return SearchSpace(tuple(k for k in whole.knobs if k.knob.name in names), {})


@functools.cache
def points_of(names):
    """All points of a space, or, of a large one, thousands."""
    return tuple(candidates(space_of(names), CTX, most=10_000, rng=random.Random(0)))


def share_of(log_excess):
    """The share of good requests where the p95 is so far above its limit."""
    return 1 / (1 + math.exp(min(50.0, 6 * (log_excess - 0.5))))


@dataclass
class Surface:
    """`log_rate(places)` and `log_excess(places)` of the limit; `crashes(places)` says what dies.

    Places are by knob name, from 0 to 1 (numbers of a knob without order). Without a `log_excess`
    the goal has no limit. `told(places)` is the log rate that a simulation would give.
    """

    log_rate: callable
    log_excess: callable = None
    crashes: callable = lambda at: False
    told: callable = None
    names: tuple = SMALL
    noise: float = 0.04

    def __post_init__(self):
        self.space = space_of(self.names)
        self.goal = Goal() if self.log_excess is None else GOAL
        self.points = points_of(self.names)

    def places(self, values):
        return {k.knob.name: place(k, values[k.knob.name]) for k in self.space.knobs}

    def values(self, arguments):
        by_name = {name.replace("-", "_"): value for name, value in arguments.items()}
        return {**self.space.defaults, **by_name}

    def truth(self, arguments):
        """The objective without noise; 0 where a limit is missed, or nothing runs."""
        at = self.places(self.values(arguments))
        if self.crashes(at) or (self.log_excess and self.log_excess(at) > 0):
            return 0.0
        good = share_of(self.log_excess(at)) if self.log_excess else 1.0
        return math.exp(self.log_rate(at)) * good

    def best(self):
        return max(self.truth(one.stack.arguments) for one in self.points)

    def observe(self, arguments, rng, at_s=0.0):
        at = self.places(self.values(arguments))
        if self.crashes(at):
            return Observation(arguments, {}, at_s, 10.0, failure=FailureClass.CRASH_AT_START)
        figures = self.figures(self.log_rate(at) + rng.gauss(0, self.noise), at, rng)
        return Observation(arguments, figures, at_s, 20.0)

    def figures(self, log_rate, at, rng=None):
        rate = math.exp(log_rate)
        found = {"requests_per_s": rate, "goodput_requests_per_s": rate, "good_share_ratio": 1.0}
        if self.log_excess:
            excess = self.log_excess(at) + (rng.gauss(0, 2 * self.noise) if rng else 0.0)
            share = share_of(excess)
            if rng:
                share = sum(rng.random() < share for _ in range(64)) / 64
            found["ttft_p95_s"] = math.exp(excess)
            found["good_share_ratio"] = share
            found["goodput_requests_per_s"] = rate * share
        return found

    def foretell(self, arguments):
        if self.told is None:
            return None
        at = self.places(self.values(arguments))
        return Foretold(self.figures(self.told(at), at), key_of(arguments))


def point(surface, **values):
    return candidate(surface.space, values, CTX)
