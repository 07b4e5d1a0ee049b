"""Figures of a quality report: changes with limits and noise, maps over places, marks by length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvtune.autotune.quality import words
from kvtune.autotune.report.figures_workload import MARKED, OURS, PLAIN
from kvtune.autotune.report.page import Figure, plain
from kvtune.profilers.quality.suites.length_shift import LONG_RATIO
from kvtune.profilers.statistics import sorted_percentile
from kvtune.types import Interval, QualityFigure, QualityPoint

ROW_PX = 34
MAP_ROW_PX = 20
MAP_PX = 16
MARGIN_PX = 120
SIDES = ([0, 0.48], [0.52, 1])
MAP_SHARE = 0.88
"""Of its row's height; the rest keeps categories apart."""

DASHES = ("solid", "dash", "dot")
LENGTH, DEPTH = "length_tokens", "depth"

OUTCOME_COLOR = {"pass": OURS, "fail": MARKED, "unclear": PLAIN}

Cell = tuple[float, float]


def changes_figure(figures: Sequence[QualityFigure]) -> Figure:
    """One metric of a suite: each category's change (a level: its value), noise floor and limit."""
    first = figures[0]
    factor = 100.0 if first.unit == "share" else 1.0
    names = [plain(figure.category or "all") for figure in figures]
    told = [
        f"{figure.category or 'all'} {words.change(figure.change, figure.unit)}, {figure.outcome}"
        for figure in figures
    ]
    data: list[dict[str, Any]] = [
        _marks("noise floor", [figure.floor for figure in figures], names, factor, PLAIN, 9),
        {
            **_marks("candidate", [figure.change for figure in figures], names, factor, OURS, 2),
            "marker": {
                "size": 11,
                "color": [OUTCOME_COLOR[figure.outcome] for figure in figures],
            },
            "customdata": [[plain(figure.because)] for figure in figures],
            "hovertemplate": "%{y}: %{x:.3g}<br>%{customdata[0]}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "limit",
            "x": [factor * _limit(figure) for figure in figures],
            "y": names,
            "marker": {
                "symbol": "line-ns-open",
                "size": 18,
                "color": MARKED,
                "line": {"width": 2, "color": MARKED},
            },
            "hovertemplate": "limit %{x:.3g}<extra></extra>",
        },
    ]
    layout = {
        "xaxis": {"title": {"text": f"change in {words.unit_of_change(first.unit)}"}},
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True},
        "legend": {"orientation": "h", "y": 1.15},
        "margin": {"l": 10, "r": 20, "t": 50, "b": 50},
    }
    return Figure(
        f"{first.metric} of {first.suite}, by category, with 90% intervals.",
        "; ".join(told) + ".",
        {"data": data, "layout": layout},
        MARGIN_PX + ROW_PX * len(figures),
    )


def map_figure(suite: str, points: Sequence[QualityPoint]) -> Figure | None:
    """Scores over length and depth, a row of two maps for each category; None without places."""
    placed = [point for point in points if LENGTH in point.place and DEPTH in point.place]
    if not placed:
        return None
    lengths = sorted({point.place[LENGTH] for point in placed})
    depths = sorted({round(point.place[DEPTH], 1) for point in placed})
    categories = list(dict.fromkeys(point.category for point in placed))
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    told: list[str] = []
    lower = places = 0
    for row, category in enumerate(categories):
        own = [point for point in placed if point.category == category]
        sides = {
            "baseline": _means(own, lambda point: point.baseline),
            "candidate": _means(own, lambda point: point.candidate),
        }
        before, now = (fmean(cells.values()) for cells in sides.values())
        told.append(f"{category} {before:.2f} with the baseline, {now:.2f} now")
        lower += sum(sides["candidate"][cell] < score for cell, score in sides["baseline"].items())
        places += len(sides["baseline"])
        top = 1 - row / len(categories)
        for column, (who, cells) in enumerate(sides.items()):
            axis = str(2 * row + column + 1) if row or column else ""
            is_last = row == len(categories) - 1
            data.append(
                {
                    "type": "heatmap",
                    "x": [f"{length:g}" for length in lengths],
                    "y": [f"{depth:.0%}" for depth in depths],
                    "z": [[cells.get((length, depth)) for length in lengths] for depth in depths],
                    "zmin": 0,
                    "zmax": 1,
                    "colorscale": "Viridis",
                    "showscale": len(data) == 0,
                    "xaxis": f"x{axis}",
                    "yaxis": f"y{axis}",
                    "hovertemplate": f"{plain(category)}, {who}: %{{x}} tokens, depth %{{y}}: "
                    "%{z:.2f}<extra></extra>",
                    "xgap": 2,
                    "ygap": 2,
                }
            )
            axes[f"xaxis{axis}"] = {
                "domain": SIDES[column],
                "anchor": f"y{axis}",
                "type": "category",
                "showticklabels": is_last,
                "title": {"text": f"{who}, prompt tokens" if is_last else ""},
            }
            axes[f"yaxis{axis}"] = {
                "domain": [top - MAP_SHARE / len(categories), top],
                "anchor": f"x{axis}",
                "type": "category",
                "autorange": "reversed",
                "showticklabels": column == 0,
                "title": {"text": "" if column else plain(category)},
            }
    return Figure(
        f"Scores of {suite} by category, over prompt length and, downwards, depth in the text; "
        "yellow is all right.",
        f"Means over all places: {'; '.join(told)}. {lower} of {places} places are lower.",
        {"data": data, "layout": {**axes, "margin": {"l": 80, "r": 20, "t": 20, "b": 60}}},
        MARGIN_PX + len(categories) * (MAP_PX + MAP_ROW_PX * len(depths)),
    )


def ratios_figure(suite: str, points: Sequence[QualityPoint]) -> Figure | None:
    """What share of answers is up to how many times as long as the baseline's, by category.

    Points are natural logarithms of lengths. The baseline's second run stands beside the candidate;
    None without points.
    """
    if not points:
        return None
    data: list[dict[str, Any]] = []
    told: list[str] = []
    for number, category in enumerate(dict.fromkeys(point.category for point in points)):
        own = [point for point in points if point.category == category]
        arms = {
            "baseline again": (
                PLAIN,
                [each.again - each.baseline for each in own if each.again is not None],
            ),
            "candidate": (OURS, [each.candidate - each.baseline for each in own]),
        }
        for who, (color, shifts) in arms.items():
            if not shifts:
                continue
            ratios = sorted(map(math.exp, shifts))
            longer = sum(ratio > LONG_RATIO for ratio in ratios) / len(ratios)
            told.append(
                f"{category}, {who}: median {sorted_percentile(ratios, 50):.2f}, nine in ten up to "
                f"{sorted_percentile(ratios, 90):.2f}, {longer:.0%} over {LONG_RATIO:g}"
            )
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": plain(f"{category}, {who}"),
                    "x": ratios,
                    "y": [(index + 1) / len(ratios) for index in range(len(ratios))],
                    "line": {"shape": "hv", "color": color, "dash": DASHES[number % len(DASHES)]},
                    "hovertemplate": "%{y:.0%} up to %{x:.2f} times<extra></extra>",
                }
            )
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{LONG_RATIO:g} times as long",
            "x": [LONG_RATIO, LONG_RATIO],
            "y": [0, 1],
            "line": {"color": MARKED, "dash": "dot"},
            "hoverinfo": "skip",
        }
    )
    layout = {
        "xaxis": {"type": "log", "title": {"text": "times the tokens of the baseline's answer"}},
        "yaxis": {"title": {"text": "share of answers"}, "range": [0, 1.02], "tickformat": ".0%"},
        "legend": {"orientation": "h", "y": 1.15},
        "margin": {"l": 70, "r": 20, "t": 50, "b": 60},
    }
    return Figure(
        f"Lengths of {suite} answers beside the baseline's, and what it differs from itself.",
        f"{'; '.join(told)} times as long.",
        {"data": data, "layout": layout},
    )


def lengths_figure(points: Sequence[QualityPoint], figure: QualityFigure) -> Figure | None:
    """A level of every item by where it ends in the context; None without places."""
    placed = [point for point in points if LENGTH in point.place and DEPTH not in point.place]
    lengths = sorted({point.place[LENGTH] for point in placed})
    if len(lengths) < 2:
        return None
    means = [
        fmean(point.candidate for point in placed if point.place[LENGTH] == length)
        for length in lengths
    ]
    unit = f"{figure.metric}, {figure.unit}"
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "items",
            "x": [point.place[LENGTH] for point in placed],
            "y": [point.candidate for point in placed],
            "marker": {"color": PLAIN, "size": 6},
            "text": [plain(point.item) for point in placed],
            "hovertemplate": "%{text}: %{y:.3g}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "mean",
            "x": lengths,
            "y": means,
            "line": {"color": OURS},
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "limit",
            "x": [lengths[0], lengths[-1]],
            "y": [figure.limit, figure.limit],
            "line": {"color": MARKED, "dash": "dash"},
        },
    ]
    layout = {
        "xaxis": {"type": "log", "title": {"text": "the part of the context ends at (tokens)"}},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "margin": {"l": 70, "r": 20, "t": 20, "b": 60},
    }
    told = ", ".join(
        f"{mean:.3g} up to {length:g}" for length, mean in zip(lengths, means, strict=True)
    )
    return Figure(
        f"{figure.metric} of {figure.suite} by place in the context.",
        f"Means: {told} tokens; the limit is {figure.limit:g}.",
        {"data": data, "layout": layout},
    )


def _marks(
    name: str,
    intervals: Sequence[Interval | None],
    names: Sequence[str],
    factor: float,
    color: str,
    width_px: int,
) -> dict[str, Any]:
    known = [(label, found) for label, found in zip(names, intervals, strict=True) if found]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [factor * found.estimate for _, found in known],
        "y": [label for label, _ in known],
        "marker": {"size": 7, "color": color},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [factor * _above(found) for _, found in known],
            "arrayminus": [factor * _below(found) for _, found in known],
            "color": color,
            "thickness": width_px,
            "width": 0,
        },
        "hovertemplate": f"{name}: %{{x:.3g}}<extra></extra>",
    }


def _above(found: Interval) -> float:
    return 0.0 if found.high is None else max(found.high - found.estimate, 0.0)


def _below(found: Interval) -> float:
    return 0.0 if found.low is None else max(found.estimate - found.low, 0.0)


def _limit(figure: QualityFigure) -> float:
    """Where the limit stands on the axis of changes, or of values for a level."""
    if figure.kind == "level":
        return figure.limit - figure.baseline
    return -figure.limit if figure.better == "higher" else figure.limit


def _means(points: Sequence[QualityPoint], value: Any) -> Mapping[Cell, float]:
    cells: dict[Cell, list[float]] = {}
    for point in points:
        cell = (point.place[LENGTH], round(point.place[DEPTH], 1))
        cells.setdefault(cell, []).append(value(point))
    return {cell: fmean(values) for cell, values in cells.items()}
