"""One figure: what the items of a category say about a metric, and the ruling on its limit.

A *difference* passes when a loss of more than the limit is ruled out (the one-sided 95% bound of
the paired change), and fails when the loss surely exceeds it, both against the baseline and
against the baseline's second run on the same items. What lies between is unclear, and says how many
items could support the limit. A *level* is a mean that is judged in the same way against its limit,
and fails only when it also exceeds what the baseline shows against itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Literal

from kvtune.profilers.quality import paired
from kvtune.profilers.quality.suite import QualityMetric
from kvtune.profilers.statistics import Estimate
from kvtune.types import Interval

SIGNIFICANT = 0.05
"""The chance of any false failure in a report, and of each bound's being wrong."""

LEAST_HEADROOM = 0.1
"""A baseline that is nearer than this to the worst score has nothing to lose."""

TELLING_CHANGE = 0.5
"""A bounded score that changes by this much broke or mended its item."""


@dataclass(frozen=True, slots=True)
class Row:
    """An item's values of one metric.

    `ours` and `theirs` are the candidate's and the baseline's, `again` the pair of the baseline's
    second run and the baseline. `headline` tells the metric that the suite's name stands for.
    Items `about` the same text are not independent.
    """

    suite: str
    category: str
    item: str
    metric: QualityMetric
    headline: bool
    ours: float
    theirs: float
    again: tuple[float, float] | None = None
    about: str = ""

    @property
    def decides(self) -> bool:
        """Whether its figure counts without being named by a limit."""
        return self.headline or self.metric.decides or self.metric.kind == "level"

    @property
    def gain(self) -> float:
        """How much better the candidate is, in units of the metric's range if it has one."""
        return _gain(self.metric, self.ours, self.theirs)

    @property
    def broke(self) -> bool:
        """Whether the item was fine and is not now; only a bounded score can say so."""
        return self._bounded and self.gain <= -TELLING_CHANGE

    @property
    def mended(self) -> bool:
        """`broke` the other way round."""
        return self._bounded and self.gain >= TELLING_CHANGE

    @property
    def _bounded(self) -> bool:
        return self.metric.bounds is not None and self.metric.kind == "difference"

    @property
    def floor_gain(self) -> float | None:
        """`gain` of the baseline's second run; `None` where there is none."""
        return None if self.again is None else _gain(self.metric, *self.again)


@dataclass(frozen=True, slots=True)
class Ruling:
    """Whether a limit holds, and why."""

    outcome: Literal["pass", "fail", "unclear"]
    because: str
    items_needed: int | None = None


class Evidence(ABC):
    """What rows of one metric say. `worse` is the p-value of "no worse than the limit".

    Where the baseline has not `something_to_lose`, no number of items tells anything.
    """

    worse: float
    something_to_lose = True

    def __init__(self, rows: Sequence[Row], limit: float) -> None:
        self.metric = rows[0].metric
        self.limit = limit
        self.items = len(rows)
        self.candidate = fmean(row.ours for row in rows)
        self.baseline = fmean(row.theirs for row in rows)
        self.gains = [row.gain for row in rows]
        self._about = [row.about or row.item for row in rows]
        self._spread = 0.0 if self.metric.bounds is not None else self.metric.scale
        self.floor_gains = [gain for row in rows if (gain := row.floor_gain) is not None]
        self.broken = sum(row.broke for row in rows)
        self.mended = sum(row.mended for row in rows)

    @property
    def change(self) -> Interval:
        """Candidate minus baseline, in the metric's unit."""
        return self._interval(self._change(), self.gains)

    @property
    def floor(self) -> Interval | None:
        """Second run of the baseline minus baseline; `None` where there was none."""
        if not self.floor_gains:
            return None
        return self._interval(self._estimate(self.floor_gains), self.floor_gains)

    @abstractmethod
    def rule(self, adjusted: float, together: int) -> Ruling:
        """Judge the limit; `adjusted` is `worse` corrected for `together` figures."""

    @property
    def _is_bounded(self) -> bool:
        return self.metric.bounds is not None

    def _change(self) -> Estimate:
        """The mean gain; its interval holds where items about one text share their fate."""
        found = self._estimate(self.gains)
        texts: dict[str, list[float]] = {}
        for about, gain in zip(self._about, self.gains, strict=True):
            texts.setdefault(about, []).append(gain)
        if len(texts) == self.items:
            return found
        means = [fmean(own) for own in texts.values()]
        return paired.widened(found, paired.mean_bounds(means, spread=self._spread))

    def _estimate(self, gains: Sequence[float]) -> Estimate:
        return paired.change_interval(gains, bounded=self._is_bounded, spread=self._spread)

    def _interval(self, found: Estimate, gains: Sequence[float]) -> Interval:
        unit = _range(self.metric) * (1 if self.metric.better == "higher" else -1)
        bounds = [None if bound is None else bound * unit + 0.0 for bound in found[1:]]
        return Interval(
            estimate=found[0] * unit + 0.0,
            low=bounds[unit < 0],
            high=bounds[unit > 0],
            unit=self.metric.unit,
            confidence=paired.CONFIDENCE,
            repeats=len(gains),
            method=paired.method(gains, bounded=self._is_bounded),
        )


class Difference(Evidence):
    """Paired changes, at most `limit` for the worse."""

    def __init__(self, rows: Sequence[Row], limit: float) -> None:
        super().__init__(rows, limit)
        self._margin = limit / _range(self.metric)
        self._bounded = self._is_bounded
        self.something_to_lose = not self._bounded or self._headroom() >= LEAST_HEADROOM
        self.worse = self._worse(self.gains)
        # What the two runs lost beside each other: a change that both show is the baseline's own.
        beside = [row.gain - gain for row in rows if (gain := row.floor_gain) is not None]
        self._worse_than_floor = self._worse(beside) if beside else 0.0

    def _worse(self, gains: Sequence[float]) -> float:
        widest = max(1.0, *map(abs, gains)) if self._bounded else 1.0
        return paired.worse_probability(
            [gain / widest for gain in gains],
            self._margin / widest,
            bounded=self._bounded,
            spread=self._spread,
        )

    def rule(self, adjusted: float, together: int) -> Ruling:
        """Judge the margin; see the module's text."""
        _, low, high = self._change()
        allowed = _change(self.metric, self._margin)
        happened = self._happened()
        if not self.something_to_lose:
            return Ruling(
                "unclear",
                f"not informative: the baseline itself scores {_level(self.metric, self.baseline)} "
                f"on {_items(self.items)}, so there is nothing to lose",
            )
        if adjusted <= SIGNIFICANT and self._worse_than_floor <= SIGNIFICANT:
            surely = ""
            if high is not None and high < -self._margin:
                surely = f"at least {_change(self.metric, -high)} worse, "
            return Ruling("fail", f"{happened}: {surely}{allowed} allowed")
        if low is not None and low >= -self._margin:
            worst = f"at most {_change(self.metric, -low)} worse" if low < 0 else "no worse"
            return Ruling("pass", f"{happened}: {worst}, {allowed} allowed")
        if adjusted <= SIGNIFICANT:
            return Ruling(
                "unclear",
                f"{happened}, but beside the baseline's second run this may be noise",
            )
        needed = paired.items_needed_like(
            self.gains, self._margin, bounded=self._bounded, spread=self._spread
        )
        if self.worse <= SIGNIFICANT:
            return Ruling(
                "unclear",
                f"{happened}: probably more than {allowed} worse, but not surely so when "
                f"{together} figures are looked at",
            )
        if needed is None:
            return Ruling("unclear", f"{happened}: more items would hardly support {allowed}")
        return Ruling(
            "unclear",
            f"{happened}, but {_items(self.items)} cannot rule out a loss of {allowed}: "
            f"{needed} needed",
            needed,
        )

    def _headroom(self) -> float:
        low, high = self.metric.bounds or (0.0, 1.0)
        room = self.baseline - low if self.metric.better == "higher" else high - self.baseline
        return room / (high - low)

    def _happened(self) -> str:
        if not self._bounded or any(gain not in (-1.0, 0.0, 1.0) for gain in self.gains):
            return (
                f"from {_level(self.metric, self.baseline)} to "
                f"{_level(self.metric, self.candidate)} over {_items(self.items)}"
            )
        mended = f", {self.mended} mended" if self.mended else ""
        if not self.broken:
            return f"no item broke of {self.items}{mended}"
        share = f"{100 * self.broken / self.items:.0f}%"
        return f"{self.broken} of {_items(self.items)} broke ({share}){mended}"


class Level(Evidence):
    """Values that compare the two already; their mean is at most (or at least) `limit`."""

    def __init__(self, rows: Sequence[Row], limit: float) -> None:
        super().__init__(rows, limit)
        self._sign = 1 if self.metric.better == "lower" else -1
        self._values = [self._sign * row.ours for row in rows]
        self._floor = [self._sign * row.again[0] for row in rows if row.again is not None]
        self.worse = paired.above_probability(
            self._values, self._sign * limit, spread=self.metric.scale
        )

    def rule(self, adjusted: float, together: int) -> Ruling:
        """Judge the mean; see the module's text."""
        mean, low, high = self._level(self._change())
        bound = self._sign * self.limit
        allowed = f"{self._text(bound)} allowed"
        if low is None or high is None:
            return Ruling(
                "unclear",
                f"{self._text(mean)} over {_items(self.items)}: too few, at least "
                f"{paired.LEAST_ITEMS} needed",
                paired.LEAST_ITEMS,
            )
        seen = f"{self._text(mean)} over {_items(self.items)}"
        if adjusted <= SIGNIFICANT and low > self._floor_high():
            return Ruling("fail", f"{seen}: surely beyond {self._text(low)}, {allowed}")
        if high <= bound:
            return Ruling("pass", f"{seen}: surely within {self._text(high)}, {allowed}")
        if self._floor and fmean(self._floor) > bound:
            return Ruling(
                "unclear",
                f"the baseline differs from itself by {self._text(fmean(self._floor))}: no limit "
                f"nearer than that can be tested, and {allowed}",
            )
        if adjusted <= SIGNIFICANT:
            return Ruling("unclear", f"{seen}, {allowed}: the baseline differs from itself as much")
        if self.worse <= SIGNIFICANT:
            return Ruling(
                "unclear",
                f"{seen}, {allowed}: probably beyond, but not surely so when {together} figures "
                "are looked at",
            )
        squares, distance = pvariance(self._values), bound - mean
        needed = (
            paired.bounded_items_needed(squares, distance)
            if self._is_bounded
            else paired.mean_items_needed(
                squares, distance, more_than=self.items, spread=self._spread
            )
        )
        more = "more would hardly support the limit" if needed is None else f"{needed} needed"
        return Ruling(
            "unclear",
            f"{seen}, between {self._text(low)} and {self._text(high)}, {allowed}: {more}",
            needed,
        )

    def _floor_high(self) -> float:
        if not self._floor:
            return float("-inf")
        mean, _, high = self._level(self._estimate(self.floor_gains))
        return mean if high is None else high

    def _level(self, gain: Estimate) -> Estimate:
        """The level behind a gain, lower when better."""
        mean, low, high = gain
        at = self._sign * self.baseline
        return Estimate(
            at - mean, None if high is None else at - high, None if low is None else at - low
        )

    def _text(self, value: float) -> str:
        return _level(self.metric, self._sign * value)


def evidence(rows: Sequence[Row], limit: float) -> Evidence:
    """What rows of one metric (at least one) say about a limit."""
    return (Difference if rows[0].metric.kind == "difference" else Level)(rows, limit)


def _range(metric: QualityMetric) -> float:
    return 1.0 if metric.bounds is None or metric.kind == "level" else metric.scale


def _gain(metric: QualityMetric, ours: float, theirs: float) -> float:
    change = (ours - theirs) / _range(metric)
    return change if metric.better == "higher" else -change


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"


def _level(metric: QualityMetric, value: float) -> str:
    if metric.unit == "share":
        return f"{100 * value:.4g}%"
    return f"{value:.3g} {metric.unit}".rstrip()


def _change(metric: QualityMetric, gain: float) -> str:
    """The size of a change in the metric's unit; shares change by points."""
    size = gain * _range(metric)
    if metric.unit == "share":
        points = f"{100 * size:.3g}"
        return f"{points} point" if points == "1" else f"{points} points"
    return f"{size:.3g} {metric.unit}".rstrip()
