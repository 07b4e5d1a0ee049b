"""Figures of a study's space: what each setting is worth, all trials at once, and trade-offs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvtune.autotune.report.figures_workload import OURS, PLAIN
from kvtune.autotune.report.page import Figure, plain
from kvtune.autotune.report.study_figures import COLOURS, SYMBOLS, harm_note, of_points, wrapped
from kvtune.autotune.report.study_findings import MIB, Knob, Share, Spot
from kvtune.autotune.report.study_view import StudyView, name_of
from kvtune.autotune.words import amount, digits

ROW_PX = 34
MARGIN_PX = 110
JITTER = 0.06
"""How far trials of the same value are drawn apart, of the height of an axis."""

LABEL_CHARACTERS = 28
"""Longer names of settings would run into each other below the axes of a narrow page."""


def importance_figure(view: StudyView, found: Sequence[Share]) -> Figure | None:
    """The share of the objective's variance that each setting explains by itself."""
    if not found:
        return None
    data = {
        "type": "bar",
        "orientation": "h",
        "x": [each.share for each in found],
        "y": [plain(each.name) for each in found],
        "text": [f"{each.share:.0%}" for each in found],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": OURS},
        "customdata": [each.levels for each in found],
        "hovertemplate": "%{y}: %{x:.0%}, %{customdata} values<extra></extra>",
    }
    words = ", ".join(f"{each.name} {each.share:.0%}" for each in found)
    layout = {
        "xaxis": {
            "tickformat": ".0%",
            "range": [0, 1.15],
            "tickvals": [0, 0.25, 0.5, 0.75, 1],
            "title": {"text": f"share of the variance of {view.study.goal.objective}"},
        },
        "yaxis": {"type": "category", "autorange": "reversed"},
        "bargap": 0.35,
    }
    return Figure(
        "What each setting explains by itself.",
        f"{words}. Main effects by a simple decomposition of variance over the measured trials, "
        "one setting at a time, corrected for the number of its values. What settings do only "
        "together is not in it, and those that were changed together share what they did, so the "
        f"shares need not add up to 100%. {of_points(view)}",
        {"data": [data], "layout": layout},
        MARGIN_PX + ROW_PX * len(found),
    )


def parallel_figure(view: StudyView, found: Sequence[Knob]) -> Figure | None:
    """Each measured trial as a line over its settings and its objective.

    Drawn as lines and not by Plotly's own parallel coordinates, which need WebGL.
    """
    measured = [point for point in view.measured if point.value is not None]
    if not found or len(measured) < 2:
        return None
    most = max(point.value or 0.0 for point in measured)
    places = list(range(len(found) + 1))
    recommended = None if view.decision is None else view.decision.recommended
    data: list[dict[str, Any]] = []
    for index, point in enumerate(sorted(measured, key=lambda point: point.value or 0.0)):
        shift = JITTER * (index / (len(measured) - 1) - 0.5)
        heights = [_height(knob, point.number) + shift for knob in found]
        is_chosen = point.number == recommended
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": point.name,
                "x": places,
                "y": [*heights, (point.value or 0.0) / most if most else 0.0],
                "line": {
                    "color": OURS if is_chosen else COLOURS.get(point.standing, PLAIN),
                    "width": 4 if is_chosen else 1.5,
                },
                "opacity": 1 if is_chosen else 0.65,
                "marker": {"size": 6},
                "text": "<br>".join(
                    [
                        f"{point.name}: {amount(point.value, view.unit)}",
                        *wrapped(point.settings),
                    ]
                ),
                "hoverinfo": "text",
            }
        )
    marks = [
        _mark(place, (level + 0.5) / len(knob.levels), text)
        for place, knob in enumerate(found)
        for level, text in enumerate(knob.levels)
    ]
    marks += [_mark(places[-1], share, digits(share * most)) for share in (0, 0.5, 1) if most]
    layout = {
        "xaxis": {
            "tickvals": places,
            "ticktext": [*(plain(_short(knob.name)) for knob in found), view.study.goal.objective],
            "range": [-0.2, len(found) + 0.45],
            "zeroline": False,
            "tickangle": -40,
        },
        "yaxis": {"visible": False, "range": [-0.05, 1.08]},
        "annotations": marks,
        "hovermode": "closest",
        "showlegend": False,
        "margin": {"l": 70, "r": 20, "t": 20, "b": 60},
    }
    best = max(measured, key=lambda point: point.value or 0.0)
    return Figure(
        "All trials at once.",
        "A line is a trial, from its settings to its objective at the right "
        f"({view.objective_text}); the thick one is recommended. The highest is {best.name} with "
        f"{amount(best.value, view.unit)}: {best.settings}. {of_points(view)}",
        {"data": data, "layout": layout},
        440,
    )


def _height(knob: Knob, number: int) -> float:
    """Where on its axis, from 0 to 1, a trial's value of a setting is."""
    return (knob.levels.index(knob.values[number]) + 0.5) / len(knob.levels)


def _mark(place: int, height: float, text: str) -> dict[str, Any]:
    return {
        "x": place,
        "y": height,
        "text": plain(text),
        "showarrow": False,
        "xanchor": "left",
        "xshift": 5,
        "font": {"size": 11},
    }


def memory_figure(view: StudyView, found: Sequence[Spot]) -> Figure | None:
    """The objective against the memory of the KV pool."""
    return _front_figure(
        view,
        found,
        "Goodput against memory." if view.study.goal.objective == "goodput" else "Against memory.",
        "KV memory, MiB",
        lambda cost: cost / MIB,
        lambda cost: f"{cost:,.0f} MiB",
        "",
    )


def quality_figure(view: StudyView, found: Sequence[Spot]) -> Figure | None:
    """The objective against the divergence of answers."""
    return _front_figure(
        view,
        found,
        "Goodput against quality." if view.study.goal.objective == "goodput" else "And quality.",
        "mean KL divergence from stock answers, nats",
        lambda cost: cost,
        lambda cost: f"{digits(cost)} nats",
        "Lossless settings stand at 0 by definition. ",
    )


def _front_figure(
    view: StudyView,
    found: Sequence[Spot],
    caption: str,
    axis: str,
    scale: Callable[[float], float],
    text: Callable[[float], str],
    note: str,
) -> Figure | None:
    if not found:
        return None
    front = sorted((spot for spot in found if spot.on_front), key=lambda spot: spot.cost)
    most = max(scale(spot.cost) for spot in found) or 1.0
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "front",
            "x": [scale(spot.cost) for spot in front],
            "y": [spot.value for spot in front],
            "line": {"shape": "hv", "dash": "dot", "color": OURS, "width": 2},
            "hoverinfo": "skip",
        }
    ]
    for standing, colour in COLOURS.items():
        spots = [
            (spot, point)
            for spot in found
            if (point := view.point(spot.number)) is not None and point.standing is standing
        ]
        if not spots:
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": standing.value,
                "x": [scale(spot.cost) for spot, _ in spots],
                "y": [spot.value for spot, _ in spots],
                "marker": {
                    "size": 11,
                    "color": colour,
                    "symbol": [SYMBOLS[point.harm] for _, point in spots],
                },
                "cliponaxis": False,
                "customdata": [
                    "<br>".join([point.name, *wrapped(point.settings)]) for _, point in spots
                ],
                "hovertemplate": "%{customdata}<br>%{y:.4g} at %{x:.4g}<extra></extra>",
            }
        )
    layout = {
        # From a little below 0: marks at 0 would hide what stands at the axis.
        "xaxis": {"title": {"text": axis}, "range": [-0.03 * most, 1.08 * most]},
        "yaxis": {"title": {"text": view.objective_text}, "rangemode": "tozero"},
        "hovermode": "closest",
        "showlegend": True,
    }
    words = "; ".join(
        f"{name_of(spot.number)} has {digits(spot.value)} at {text(scale(spot.cost))}"
        for spot in front
    )
    return Figure(
        caption,
        f"On the front, which nothing beats in both: {words}. {note}{harm_note(view)}"
        f"{of_points(view)}",
        {"data": data, "layout": layout},
        400,
    )


def _short(name: str) -> str:
    return name if len(name) <= LABEL_CHARACTERS else f"{name[: LABEL_CHARACTERS - 1]}…"
