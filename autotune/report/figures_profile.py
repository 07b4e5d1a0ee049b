"""Figures of a profile: a step taken apart, the roofline, and what levers would do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvtune.autotune.report.figures_workload import MARKED, OURS, PLAIN
from kvtune.autotune.report.page import Figure, plain
from kvtune.autotune.report.view import rate_text, work_text
from kvtune.autotune.words import digits, duration
from kvtune.profilers.roofline import Roofline, Work
from kvtune.profilers.step_parts import StepParts
from kvtune.types import Forecast

ROW_PX = 30
MARGIN_PX = 110


def parts_figure(parts: StepParts) -> Figure:
    """A mean step, a bar a part, in the order in which they are named."""
    names = list(parts.shares)
    lengths = [
        f"{share:.0%}" if parts.step_s is None else f"{duration(share * parts.step_s)}, {share:.0%}"
        for share in parts.shares.values()
    ]
    data = {
        "type": "bar",
        "orientation": "h",
        "x": list(parts.shares.values()),
        "y": names,
        "text": lengths,
        "textposition": "auto",
        "textangle": 0,
        "cliponaxis": False,
        "marker": {"color": [PLAIN if name == "not told apart" else OURS for name in names]},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    words = ", ".join(f"{name} {share:.0%}" for name, share in parts.shares.items())
    how = "by the step-time model of this server" if parts.is_fitted else "as of an ideal device"
    length = "" if parts.step_s is None else f" of {duration(parts.step_s)}"
    layout = {
        "xaxis": {"tickformat": ".0%", "range": [0, 1.15 * max(parts.shares.values())]},
        "yaxis": {"autorange": "reversed"},
        "bargap": 0.3,
    }
    return Figure(
        f"A mean step{length}.",
        f"Divided {how}: {words}.",
        {"data": [data], "layout": layout},
        MARGIN_PX + ROW_PX * len(names),
    )


def roofline_figure(found: Roofline) -> Figure | None:
    """The workload's steps under the device's ceilings; None without both."""
    ridge, roof = found.ridge, found.matrix_flop_per_s
    if ridge is None or roof is None or found.read_bytes_per_s is None or not found.work:
        return None
    spots = [work.intensity for work in found.work]
    low, high = min(*spots, ridge) / 3, max(*spots, ridge) * 3
    data: list[dict[str, Any]] = [
        _ceiling(
            f"memory, {rate_text(found.read_bytes_per_s, 'B/s')}",
            [low, ridge],
            [low * found.read_bytes_per_s, roof],
            OURS,
        ),
        _ceiling(f"arithmetic, {rate_text(roof, 'flop/s')}", [ridge, high], [roof, roof], MARKED),
        *(_spot(found, work) for work in found.work),
    ]
    words = "; ".join(
        f"{work.kind} at {digits(work.intensity)} flop/byte, held by {found.held_by(work)}"
        for work in found.work
    )
    layout = {
        "xaxis": {"type": "log", "dtick": "D2", "title": {"text": "flop for each byte read"}},
        "yaxis": {
            "type": "log",
            "dtick": "D2",
            "title": {"text": "flop/s"},
            "exponentformat": "SI",
        },
        "hovermode": "closest",
        "legend": {"traceorder": "normal"},
        "margin": {"t": 70},
    }
    return Figure(
        "Roofline.",
        f"Both scales are logarithmic; the ceilings meet at {digits(ridge)} flop/byte. {words}. "
        "A hollow mark was not timed and stands on its roof.",
        {"data": data, "layout": layout},
        460,
    )


def _ceiling(name: str, x: list[float], y: list[float], colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": colour, "width": 3},
        "hovertemplate": f"{name}<extra></extra>",
    }


def _spot(found: Roofline, work: Work) -> dict[str, Any]:
    roof = found.roof_flop_per_s(work.intensity)
    flop_per_s, reached = work.flop_per_s, found.reached(work)
    speed = "not timed"
    if flop_per_s is not None and reached is not None:
        speed = f"{rate_text(flop_per_s, 'flop/s')}, {reached:.0%} of its roof"
    symbols = {"decode": "circle", "prefill": "square", "mean step": "diamond"}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": work.kind,
        "x": [work.intensity],
        "y": [flop_per_s or roof],
        "marker": {
            "symbol": symbols[work.kind] + ("" if flop_per_s is not None else "-open"),
            "size": 13,
            "line": {"width": 2},
        },
        "hovertemplate": f"{work.kind}: {work_text(work)}<br>"
        f"{digits(work.intensity)} flop/byte, {speed}<extra></extra>",
    }


def forecasts_figure(told: Sequence[Forecast], what: str) -> Figure | None:
    """The predicted change of one metric by every lever that has one, the largest on top."""
    known = [(one, one.ratio) for one in told if one.ratio is not None]
    if not known:
        return None
    known.sort(key=lambda pair: pair[1].estimate)
    data = []
    for served_by, name, colour in (
        ("engine", "the engine serves it", OURS),
        ("reference", "no engine here serves it", PLAIN),
    ):
        rows = [pair for pair in known if pair[0].served_by == served_by]
        if not rows:
            continue
        ranges = [
            (
                r.estimate if r.low is None else r.low,
                r.estimate,
                r.estimate if r.high is None else r.high,
            )
            for _, r in rows
        ]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "x": [estimate - 1 for _, estimate, _ in ranges],
                "y": [plain(one.lever) for one, _ in rows],
                "marker": {"color": colour},
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [max(0.0, high - estimate) for _, estimate, high in ranges],
                    "arrayminus": [max(0.0, estimate - low) for low, estimate, _ in ranges],
                    "color": "#7d8794",
                    "thickness": 1.5,
                },
                "customdata": [_wrapped(one.reason) for one, _ in rows],
                "hovertemplate": "%{y}: %{x:+.1%}<br>%{customdata}<extra></extra>",
            }
        )
    best, ratio = known[-1]
    layout = {
        "xaxis": {"tickformat": "+.0%", "title": {"text": f"change of {what}"}, "nticks": 7},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [plain(one.lever) for one, _ in known],
        },
        "barmode": "overlay",
        "bargap": 0.35,
        "showlegend": len(data) > 1,
    }
    return Figure(
        f"Forecast change of {what}.",
        f"Each bar with its range. The most is told of {best.lever}: {ratio.estimate - 1:+.0%}.",
        {"data": data, "layout": layout},
        MARGIN_PX + ROW_PX * len(known),
    )


def _wrapped(text: str, width: int = 70) -> str:
    """A text in lines for a hover label, which does not break them itself."""
    lines = math.ceil(len(text) / width)
    words, found = text.split(), [""]
    for word in words:
        if found[-1] and len(found[-1]) + len(word) >= width and len(found) <= lines:
            found.append("")
        found[-1] = f"{found[-1]} {word}".strip()
    return "<br>".join(plain(line) for line in found)
