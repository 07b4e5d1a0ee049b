"""How quality figures are put into words, the same in the terminal and on pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtune.autotune.words import digits
from kvtune.types import Interval, QualityFigure, QualityReport

SUMMARY_START = "quality, "
"""How every summary starts, so that it is known among other reasons."""

NOT_ASKED = "its answers were checked by the long-prompt canary and on its own traffic only"
"""What is said of settings that may change answers, where no suite was asked."""

NAMED = 5
"""So many figures are named in a sentence."""

NAMED_SHORT = 2
"""So many where the sentence is one of many."""


def name(figure: QualityFigure) -> str:
    """Suite, category and metric in short."""
    category = figure.category or "all"
    return f"{figure.suite}/{category} {figure.metric}"


def level(value: float, unit: str) -> str:
    """A figure's value; shares in per cent."""
    return f"{digits(100 * value)}%" if unit == "share" else f"{digits(value)} {unit}".rstrip()


def change(value: Interval | None, unit: str) -> str:
    """A change with its interval; shares change by points. The unit is left to a heading."""
    if value is None:
        return "-"
    estimate = _signed(value.estimate, unit)
    if value.low is None or value.high is None:
        return estimate
    return f"{estimate} ({span(value, unit)})"


def span(value: Interval | None, unit: str) -> str:
    """The interval of a change alone; the change itself where there is none."""
    if value is None or value.low is None or value.high is None:
        return "-" if value is None else _plain(value.estimate, unit)
    return f"{_plain(value.low, unit)} to {_plain(value.high, unit)}"


def number(value: float, unit: str) -> str:
    """A figure's value where a heading names its unit."""
    return level(value, unit) if unit == "share" else digits(value)


def unit_of_change(unit: str) -> str:
    """What a change of a figure with this unit counts in."""
    return "points" if unit == "share" else unit


def verdict(report: QualityReport) -> str:
    """What a reader may conclude, and how many items would tell more."""
    if report.outcome == "pass":
        return "No category lost more than its limit allows."
    deciding = [figure for figure in report.figures if figure.decides]
    if report.outcome == "fail":
        failed = [figure for figure in deciding if figure.outcome == "fail"]
        return f"Surely lost more than the limit allows: {_names(failed)}."
    open_ones = [figure for figure in deciding if figure.outcome == "unclear"]
    if not open_ones:
        return "Not enough evidence: not all that should be judged could be."
    beyond = [figure for figure in open_ones if _is_beyond(figure)]
    found = (
        f"Not enough evidence. Beyond the limit here, but perhaps by chance: {_names(beyond)}."
        if beyond
        else "No sign of damage, but not enough evidence: "
        f"{_broken(deciding)}, and every change that counts is within its limit here. "
        f"That the limit holds is not proved for {_names(open_ones)}."
    )
    return f"{found} {_more_items(open_ones)}".rstrip()


def summary(report: QualityReport) -> str:
    """The outcome in one line: what was lost, or what came nearest to its limit."""
    deciding = [figure for figure in report.figures if figure.decides]
    worst_first = sorted(deciding, key=_share_of_limit, reverse=True)
    said = f"{SUMMARY_START}{report.size} size"
    if report.outcome == "pass":
        nearest = f"; the worst, {_loss(worst_first[0])}" if worst_first else ""
        return f"{said}: no category is worse than its limit{nearest}"
    told = _without_pooled([each for each in worst_first if each.outcome == report.outcome])
    if report.outcome == "fail":
        return f"{said}: worse than allowed: {_few([_loss(each, limit=True) for each in told])}"
    if not told:
        missing = [*(f"{suite}: {why}" for suite, why in report.skipped.items()), *report.warnings]
        return f"{said}: not all could be judged: {_few(missing)}"
    said += f": not enough evidence for {_few([name(each) for each in told])}"
    needed = [(each.items_needed, each) for each in told if each.items_needed is not None]
    if not needed:
        return f"{said}: more items would hardly prove it"
    most, hardest = max(needed, key=lambda pair: pair[0] / pair[1].items)
    return f"{said}: {most} items needed of {name(hardest)}, which had {hardest.items}"


def worst(report: QualityReport) -> QualityFigure | None:
    """The category that lost the most of what it may lose, or more; `None` where none decides."""
    deciding = [figure for figure in report.figures if figure.decides and figure.category]
    return max(deciding, key=_share_of_limit, default=None)


def telling(figures: Sequence[QualityFigure]) -> list[QualityFigure]:
    """The figures that a reader wants to see: what failed or decides, and what a suite is for.

    The first metric of a suite is what it is for, and levels (a divergence) count by themselves.
    Sorted by suite and metric, all items together last.
    """
    first: dict[str, str] = {}
    for figure in figures:
        first.setdefault(figure.suite, figure.metric)
    found = [
        figure
        for figure in figures
        if figure.outcome == "fail"
        or figure.decides
        or figure.kind == "level"
        or figure.metric == first[figure.suite]
    ]
    suites, metrics = list(first), list(dict.fromkeys(figure.metric for figure in found))
    return sorted(
        found,
        key=lambda each: (
            suites.index(each.suite),
            metrics.index(each.metric),
            not each.category,
        ),
    )


def _names(figures: Sequence[QualityFigure]) -> str:
    names = [name(figure) for figure in figures]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _without_pooled(figures: Sequence[QualityFigure]) -> list[QualityFigure]:
    """The figures without those of a whole suite whose categories are there too."""
    parts = {(each.suite, each.metric) for each in figures if each.category}
    return [each for each in figures if each.category or (each.suite, each.metric) not in parts]


def _few(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - NAMED_SHORT} more" if len(texts) > NAMED_SHORT else ""
    return ", ".join(texts[:NAMED_SHORT]) + more


def _loss(figure: QualityFigure, *, limit: bool = False) -> str:
    """A figure with its change and interval, and its limit if that is asked for."""
    unit = "pt" if figure.unit == "share" else f" {figure.unit}".rstrip()
    said = f"{name(figure)}, {_signed(figure.change.estimate, figure.unit)}{unit}"
    if figure.change.low is not None and figure.change.high is not None:
        low, high = (_signed(end, figure.unit) for end in (figure.change.low, figure.change.high))
        said += f" ({low} to {high})"
    if not limit:
        return said
    if figure.kind == "level":
        return f"{said}, limit {level(figure.limit, figure.unit)}"
    return f"{said}, limit {_plain(figure.limit, figure.unit)}{unit}"


def _share_of_limit(figure: QualityFigure) -> float:
    """How much of what is allowed was lost; above 1 is beyond the limit, below 0 a gain."""
    sign = 1 if figure.better == "lower" else -1
    lost = sign * figure.change.estimate
    if figure.kind == "difference":
        return lost / figure.limit
    allowed = sign * (figure.limit - figure.baseline)
    if allowed > 0:
        return lost / allowed
    return math.inf if _is_beyond(figure) else lost


def _is_beyond(figure: QualityFigure) -> bool:
    """Whether a value is worse than its limit, surely or not."""
    value = figure.candidate if figure.kind == "level" else figure.change.estimate
    if figure.better == "lower":
        return value > figure.limit
    return value < (figure.limit if figure.kind == "level" else -figure.limit)


def _broken(figures: Sequence[QualityFigure]) -> str:
    asked = [figure for figure in figures if figure.category and figure.kind == "difference"]
    items, broken = (sum(getattr(each, what) for each in asked) for what in ("items", "broken"))
    return f"{broken} of {items} items broke" if broken else "no item broke"


def _more_items(figures: Sequence[QualityFigure]) -> str:
    """How many items could prove that limits hold; a category's number is what `--items` takes."""
    needed = [figure for figure in figures if figure.items_needed is not None]
    told = []
    if each := [figure for figure in needed if figure.category]:
        most = max(figure.items_needed or 0 for figure in each)
        told.append(f"{most} items of each category (--items {most})")
    told += [f"{each.items_needed} of {name(each)}" for each in needed if not each.category]
    return f"What could prove it, if no more changes: {', and '.join(told)}." if told else ""


def _signed(value: float, unit: str) -> str:
    text = _plain(value, unit)
    return text if text.startswith("-") or text == "0" else f"+{text}"


def _plain(value: float, unit: str) -> str:
    if unit != "share":
        return f"{float(f'{value:.2g}'):g}"
    points = 100 * value
    text = f"{points:.0f}" if abs(points) >= 10 else f"{points:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
