"""Small-sample statistics: percentiles, intervals, ratios.

Repeats of a server measurement are few (3 to 10), so intervals of means use Student's t. Nothing
here needs SciPy. `None` bounds mean that the data cannot give any, never an infinitely sure value.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean, variance
from typing import NamedTuple

BOOTSTRAP_RESAMPLES = 2000
UNLIKE = 9.0
"""Variances so many times each other are not pooled: in simulated studies, noise that differs by
configuration then names no more false winners, and a wild one hides fewer true ones."""


class Estimate(NamedTuple):
    """A value with the bounds of its confidence interval, in the unit of the data.

    The bounds are `None` where there are too few values to give any.
    """

    estimate: float
    low: float | None
    high: float | None


class Contrast(NamedTuple):
    """The difference of two means, its standard error, and the degrees of freedom of that."""

    difference: float
    error: float
    freedom: float

    def bounds(self, level: float) -> tuple[float, float]:
        """The interval that the true difference lies below, and above, with chance `level` each."""
        half = self.error and self.error * t_quantile(1 - level, self.freedom)
        return self.difference - half, self.difference + half

    def chance(self) -> float:
        """The p-value of "there is no difference above 0", one-sided."""
        if self.error == 0:
            return 0.0 if self.difference > 0 else 1.0
        return t_probability(-self.difference / self.error, self.freedom)


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile (0 to 100) by linear interpolation between order statistics.

    Same definition as NumPy's default and as vLLM's own benchmark.

    Raises:
        ValueError: `values` is empty or `percent` is outside 0 to 100.
    """
    return sorted_percentile(sorted(values), percent)


def sorted_percentile(ordered: Sequence[float], percent: float) -> float:
    """`percentile` of values that are sorted already."""
    if not ordered or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(ordered)} values does not exist")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    fraction = position - below
    low, high = ordered[below], ordered[above]
    # Interpolating from the nearer end keeps the result within [low, high] despite rounding.
    if fraction < 0.5:
        return low + (high - low) * fraction
    return high - (high - low) * (1 - fraction)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Mean with its Student t interval; no bounds for a single value.

    Raises:
        ValueError: `values` is empty.
    """
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None)
    half = t_quantile(0.5 + confidence / 2, len(values) - 1) * math.sqrt(
        variance(values) / len(values)
    )
    return Estimate(mean, mean - half, mean + half)


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    seed: int,
    confidence: float = 0.95,
) -> Estimate:
    """`statistic` of the values with its percentile-bootstrap interval; reproducible by `seed`.

    For statistics without a formula (a p95 over requests). Values must be independent; with fewer
    than about 20 it is too narrow. No bounds for a single value.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    estimate = statistic(values)
    if len(values) < 2:
        return Estimate(estimate, None, None)
    rng = random.Random(seed)
    resampled = sorted(
        statistic(rng.choices(values, k=len(values))) for _ in range(BOOTSTRAP_RESAMPLES)
    )
    tail = 100 * (1 - confidence) / 2
    return Estimate(
        estimate, sorted_percentile(resampled, tail), sorted_percentile(resampled, 100 - tail)
    )


def paired_ratio_interval(
    pairs: Sequence[tuple[float, float]], confidence: float = 0.95
) -> Estimate | None:
    """How many times the candidate's value is the baseline's, measured right after each other.

    `pairs` are (candidate, baseline). Ratio of geometric means with Student's t interval of the
    logarithms, so it is the same whether a quantity or its inverse is compared; pairing removes
    slow drift of the machine from it. `None` when there is no pair or a value is not positive: a
    ratio of logarithms does not exist then. No bounds for a single pair.
    """
    if not pairs or min(min(pair) for pair in pairs) <= 0:
        return None
    estimate, low, high = mean_interval(
        [math.log(ours / theirs) for ours, theirs in pairs], confidence
    )
    return Estimate(
        math.exp(estimate),
        None if low is None else math.exp(low),
        None if high is None else math.exp(high),
    )


def block_contrast(columns: Sequence[Sequence[float]], first: int, second: int) -> Contrast:
    """How far one column's mean lies above another's, where rows share what disturbed them.

    `columns` are (columns, rows): a complete two-way layout without interaction (Fisher's
    randomised blocks), whose residuals over all columns give the variance of an error. Where the
    differences of these two columns alone scatter more than that, or far less, their own variance
    counts, with its own degrees of freedom: a noisy column must not borrow the calm of the others,
    and a calm pair need not suffer from one that is wild.

    Raises:
        ValueError: there are fewer than two rows or two columns.
    """
    rows = len(columns[first])
    if rows < 2 or len(columns) < 2:
        raise ValueError(f"no contrast in {len(columns)} columns of {rows} rows")
    row_means = [fmean(row) for row in zip(*columns, strict=True)]
    mean = fmean(row_means)
    residual_squares = sum(
        (value - fmean(column) - row_means[row] + mean) ** 2
        for column in columns
        for row, value in enumerate(column)
    )
    differences = [a - b for a, b in zip(columns[first], columns[second], strict=True)]
    freedom = (rows - 1) * (len(columns) - 1)
    pooled, own = residual_squares / freedom, variance(differences) / 2
    if own > pooled or pooled > UNLIKE * own:
        pooled, freedom = own, rows - 1
    return Contrast(fmean(differences), math.sqrt(2 * pooled / rows), freedom)


def ratio_interval(contrast: Contrast, base: float, level: float) -> Estimate:
    """How many times `base` a mean is that lies `contrast` above it, both of equal variance.

    By Fieller's theorem (1954): the ratios that the data do not contradict, of which 1 is one
    exactly if the contrast may be 0. A bound is `None` where `base` may be 0, as seen from there.

    Raises:
        ValueError: `base` is not positive.
    """
    if base <= 0:
        raise ValueError(f"nothing is a multiple of {base}")
    mean = base + contrast.difference
    half = contrast.error and contrast.error * t_quantile(1 - level, contrast.freedom)
    noise = half**2 / 2
    # Where (mean - ratio * base)^2 <= noise * (1 + ratio^2), a parabola in the ratio.
    opening = base**2 - noise
    inside = noise * (base**2 + mean**2 - noise)
    root = math.sqrt(max(0.0, inside))
    if opening > 0:
        return Estimate(mean / base, (mean * base - root) / opening, (mean * base + root) / opening)
    if opening == 0 or inside < 0 or mean**2 <= noise:
        return Estimate(mean / base, None, None)
    return Estimate(mean / base, (mean * base - root) / opening, None)


@cache
def t_quantile(probability: float, freedom: float) -> float:
    """Student's t quantile: the value that a t variable stays below with `probability`.

    Inverts the regularised incomplete beta function by bisection; good to about 1e-10.

    Raises:
        ValueError: `probability` is not inside (0, 1) or `freedom` is not positive.
    """
    if not 0 < probability < 1 or freedom <= 0:
        raise ValueError(f"no t quantile for probability {probability}, freedom {freedom}")
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    tail = 2 * (1 - probability)
    low, high = 0.0, 1.0
    while _two_sided_tail(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _two_sided_tail(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_probability(value: float, freedom: float) -> float:
    """P(T <= value) for a Student t variable.

    Raises:
        ValueError: `freedom` is not positive.
    """
    if freedom <= 0:
        raise ValueError(f"no t distribution with freedom {freedom}")
    tail = _two_sided_tail(value, freedom) / 2
    return tail if value < 0 else 1 - tail


def binomial_tail(least: int, trials: int, share: float) -> float:
    """P(X >= least) for the successes X in `trials` independent trials of probability `share`."""
    if least <= 0:
        return 1.0
    if least > trials:
        return 0.0
    return _incomplete_beta(share, least, trials - least + 1)


def binomial_interval(count: int, of: int, confidence: float = 0.95) -> Estimate:
    """A share with its exact interval (Clopper and Pearson, 1934).

    Raises:
        ValueError: there are no cases, or more are counted than there are.
    """
    if not 0 <= count <= of or of == 0:
        raise ValueError(f"no share of {count} in {of}")
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else _share_where(lambda share: binomial_tail(count, of, share), tail)
    high = (
        1.0
        if count == of
        else _share_where(lambda share: binomial_tail(count + 1, of, share), 1 - tail)
    )
    return Estimate(count / of, low, high)


def _share_where(tail: Callable[[float], float], chance: float) -> float:
    """The share at which a tail that rises with it reaches `chance`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) < chance else (low, middle)
    return (low + high) / 2


def fisher_probability(count: int, of: int, other: int, other_of: int) -> float:
    """The p-value of "count / of is no larger a share than other / other_of" (Fisher's exact test).

    One-sided, exact for any numbers: the share of all ways to draw `of` of the pooled cases that
    have `count` marked ones or more. 1 where either side is empty.

    Raises:
        ValueError: a count is negative or above its total.
    """
    if not (0 <= count <= of and 0 <= other <= other_of):
        raise ValueError(f"{count} of {of} and {other} of {other_of} do not exist")
    marked = count + other
    ways = sum(
        math.comb(of, ours) * math.comb(other_of, marked - ours)
        for ours in range(count, min(of, marked) + 1)
    )
    return ways / math.comb(of + other_of, marked)


def _two_sided_tail(value: float, freedom: float) -> float:
    """P(|T| > value) for a t variable."""
    return _incomplete_beta(freedom / (freedom + value * value), freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b) through its continued fraction."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only on this side
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    return front * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    tiny = 1e-300
    upper, lower = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    result = lower
    for step in range(1, 500):
        even = step * (b - step) * x / ((a + 2 * step - 1) * (a + 2 * step))
        odd = -(a + step) * (a + b + step) * x / ((a + 2 * step) * (a + 2 * step + 1))
        before = result
        for term in (even, odd):
            lower = 1 / (1 + term * lower or tiny)
            upper = 1 + term / upper or tiny
            result *= upper * lower
        if abs(result / before - 1) < 1e-15:
            break
    return result
