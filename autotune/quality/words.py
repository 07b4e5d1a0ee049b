"""How quality figures are put into words, the same in the terminal and on pages."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.autotune.words import digits
from kvtune.types import Interval, QualityFigure


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


def telling(figures: Sequence[QualityFigure]) -> list[QualityFigure]:
    """The figures that a reader wants to see: all that failed, and of each suite what it is for.

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


def _signed(value: float, unit: str) -> str:
    text = _plain(value, unit)
    return text if text.startswith("-") or text == "0" else f"+{text}"


def _plain(value: float, unit: str) -> str:
    if unit != "share":
        return f"{float(f'{value:.2g}'):g}"
    points = 100 * value
    text = f"{points:.0f}" if abs(points) >= 10 else f"{points:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
