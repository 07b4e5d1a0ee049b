"""What a screen shows of a candidate: how much of its answers changes, and where its levels lie.

A screen has too few items of a suite to tell how many of these change, and of a category it has
hardly any. So its counts over all categories and suites are taken together, with some imagined
items of somebody who changes as the stock defaults do by themselves; and each suite's own counts
with some of somebody who changes as the candidate does over all. What they say may be too little
by chance as well as too much, and too few items cost the proof: one standard error is added, with
which the chance to pass is on average over screens what it is meant to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kvtune.profilers.quality.limits import ANY
from kvtune.profilers.quality.suite import QualityMetric, Size, Suite
from kvtune.types import QualityPoint, QualityReport

TYPICAL_CHANGE: Mapping[Size, float] = {Size.SCREEN: 0.01, Size.STANDARD: 0.01, Size.FULL: 0.05}
"""The mean square of what answers change, over what they could: of right or wrong, the share that
changes. Of 300 greedy answers of SmolLM2-135M (vLLM 0.32 on a CPU, bfloat16) none changed when the
stock server was asked again in other batches: at most a hundredth, then. With fp8 KV it was 0.07
over 190 answers: full asks enough for most of that.
"""

BROKEN_CHANGE = 0.005
"""The same of broken outputs: there one of 100 answers with fp8 KV, and none of 300 without."""

PRIOR_ITEMS = 50
"""So many items that change as is typical are added to those of two passes of the stock defaults,
so that one of a few that changed by chance does not multiply what is asked."""

LIKE_THE_REST = 20
"""So many imagined items that change as the rest does are added to a candidate's own: fewer, since
a screen is asked once of each candidate, and whoever changes more than it seems proves nothing."""

LEVEL_PRIOR = 4
"""So many values that lie a metric's usual spread off are added to those of a level."""


@dataclass(frozen=True, slots=True)
class Level:
    """Where the items of a category lie: their mean, in the metric's unit, and variance."""

    mean: float
    squares: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What a screen shows.

    `changes` as in `TYPICAL_CHANGE`, by suite; `broken` is that of broken outputs. `levels` has the
    categories of a suite's metric. `changed` is the plain share over all `items`, and `stock` that
    of the stock defaults' second pass.
    """

    changes: Mapping[str, float] = field(default_factory=dict)
    broken: float = BROKEN_CHANGE
    levels: Mapping[tuple[str, str], Mapping[str, Level]] = field(default_factory=dict)
    items: int = 0
    changed: float = 0.0
    stock: float = 0.0


def seen_in(suites: Sequence[Suite], report: QualityReport) -> Seen:
    """What a screen's report shows; items without an answer are in none of its figures."""
    points: dict[str, list[QualityPoint]] = {}
    for point in report.points:
        points.setdefault(point.suite, []).append(point)
    headlines = {
        suite.name: suite.metrics[0]
        for suite in suites
        if suite.name in points and suite.metrics[0].kind == "difference"
    }
    own = {name: _squares(metric, points[name]) for name, metric in headlines.items()}
    stock = {name: _squares(metric, points[name], again=True) for name, metric in headlines.items()}
    # A change of a length has no bounds: one of them could outweigh all that is right or wrong.
    telling = [name for name, metric in headlines.items() if metric.bounds is not None]
    all_own = [square for name in telling for square in own[name]]
    all_stock = [square for name in telling for square in stock[name]]
    typical = TYPICAL_CHANGE[Size.STANDARD]
    over_all = _shrunk(all_own, _shrunk(all_stock, typical, PRIOR_ITEMS), LIKE_THE_REST)
    changes = {}
    for name in headlines:
        prior = max(over_all, _shrunk(stock[name], typical, PRIOR_ITEMS))
        change = _shrunk(own[name], prior, LIKE_THE_REST)
        changes[name] = change + math.sqrt(change / (len(all_own) + LIKE_THE_REST))
    return Seen(
        changes=changes,
        broken=_broken(report),
        levels=_levels(suites, report, points),
        items=len(all_own),
        changed=fmean(all_own) if all_own else 0.0,
        stock=fmean(all_stock) if all_stock else 0.0,
    )


def _squares(
    metric: QualityMetric, points: Iterable[QualityPoint], *, again: bool = False
) -> list[float]:
    """What each item changed beside the baseline, squared, over what it could."""
    values = ((point.again if again else point.candidate, point.baseline) for point in points)
    return [((ours - theirs) / metric.scale) ** 2 for ours, theirs in values if ours is not None]


def _shrunk(squares: Sequence[float], prior: float, items: int) -> float:
    return (sum(squares) + items * prior) / (len(squares) + items)


def _broken(report: QualityReport) -> float:
    figure = next((one for one in report.figures if one.suite == ANY), None)
    if figure is None:
        return BROKEN_CHANGE
    changed = figure.broken + figure.mended
    return (changed + PRIOR_ITEMS * BROKEN_CHANGE) / (figure.items + PRIOR_ITEMS)


def _levels(
    suites: Sequence[Suite], report: QualityReport, points: Mapping[str, Sequence[QualityPoint]]
) -> dict[tuple[str, str], dict[str, Level]]:
    metrics = {(suite.name, metric.name): metric for suite in suites for metric in suite.metrics}
    headlines = {suite.name: suite.metrics[0].name for suite in suites}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for figure in report.figures:
        about = (figure.suite, figure.metric)
        if figure.kind == "level" and figure.category and about in metrics:
            found.setdefault(about, {})[figure.category] = figure.candidate
    levels: dict[tuple[str, str], dict[str, Level]] = {}
    for about, means in found.items():
        # Only of a suite's first metric does a report tell what each item was.
        own = points.get(about[0], ()) if headlines[about[0]] == about[1] else ()
        off = [(one.candidate - means[one.category]) ** 2 for one in own if one.category in means]
        free = len(off) - len(means) if off else 0
        levels[about] = {
            category: Level(
                mean,
                (sum(off) + LEVEL_PRIOR * _usual_squares(metrics[about], mean))
                / (free + LEVEL_PRIOR),
            )
            for category, mean in means.items()
        }
    return levels


def _usual_squares(metric: QualityMetric, mean: float) -> float:
    """The variance of a metric's items, or the most that its bounds allow beside their mean."""
    if metric.bounds is None:
        return metric.scale**2
    low, high = metric.bounds
    return (mean - low) * (high - mean)
