"""Figures of a study: the confirmation's rounds, how the search went on, and limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvtune.autotune.report.figures_workload import MARKED, OURS, PLAIN
from kvtune.autotune.report.page import Figure, plain
from kvtune.autotune.report.study_findings import Confirmed, Margin, Progress
from kvtune.autotune.report.study_view import Standing, StudyView, basis, name_of
from kvtune.autotune.words import amount, duration, interval
from kvtune.types import Harm, Measurement

FAILED = "#c9574f"
COLOURS: Mapping[Standing, str] = {
    Standing.MET: OURS,
    Standing.UNPROVED: "#9673c9",
    Standing.MISSED: PLAIN,
    Standing.OUT: MARKED,
    Standing.FAILED: FAILED,
}
SYMBOLS: Mapping[Harm, str] = {
    Harm.LOSSLESS: "circle",
    Harm.NEAR_LOSSLESS: "square",
    Harm.LOSSY: "diamond",
}
SPREAD = 0.45
"""How much of a column's width its rounds take; their mean stands at the right of them."""

MOST_TICKS = 20
"""More numbers of trials would not stand side by side below a figure."""

ROW_PX = 26
MARGIN_PX = 130


def of_points(view: StudyView) -> str:
    """What a figure of all measured trials rests on."""
    return basis(view, measurements(view), "trial")


def measurements(view: StudyView) -> list[Measurement]:
    """Those of the points that have a number."""
    found = [point.row.measurement for point in view.measured]
    return [measurement for measurement in found if measurement is not None]


def harm_note(view: StudyView) -> str:
    """What the marks that are no circles mean, if there are any."""
    if all(point.harm is Harm.LOSSLESS for point in view.points):
        return ""
    return "Squares may change answers a little, diamonds more. "


def rounds_figure(view: StudyView, found: Sequence[Confirmed]) -> Figure | None:
    """Each finalist's rounds, from left to right in the order of time, with mean and interval."""
    if not found:
        return None
    most = max(number for each in found for number in each.rounds)
    step = SPREAD / max(most - 1, 1)
    names = [name_of(each.trial) for each in found]
    spots = [
        (place - 0.3 + (number - 1) * step, value, number)
        for place, each in enumerate(found)
        for number, value in sorted(each.rounds.items())
    ]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "a round",
            "x": [x for x, _, _ in spots],
            "y": [value for _, value, _ in spots],
            "customdata": [number for _, _, number in spots],
            "marker": {"symbol": "circle-open", "size": 8, "color": PLAIN, "line": {"width": 2}},
            "hovertemplate": "round %{customdata}: %{y:.4g}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "mean, 95% interval",
            "x": [place + 0.3 for place in range(len(found))],
            "y": [each.mean.estimate for each in found],
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [_above(each) for each in found],
                "arrayminus": [_below(each) for each in found],
                "thickness": 2,
                "width": 8,
                "color": OURS,
            },
            "marker": {"symbol": "diamond", "size": 12, "color": OURS},
            "customdata": [interval(each.mean) for each in found],
            "hovertemplate": "mean %{customdata}<extra></extra>",
        },
    ]
    layout = {
        "xaxis": {
            "tickvals": list(range(len(found))),
            "ticktext": names,
            "range": [-0.6, len(found) - 0.4],
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {"title": {"text": view.objective_text}, "rangemode": "tozero"},
        "hovermode": "closest",
    }
    words = "; ".join(
        f"{name} {interval(each.mean)}"
        + ("" if each.ratio is None else f", {interval(each.ratio)} times stock")
        for name, each in zip(names, found, strict=True)
    )
    counted = [each.measurement for each in view.rounds if each.measurement is not None]
    return Figure(
        "Finalists beside the stock defaults.",
        "Hollow marks are rounds, from left to right as they were measured in turns. "
        f"{words}. {basis(view, counted, 'measurement')}",
        {"data": data, "layout": layout},
        420,
    )


def progress_figures(view: StudyView, found: Sequence[Progress]) -> list[Figure]:
    """The best so far over trials and over the seconds that servers took."""
    if not any(each.value is not None for each in found):
        return []
    failed = sum(each.value is None for each in found)
    last = next((each.best for each in reversed(found) if each.best is not None), None)
    told = "no trial that may be shipped met the goal"
    if last is not None:
        told = f"it ended at {amount(last, view.unit)}"
    note = (
        "Crosses at 0 are trials without a number; they have no value. " if failed else ""
    ) + f"{harm_note(view)}{of_points(view)}"
    spent_s = found[-1].spent_s
    every = math.ceil(len(found) / MOST_TICKS)
    by_trial = _progress(view, found, [float(place) for place in range(len(found))])
    by_trial["layout"]["xaxis"] = {
        "title": {"text": "trials in the order of the search"},
        "tickvals": list(range(len(found)))[::every],
        "ticktext": [str(each.number) for each in found[::every]],
        "zeroline": False,
    }
    by_time = _progress(view, found, [each.spent_s for each in found])
    by_time["layout"]["xaxis"] = {
        "title": {"text": "seconds with a server, starts included"},
        "rangemode": "tozero",
    }
    return [
        Figure(
            "Best so far, by trial.",
            f"The line is the best that meets the goal and may be shipped; {told}. {note}",
            by_trial,
        ),
        Figure(
            "Best so far, by seconds.",
            f"The same over {duration(spent_s)} of server time, pauses and the confirmation left "
            f"out. {note}",
            by_time,
        ),
    ]


def _progress(view: StudyView, found: Sequence[Progress], x: Sequence[float]) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    line = [(at, each.best) for at, each in zip(x, found, strict=True) if each.best is not None]
    if line:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "best so far",
                "x": [at for at, _ in line],
                "y": [best for _, best in line],
                "line": {"shape": "hv", "color": OURS, "width": 2},
                "hoverinfo": "skip",
            }
        )
    for standing in dict.fromkeys(each.standing for each in found):
        spots = [(at, each) for at, each in zip(x, found, strict=True) if each.standing is standing]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": standing.value,
                "x": [at for at, _ in spots],
                "y": [0.0 if each.value is None else each.value for _, each in spots],
                "marker": {
                    "size": 10,
                    "color": COLOURS.get(standing, FAILED),
                    "symbol": [_symbol(view, each) for _, each in spots],
                },
                "cliponaxis": False,
                "customdata": [_hover(view, each) for _, each in spots],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    layout = {
        "yaxis": {"title": {"text": view.objective_text}, "rangemode": "tozero"},
        "hovermode": "closest",
        "showlegend": True,
    }
    return {"data": data, "layout": layout}


def _symbol(view: StudyView, each: Progress) -> str:
    point = view.point(each.number)
    if each.value is None or point is None:
        return "x"
    return SYMBOLS[point.harm]


def _hover(view: StudyView, each: Progress) -> str:
    point = view.point(each.number)
    if point is None:
        return f"trial {each.number}"
    value = "no number" if each.value is None else amount(each.value, view.unit)
    return "<br>".join([f"{point.name}: {value}", *wrapped(point.settings), *wrapped(point.why)])


def margins_figure(view: StudyView, found: Sequence[Margin]) -> Figure | None:
    """How much of each limit every measured trial uses up."""
    if not found:
        return None
    numbers = list(dict.fromkeys(each.number for each in found))
    names = {number: name_of(number) for number in numbers}
    data: list[dict[str, Any]] = []
    for limit in dict.fromkeys(each.limit for each in found):
        own = [each for each in found if each.limit == limit]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plain(limit),
                "x": [each.used for each in own],
                "y": [names[each.number] for each in own],
                "marker": {"size": 11},
                "customdata": [duration(each.value_s) for each in own],
                "hovertemplate": "%{y}: %{customdata}, %{x:.0%} of the limit<extra></extra>",
            }
        )
    most = max(each.used for each in found)
    layout = {
        "xaxis": {
            "tickformat": ".0%",
            "title": {"text": "share of the limit that is used"},
            "range": [0, 1.08 * max(most, 1.0)],
        },
        "yaxis": {"type": "category", "autorange": "reversed"},
        "hovermode": "closest",
        "showlegend": True,
        "shapes": [
            {
                "type": "line",
                "x0": 1,
                "x1": 1,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"dash": "dash", "width": 2, "color": FAILED},
            }
        ],
    }
    within = set(numbers) - {each.number for each in found if each.used > 1}
    return Figure(
        "How near trials came to the limits.",
        f"Right of the dashed line a limit is missed. Within all: {_named(names, within)}. "
        f"{of_points(view)}",
        {"data": data, "layout": layout},
        MARGIN_PX + ROW_PX * len(numbers),
    )


def wrapped(text: str, width: int = 60) -> list[str]:
    """A text in lines for a hover label, which breaks none itself; nothing of it is markup."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [plain(line) for line in lines]


def _named(names: Mapping[int, str], numbers: set[int]) -> str:
    return ", ".join(names[number] for number in names if number in numbers) or "none"


def _above(each: Confirmed) -> float:
    return 0.0 if each.mean.high is None else each.mean.high - each.mean.estimate


def _below(each: Confirmed) -> float:
    return 0.0 if each.mean.low is None else each.mean.estimate - each.mean.low
