"""What a limit needs: how many items, and what chance a right candidate has with fewer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from kvtune.autotune.quality.seen import Level, Seen
from kvtune.profilers.quality import paired
from kvtune.profilers.quality.limits import Limit, limit_text
from kvtune.profilers.statistics import binomial_tail

EVEN = 0.5
"""The least chance to pass with which a finalist is asked, where no more items can be had."""

SAMPLED_CHANGE: Mapping[str, float] = {"sampled-length": 0.6}
"""What metrics of sampled answers change by themselves, as in `TYPICAL_CHANGE`."""

WIDEST_STEPS = 40
"""So many wider limits are tried when none of those that were given can be proved."""


@dataclass(frozen=True, slots=True)
class TooFew:
    """A limit that the items which are asked are too few for.

    `needed` is `None` where no number would do. `chance` is that of a right candidate to pass with
    those that are asked, all figures of the limit together. `where` says what that rests on,
    `of_what` which items are counted. `wider` is the nearest limit that so many items could prove,
    if one is known.
    """

    limit: Limit
    needed: int | None
    asked: int
    chance: float
    where: str
    of_what: str = ""
    is_hopeless: bool = False
    wider: Limit | None = None

    @property
    def wants(self) -> str:
        """What the limit would take."""
        items = f"more items {self.of_what}than anybody asks"
        if self.needed is not None:
            items = f"{self.needed} items {self.of_what}".rstrip()
        return (
            f"{limit_text(self.limit)!r} would take {items} to be proved with some certainty where "
            f"{self.where}"
        )

    def __str__(self) -> str:
        then = "cannot be proved unless answers get better"
        then = then if self.is_hopeless else "may stay unproved"
        return f"{self.wants}, and {self.asked} are asked: it {then}"


def figures_of(limit: Limit, sizes: Mapping[str, int]) -> int:
    """How many figures a limit is about: of all items, of one category, or of each."""
    return 1 if limit.pooled or limit.category is not None else len(sizes)


@dataclass(frozen=True, slots=True)
class Want:
    """What a limit needs of each category, of which it has so many `figures`.

    `number(limit, power)` is that of another limit in its place, `chance(items)` that of a right
    candidate to pass one figure.
    """

    limit: Limit
    figures: int
    power: float
    where: str
    number: Callable[[Limit, float], int | None]
    chance: Callable[[int], float]
    of_what: str = "of each category "

    @property
    def items(self) -> int:
        """How many; far more than can be asked where no number would do."""
        needed = self.number(self.limit, self.power)
        return paired.MOST_ITEMS if needed is None else needed

    def too_few(self, fewest: int) -> TooFew:
        """What is said where so few are asked."""
        limit = self.limit
        metric, margin = limit.metric, limit.value / limit.metric.scale
        least: int | None = 0
        if metric.kind == "difference":
            least = (
                paired.items_needed(margin)
                if metric.bounds is not None
                else paired.mean_items_needed(0.0, margin, spread=1.0)
            )
        return TooFew(
            limit,
            self.number(limit, self.power),
            fewest,
            self.chance(fewest) ** self.figures,
            self.where,
            self.of_what,
            is_hopeless=not limit.pooled and (least is None or fewest < least),
            wider=self._wider(fewest),
        )

    def _wider(self, items: int) -> Limit | None:
        """The nearest limit in whole steps that so many items prove; `None` without any near."""
        limit = self.limit
        step = 0.01 if limit.metric.unit == "share" else limit.metric.limit / 10
        sign = -1 if limit.metric.kind == "level" and limit.metric.better == "higher" else 1
        first = math.floor(limit.value / step + 1e-9)
        for steps in range(1, WIDEST_STEPS):
            value = round((first + sign * steps) * step, 10)
            if value <= 0:
                return None
            other = replace(limit, value=value)
            if (needed := self.number(other, self.power)) is not None and needed <= items:
                return other
        return None


def chance_to_pass(items: int, change: float, margin: float) -> float:
    """The chance that right-or-wrong items show that no more than a margin of them is lost.

    In truth `change` of them change, as many for the better as for the worse. Summed over how many
    may break, each with the fewest mended ones that still let Tango's interval hold the margin.
    """

    def holds(broken: int, mended: int) -> bool:
        low = paired.tango_interval(broken, mended, items).low
        return low is not None and low >= -margin

    half, total, mended = change / 2, 0.0, 0
    for broken in range(items + 1):
        rest = items - broken
        while mended <= rest and not holds(broken, mended):
            mended += 1
        if mended > rest:
            break
        exactly = binomial_tail(broken, items, half) - binomial_tail(broken + 1, items, half)
        total += exactly * binomial_tail(mended, rest, half / (1 - half))
    return total


def difference_want(limit: Limit, change: float, sizes: Mapping[str, int], power: float) -> Want:
    """What the limit of a difference needs."""
    change = max(change, SAMPLED_CHANGE.get(limit.metric.name, 0.0))
    metric, shared = limit.metric, len(sizes) if limit.pooled else 1

    def number(limit: Limit, power: float) -> int | None:
        needed = items_for(limit, change, power)
        return None if needed is None else math.ceil(needed / shared)

    def chance(items: int) -> float:
        if metric.bounds is not None:
            return chance_to_pass(items * shared, min(change, 1.0), limit.value / metric.scale)
        return _by_number(number(limit, EVEN ** (1 / figures_of(limit, sizes))), items)

    where = f"{100 * change:.2g}% of the answers change"
    return Want(limit, figures_of(limit, sizes), power, where, number, chance)


def level_want(limit: Limit, seen: Seen, sizes: Mapping[str, int], power: float) -> Want:
    """What the limit of a level needs: nothing that is known of before a screen has shown it.

    A category that no screen asks is thought like the worst of those that it does: levels of long
    texts are worse than those of short ones, if anything.
    """
    found = seen.levels.get((limit.suite, limit.metric.name), {})
    figures, shared = figures_of(limit, sizes), len(sizes) if limit.pooled else 1
    if not found:
        return Want(limit, figures, power, "", lambda limit, power: 0, lambda items: 1.0)
    sign = 1 if limit.metric.better == "lower" else -1
    named = [level for category, level in found.items() if limit.is_of(category)]
    worst = max(named or found.values(), key=lambda level: sign * level.mean)
    if limit.pooled:
        worst = replace(worst, mean=math.fsum(each.mean for each in found.values()) / len(found))

    def number(limit: Limit, power: float) -> int | None:
        needed = items_for_level(limit, worst, power)
        return None if needed is None else math.ceil(needed / shared)

    def chance(items: int) -> float:
        return _by_number(number(limit, EVEN ** (1 / figures)), items)

    unit = limit.metric.unit
    at = f"{100 * worst.mean:.3g}%" if unit == "share" else f"{worst.mean:.3g} {unit}".rstrip()
    return Want(limit, figures, power, f"its screen showed {at}", number, chance)


def _by_number(needed: int | None, items: int) -> float:
    """Certain or impossible: all that a number of items says of what has no exact chance."""
    return float(needed is not None and needed <= items)


@lru_cache(maxsize=1024)
def items_for(limit: Limit, change: float, power: float = 0.5) -> int | None:
    """How many items support a limit with a chance of `power` if nothing got worse.

    `change` as in `TYPICAL_CHANGE`. `None` for levels, of which nothing but answers can tell, and
    for limits that no number supports.
    """
    metric = limit.metric
    if metric.kind != "difference":
        return None
    margin = limit.value / metric.scale
    if metric.bounds is None:
        return paired.mean_items_needed(change, margin, spread=1.0, power=power)
    # Whether a score knows more than right and wrong shows only in the answers.
    whole = paired.items_needed(margin, change, power=power)
    graded = paired.bounded_items_needed(change, margin, power=power)
    return None if whole is None or graded is None else max(whole, graded)


def items_for_level(limit: Limit, level: Level, power: float = 0.5) -> int | None:
    """How many items support the limit of a level that lies there; `None` if none do."""
    metric = limit.metric
    distance = limit.value - level.mean if metric.better == "lower" else level.mean - limit.value
    if distance <= 0:
        return None
    if metric.bounds is None:
        return paired.mean_items_needed(level.squares, distance, spread=metric.scale, power=power)
    scale = metric.scale
    return paired.bounded_items_needed(level.squares / scale**2, distance / scale, power=power)
