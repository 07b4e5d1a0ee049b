"""Statistics of paired changes: intervals, the chance of an effect, how many items a limit needs.

A *gain* is how much better an item's score is with the candidate than with the baseline, negative
when it got worse. Bounded gains come from scores between 0 and 1 and lie in -1 to 1; unbounded
ones (a log ratio) may have any size. Intervals are two-sided at 90%, so each bound holds with 95%:
the size of a one-sided test of non-inferiority.

Which interval is used for what:

- Gains that are all -1, 0 or 1 (right or wrong): Tango's score interval for a paired difference.
- Other bounded gains: Student's t, each bound with one imaginary item added that went fully that
  way. So it has a width without any change too, where it is -(1 + t) / (n + 1): Tango's, nearly.
- Unbounded gains, and levels without bounds: the widest of Student's t, the percentile bootstrap,
  and Student's t with one imaginary item added that lies a `spread` off the mean, from
  `LEAST_ITEMS` on. The spread is how far a changed item of the metric usually lies from the others
  (`QualityMetric.scale`). So a few equal values prove no more here than elsewhere: n of them leave
  (1 + t) / (n + 1) of a spread open, 63% for 4 and 13% for 20.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, variance

from kvtune.profilers.statistics import (
    BOOTSTRAP_RESAMPLES,
    Estimate,
    binomial_tail,
    mean_interval,
    t_probability,
    t_quantile,
)

CONFIDENCE = 0.90
"""Of the two-sided intervals; each bound alone holds with 95%."""

LEAST_ITEMS = 3
"""Fewer values than this have no interval when nothing bounds them."""

MOST_ITEMS = 1_000_000
"""No test asks more than this; a limit that would need it cannot be supported."""


def change_interval(
    gains: Sequence[float],
    *,
    bounded: bool,
    spread: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """The mean gain with the interval that fits the values; see the module's text for the rule.

    `spread` is for gains that are not bounded.

    Raises:
        ValueError: `gains` is empty.
    """
    if not bounded:
        return mean_bounds(gains, confidence, spread=spread)
    if _all_or_nothing(gains):
        return tango_interval(_count(gains, -1), _count(gains, 1), len(gains), confidence)
    mean, low, high = fmean(gains), *_student_bounds(gains, confidence, (-1.0, 1.0))
    return Estimate(mean, max(-1.0, low), min(1.0, high))


def tango_interval(
    broken: float, mended: float, items: int, confidence: float = CONFIDENCE
) -> Estimate:
    """Score interval for the mended share minus the broken share of paired items.

    Tango, Statistics in Medicine 17 (1998): the differences that a score test does not reject,
    where the nuisance share takes its likeliest value under each. Right for zero discordance too,
    where it is +-z^2/(n + z^2). With few items the bound can miss a little more often than it
    says (6.9% in the worst case of n = 52 without mended items). Counts may be fractions.

    Raises:
        ValueError: there are no items, or more changed ones than items.
    """
    if items < 1 or min(broken, mended) < 0 or broken + mended > items:
        raise ValueError(f"{broken} broken and {mended} mended of {items} items do not exist")
    z = _quantile(confidence)
    estimate = (mended - broken) / items
    low = -_tango_bound(broken, mended, items, z)
    return Estimate(estimate, low, _tango_bound(mended, broken, items, z))


def mean_bounds(
    values: Sequence[float], confidence: float = CONFIDENCE, *, spread: float = 0.0
) -> Estimate:
    """The mean of values of any size; no bounds below `LEAST_ITEMS`.

    The bounds are at least as far off as with one more value that lies `spread` off.

    Raises:
        ValueError: `values` is empty.
    """
    if len(values) < LEAST_ITEMS:
        return Estimate(fmean(values), None, None)
    import numpy

    mean, low, high = mean_interval(values, confidence)
    picks = numpy.random.default_rng(0).integers(
        len(values), size=(BOOTSTRAP_RESAMPLES, len(values))
    )
    tail = (1 - confidence) / 2
    below, above = numpy.quantile(numpy.asarray(values)[picks].mean(axis=1), (tail, 1 - tail))
    assert low is not None
    assert high is not None
    if spread:
        lowest, highest = _student_bounds(values, confidence, (mean - spread, mean + spread))
        low, high = min(low, lowest), max(high, highest)
    return Estimate(mean, min(low, float(below)), max(high, float(above)))


def widened(found: Estimate, by_text: Estimate) -> Estimate:
    """An interval that is nowhere narrower than another one is, both around the first's mean.

    For items of which several are about the same text: `by_text` is that of the texts' means. It
    alone would be too narrow where no text shows a change.
    """
    mean, low, high = found
    around, text_low, text_high = by_text
    if low is None or high is None or text_low is None or text_high is None:
        return Estimate(mean, None, None)
    return Estimate(mean, min(low, mean + text_low - around), max(high, mean + text_high - around))


def worse_probability(
    gains: Sequence[float], limit: float, *, bounded: bool, spread: float = 0.0
) -> float:
    """The p-value of "the mean gain is at least -limit": small when it is surely worse than that.

    Right-or-wrong gains: the exact probability of as many more broken than mended items, the
    nuisance share at its likeliest value under the limit. The normal approximation of the score
    is too sure in the far tail, where a correction for many figures looks. Other bounded gains:
    Student's t with an imaginary item that was fully mended. Unbounded: Student's t, or that with
    an imaginary item a `spread` above the mean, whichever is less sure. No evidence (1.0) below
    `LEAST_ITEMS` values, the imaginary one included where gains are bounded.

    Raises:
        ValueError: `gains` is empty.
    """
    if bounded and _all_or_nothing(gains):
        return _tail(_count(gains, -1), _count(gains, 1), len(gains), limit)
    return _student([*gains, 1.0], -limit) if bounded else _doubted(gains, -limit, spread)


def above_probability(values: Sequence[float], limit: float, *, spread: float = 0.0) -> float:
    """The p-value of "the mean is at most limit"; small when it is surely above.

    By Student's t, as of unbounded gains in `worse_probability`.

    Raises:
        ValueError: `values` is empty.
    """
    return _doubted([-value for value in values], -limit, spread)


def holm(probabilities: Sequence[float]) -> list[float]:
    """P-values adjusted for being looked at together (Holm, 1979), in the given order.

    Rejecting those at or below 5% makes any false rejection among all of them a 5% affair,
    however they depend on each other.
    """
    order = sorted(range(len(probabilities)), key=lambda index: probabilities[index])
    adjusted = [0.0] * len(probabilities)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * probabilities[index]))
        adjusted[index] = running
    return adjusted


def items_needed(
    limit: float,
    discordance: float = 0.0,
    confidence: float = CONFIDENCE,
    *,
    power: float = 0.5,
) -> int | None:
    """How many right-or-wrong items could support a limit when in truth nothing got worse.

    `discordance` is the share of items that change, for the better as often as for the worse.
    `power` is the chance that so many do support the limit, by the normal approximation with a
    correction for continuity; without, it is a sample in which as many were mended as broke. `None`
    for a limit that no number supports.
    """
    z, unlucky = _quantile(confidence), NormalDist().inv_cdf(power)
    continuity = 0.5 if unlucky and discordance else 0.0

    def enough(items: int) -> bool:
        lost = min(1.0, (unlucky * math.sqrt(items * discordance) + continuity) / items)
        changed = max(discordance, lost)
        broken, mended = items * (changed + lost) / 2, items * (changed - lost) / 2
        return _tango_bound(broken, mended, items, z) <= limit

    return _fewest(enough)


def items_needed_like(
    gains: Sequence[float], limit: float, *, bounded: bool, spread: float = 0.0
) -> int | None:
    """How many items that vary as these do could support a limit; `None` if no number would.

    Assumes that in truth nothing got worse, as `items_needed`. When these items are already as
    many and still do not support it, assumes that the mean stays what it is.

    Raises:
        ValueError: `gains` is empty.
    """
    mean = fmean(gains)
    squares = fmean((gain - mean) ** 2 for gain in gains)
    if bounded and _all_or_nothing(gains):
        needed = items_needed(limit, (_count(gains, -1) + _count(gains, 1)) / len(gains))
    elif bounded:
        needed = bounded_items_needed(squares, limit)
    else:
        needed = mean_items_needed(squares, limit, spread=spread)
    if needed is None or needed > len(gains):
        return needed
    return mean_items_needed(squares, limit + mean, more_than=len(gains), spread=spread)


def bounded_items_needed(squares: float, distance: float, *, power: float = 0.5) -> int | None:
    """How many bounded gains of that variance tell their mean from one `distance` below it.

    `power` as in `items_needed`.
    """
    unlucky = NormalDist().inv_cdf(power)
    return _fewest(
        lambda items: (
            _lost_at_most(squares, items) + unlucky * math.sqrt(squares / items) <= distance
        )
    )


def mean_items_needed(
    squares: float,
    distance: float,
    *,
    more_than: int = 0,
    spread: float = 0.0,
    power: float = 0.5,
) -> int | None:
    """How many values of that variance tell a mean from one that is `distance` away.

    `spread` as in `mean_bounds`, `power` as in `items_needed`, with the same correction: few values
    may change by a whole `spread` each, and those that do widen the interval too.
    """
    if distance <= 0:
        return None
    z, unlucky = _quantile(CONFIDENCE), NormalDist().inv_cdf(power)
    continuity = 0.5 * spread if unlucky and squares else 0.0

    def enough(items: int) -> bool:
        lost = unlucky * math.sqrt(squares / items) + continuity / items
        seen = max(squares, lost * spread)
        imagined = _lost_at_most(seen, items, spread) if spread else 0.0
        return lost + max(z * math.sqrt(seen / items), imagined) <= distance

    needed = _fewest(enough)
    return None if needed is None else max(needed, LEAST_ITEMS, more_than + 1)


def method(gains: Sequence[float], *, bounded: bool) -> str:
    """The name of what `change_interval` uses for these gains."""
    if not bounded:
        return "t, bootstrap or an imaginary item, the widest"
    return "Tango" if _all_or_nothing(gains) else "t with an imaginary item"


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _all_or_nothing(gains: Sequence[float]) -> bool:
    return all(gain in (-1.0, 0.0, 1.0) for gain in gains)


def _count(gains: Sequence[float], which: int) -> int:
    return sum(gain == which for gain in gains)


def _larger_share(more: float, fewer: float, items: int, difference: float) -> float:
    """The likeliest share of the `more` kind when it exceeds the other's by `difference`."""
    linear = (2 * items + fewer - more) * difference - more - fewer
    root = linear * linear + 8 * items * fewer * difference * (1 - difference)
    return (math.sqrt(max(0.0, root)) - linear) / (4 * items) + difference


def _tango_bound(more: float, fewer: float, items: int, z: float) -> float:
    """The largest difference of the two shares that the score test does not reject."""

    def too_large(difference: float) -> bool:
        share = _larger_share(more, fewer, items, difference)
        spread = items * max(0.0, 2 * share - difference - difference * difference)
        return items * difference - (more - fewer) > z * math.sqrt(spread)

    low, high = (more - fewer) / items, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if too_large(middle) else (middle, high)
    return high


def _tail(broken: int, mended: int, items: int, limit: float) -> float:
    """P(broken - mended is at least what was seen) when the broken share is `limit` higher."""
    worse = min(1.0, max(limit, _larger_share(broken, mended, items, limit)))
    changed = min(1.0, 2 * worse - limit)
    if changed <= 0:
        return 1.0 if broken <= mended else 0.0
    total = 0.0
    for count in range(items + 1):
        weight = _binomial(count, items, changed)
        if weight > 1e-18:
            least = max(0, math.ceil((broken - mended + count) / 2))
            total += weight * binomial_tail(least, count, worse / changed)
    return min(1.0, total)


def _binomial(count: int, items: int, share: float) -> float:
    if share >= 1:
        return float(count == items)
    return math.exp(
        math.lgamma(items + 1)
        - math.lgamma(count + 1)
        - math.lgamma(items - count + 1)
        + count * math.log(share)
        + (items - count) * math.log1p(-share)
    )


def _student_bounds(
    gains: Sequence[float], confidence: float, imagined: tuple[float, float]
) -> tuple[float, float]:
    """The lower bound with the first imagined item added, and the upper one with the second."""
    low = mean_interval([*gains, imagined[0]], confidence).low
    high = mean_interval([*gains, imagined[1]], confidence).high
    assert low is not None
    assert high is not None
    return low, high


def _lost_at_most(squares: float, items: int, spread: float = 1.0) -> float:
    """The lower bound of `_student_bounds`, negated, for gains of mean 0 and that variance.

    The imaginary item is at minus `spread`.
    """
    whole = items * squares + spread * spread * items / (items + 1)
    error = math.sqrt(whole / items / (items + 1))
    return spread / (items + 1) + t_quantile(0.5 + CONFIDENCE / 2, items) * error


def _doubted(values: Sequence[float], threshold: float, spread: float) -> float:
    """`_student`, or if that is less sure, with one more value that lies `spread` above."""
    found = _student(values, threshold)
    if not spread or found == 1.0:
        return found
    return max(found, _student([*values, fmean(values) + spread], threshold))


def _student(values: Sequence[float], threshold: float) -> float:
    """The p-value of "the mean is at least `threshold`"."""
    mean = fmean(values)
    if len(values) < LEAST_ITEMS:
        return 1.0
    if min(values) == max(values):
        return 1.0 if values[0] >= threshold else 0.0
    error = math.sqrt(variance(values) / len(values))
    return t_probability((mean - threshold) / error, len(values) - 1)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The smallest number of items that is enough, where more are never too few."""
    high = 1
    while not enough(high):
        if high >= MOST_ITEMS:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
