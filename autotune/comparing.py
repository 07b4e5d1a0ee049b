"""What the rounds of a confirmation say about finalists beside the baseline, and who goes on.

Rounds and configurations make a two-way layout, so that a machine which is slower for a round
favours nobody. It is one of logarithms, as noise is mostly a share of what is measured. Where few
requests of many were good, one more or less is a large share, and logarithms would be all noise:
there the values themselves are compared. Finalists are tested together by Holm's method (1979) at
what the look may be wrong by (`rounds`). One interval a finalist says everything: better, worse, or
by how much at most it can be better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from kvtune.autotune.rounds import level_at, level_left, looks
from kvtune.profilers.statistics import (
    Contrast,
    Estimate,
    block_contrast,
    ratio_interval,
    t_probability,
    t_quantile,
)

MATTERS = 0.02
"""A gain that is worth a change of settings; where more than that is excluded, looking ends."""

HOPELESS = 0.05
"""Chance of being proved by the last look below which a finalist is measured no more."""

COUNTED = 0.16
"""Standard deviation of a round's value, as a share of it, by which requests happened to be good,
above which values are compared and not logarithms: 20 of 40 have it."""


class Value(NamedTuple):
    """The objective in one round, and how many requests were good there, `of` how many.

    Both are infinite where the objective counts no requests, or nobody knows how many.
    """

    value: float
    good: float = math.inf
    of: float = math.inf

    @property
    def is_many(self) -> bool:
        """Whether its logarithm is no noisier than what else disturbs a round."""
        return self.value > 0 and self.counting <= (COUNTED * self.value) ** 2

    @property
    def counting(self) -> float:
        """The variance of the value if each request is good or not by itself: at least so much."""
        return self.value**2 * (1 / self.good - 1 / self.of) if self.good else 0.0


Values = Mapping[int, Sequence[Value]]
"""What each configuration gave, a value a round; those of one round stand at one place."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finalist beside the baseline.

    `contrast` is of logarithms if it `is_ratio`, else of the values. The baseline's mean value is
    `stock`. `level` is the chance with which each bound is wrong.
    """

    rounds: int
    contrast: Contrast
    is_ratio: bool
    stock: float
    level: float

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval of the contrast."""
        return self.contrast.bounds(self.level)

    @property
    def is_above(self) -> bool:
        """Whether it is better than the baseline beyond noise."""
        return self.bounds[0] > 0

    @property
    def is_below(self) -> bool:
        """Whether it is worse than the baseline beyond noise."""
        return self.bounds[1] < 0

    @property
    def gain(self) -> float:
        """The gain over the baseline, as a share of it."""
        return self._share(self.contrast.difference)

    @property
    def most_gain(self) -> float:
        """The largest gain over the baseline, as a share of it, that is not excluded."""
        return self._share(self.bounds[1])

    @property
    def ratio(self) -> Estimate | None:
        """How many times the baseline's value it has; `None` where that is 0."""
        if self.is_ratio:
            low, high = self.bounds
            return Estimate(math.exp(self.contrast.difference), math.exp(low), math.exp(high))
        if not self.stock:
            return None
        found = ratio_interval(self.contrast, self.stock, self.level)
        # Fieller's theorem does not know that no objective is below 0.
        return found if found.low is None else found._replace(low=max(0.0, found.low))

    def _share(self, difference: float) -> float:
        if self.is_ratio:
            return math.expm1(difference)
        return difference / self.stock if self.stock else math.copysign(math.inf, difference)

    def hope(self, most: int, finalists: int) -> float:
        """The chance that the last of `most` rounds proves it better, by what is known so far.

        The predictive power of Spiegelhalter, Freedman and Blackburn (1986), without a prior.
        """
        if self.rounds >= most or self.contrast.error == 0:
            return 1.0 if self.is_above else 0.0
        done = self.rounds / most
        difference, error, freedom = self.contrast
        proof = t_quantile(
            1 - level_at(most, most) / finalists, freedom * (most - 1) / (self.rounds - 1)
        )
        missing = proof * error * math.sqrt(done) - difference
        return t_probability(-missing / (error * math.sqrt(1 - done)), freedom)


def contrast_of(values: Values, first: int, second: int) -> tuple[Contrast, bool] | None:
    """How far one configuration is above another, in their common rounds; `None` below two.

    In logarithms where both had many good requests in all of these rounds, which the second part
    says. The noise is that of all configurations that were in them and have logarithms as good; of
    values it is at least what counting requests gives.
    """
    rounds = min(len(values[first]), len(values[second]))
    if rounds < 2:
        return None
    common = {n: found[:rounds] for n, found in values.items() if len(found) >= rounds}
    many = {n: own for n, own in common.items() if all(one.is_many for one in own)}
    is_ratio = first in many and second in many
    used = many if is_ratio else common
    columns = [[math.log(v.value) if is_ratio else v.value for v in own] for own in used.values()]
    numbers = list(used)
    contrast = block_contrast(columns, numbers.index(first), numbers.index(second))
    if not is_ratio:
        counting = fmean(v.counting for n in (first, second) for v in common[n])
        contrast = contrast._replace(error=max(contrast.error, math.sqrt(2 * counting / rounds)))
    return contrast, is_ratio


def findings(values: Values, baseline: int, level: Callable[[int], float]) -> dict[int, Finding]:
    """Each finalist beside the baseline; `level` says what so many rounds may be wrong by.

    Without those that have fewer than two rounds. Those whose rounds ended early still count among
    the finalists: each was one more chance of an error.
    """
    found = {
        number: (len(own), *beside)
        for number, own in values.items()
        if number != baseline and (beside := contrast_of(values, number, baseline)) is not None
    }

    def chance_by_level(number: int) -> float:
        rounds, contrast, _ = found[number]
        return contrast.chance() / level(rounds)

    stock = fmean(one.value for one in values[baseline])
    told = {}
    left, all_above = len(found), True
    for number in sorted(found, key=chance_by_level):
        rounds, contrast, is_ratio = found[number]
        told[number] = Finding(rounds, contrast, is_ratio, stock, level(rounds) / left)
        all_above = all_above and told[number].is_above
        left -= all_above
    return told


def at_last(values: Values, baseline: int, most: int) -> dict[int, Finding]:
    """The findings once no more rounds are measured, of at most `most` that were planned.

    Who was measured no more at an earlier look is judged as at that look: what is left of the whole
    is for those who went on.
    """
    last = max((len(own) for number, own in values.items() if number != baseline), default=0)

    def level(rounds: int) -> float:
        if rounds == last:
            return level_left(rounds, most)
        ended = [look for look in looks(most) if look <= rounds]
        return level_at(ended[-1] if ended else looks(most)[0], most)

    return findings(values, baseline, level)


@dataclass(frozen=True, slots=True)
class Next:
    """Who is measured in the next round, the baseline among them; if nobody is, `why` says it."""

    going: tuple[int, ...] = ()
    why: str = ""


def next_round(
    values: Values,
    baseline: int,
    most: int,
    *,
    able: Collection[int],
    sure: Collection[int],
) -> Next:
    """Who is measured in the next round, after one that each of the last ones has a value of.

    `able` are the finalists that meet the goal so far: at a look, others are given up. So are those
    that are proved, that cannot matter, that have hardly a chance to be proved, and that are behind
    a proved one which is `sure` to stand: where answers are judged later, a lossless one.
    """
    rounds = max(map(len, values.values()), default=0)
    running = [number for number, own in values.items() if len(own) == rounds]
    if running == [baseline]:
        return Next(why="no finalist is left")
    if rounds not in looks(most):
        return Next(tuple(running))
    if baseline not in values:
        return Next(why="there are no stock defaults to compare with")
    found = findings(values, baseline, lambda own_rounds: level_at(own_rounds, most))
    proved = {n: found[n].gain for n in able if n in found and found[n].is_above}
    best = max((gain for n, gain in proved.items() if n in sure), default=-math.inf)
    running = [n for n in running if n in able and n in found and n not in proved]
    ahead = [n for n in running if found[n].gain > best]
    mattering = [n for n in ahead if found[n].most_gain >= MATTERS]
    going = [n for n in mattering if found[n].hope(most, len(found)) >= HOPELESS]
    if rounds == most or not found:
        return Next()
    if going:
        return Next((baseline, *going))
    if proved:
        return Next(why="a finalist is above the stock defaults beyond noise")
    if mattering:
        return Next(why="more rounds would hardly prove a gain over the stock defaults")
    if ahead:
        return Next(why=f"a gain above {MATTERS:.0%} over the stock defaults is excluded")
    return Next(why="no finalist meets the goal")
