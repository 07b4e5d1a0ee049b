"""How well forecasts were met, as a page."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.autotune.forecast.score import Score, ratios, scores
from kvtune.autotune.report.forecast_words import COLUMNS, OUTSIDE, is_outside, measured_levers
from kvtune.autotune.report.page import (
    Block,
    Column,
    Figure,
    KeyFigure,
    KeyFigures,
    Page,
    Row,
    Section,
    Table,
    plain,
)
from kvtune.autotune.words import digits, percent, percent_change
from kvtune.types import Forecast


def calibration_page(told: Sequence[Forecast]) -> Page:
    """All forecasts that were measured, in a plot and in a table."""
    levers = measured_levers(told)
    measured = sum(len(one.by_metric) for one in levers)
    subtitle = f"{len(told):,} forecasts, {measured:,} of them measured later"
    if not levers:
        text = "A search measures them when it tries the same arguments on the same load."
        return Page("Forecasts", subtitle, (Section("Nothing was measured yet", (text,)),))
    known = scores(told)
    blocks: list[Block] = [
        KeyFigures(tuple(_key_figure(score) for score in known)),
        calibration_figure(told),
        _score_table(known),
    ]
    columns = (
        Column("lever"),
        *(Column(title, is_number=True) for title in COLUMNS.values()),
        Column("study"),
    )
    rows = tuple(
        Row((one.lever, *(one.cell(metric) for metric in COLUMNS), one.study)) for one in levers
    )
    caption = f"Told -> measured, as changes; {OUTSIDE} is outside of the range that was told"
    return Page(
        "Forecasts and what was measured",
        subtitle,
        (
            Section("Calibration", tuple(blocks)),
            Section("Levers", (Table(caption, columns, rows),)),
        ),
    )


def calibration_figure(told: Sequence[Forecast]) -> Figure:
    """What was measured over what was told; a perfect forecast lies on the diagonal."""
    known = [(one, pair) for one in told if (pair := ratios(one)) is not None]
    values = [ratio - 1 for _, pair in known for ratio in pair]
    margin = 0.05 * (max(values) - min(values)) or 0.1
    ends = [min(values) - margin, max(values) + margin]
    data: list[dict[str, object]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "as told",
            "x": ends,
            "y": ends,
            "line": {"dash": "dot", "color": "#7d8794"},
            "hoverinfo": "skip",
        }
    ]
    for metric, name in COLUMNS.items():
        if spots := [(one, *pair) for one, pair in known if one.metric == metric]:
            data.append(_spots(name, spots))
    right = sum(not is_outside(one) for one, _ in known)
    layout = {
        "xaxis": {"tickformat": "+.0%", "title": {"text": "told change"}},
        "yaxis": {"tickformat": "+.0%", "title": {"text": "measured change"}},
        "hovermode": "closest",
    }
    return Figure(
        "Told and measured.",
        f"Each mark is a lever with the range that was told; {right} of {len(known)} lie within.",
        {"data": data, "layout": layout},
        520,
    )


def _spots(name: str, spots: Sequence[tuple[Forecast, float, float]]) -> dict[str, object]:
    lows, highs = [], []
    for one, predicted, _ in spots:
        ratio = one.ratio
        lows.append(0.0 if ratio is None or ratio.low is None else max(0, predicted - ratio.low))
        highs.append(0.0 if ratio is None or ratio.high is None else max(0, ratio.high - predicted))
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [predicted - 1 for _, predicted, _ in spots],
        "y": [measured - 1 for _, _, measured in spots],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": highs,
            "arrayminus": lows,
            "thickness": 1.2,
        },
        "marker": {"size": 9},
        "customdata": [
            [plain(one.lever), plain(one.study or ""), percent_change(one.ratio), percent(measured)]
            for one, _, measured in spots
        ],
        "hovertemplate": "%{customdata[0]}<br>told %{customdata[2]}<br>"
        f"measured %{{customdata[3]}}<br>%{{customdata[1]}}<extra>{name}</extra>",
    }


def _key_figure(score: Score) -> KeyFigure:
    name = COLUMNS.get(score.metric, score.metric)
    note = f"mean error of {score.measured} forecasts"
    return KeyFigure(name, f"{digits(score.error_points)} points", note)


def _score_table(known: Sequence[Score]) -> Table:
    columns = (
        Column("metric"),
        *(
            Column(title, is_number=True)
            for title in ("measured", "mean error", "direction right", "within the range")
        ),
    )
    rows = tuple(
        Row(
            (
                COLUMNS.get(score.metric, score.metric),
                f"{score.measured}",
                f"{digits(score.error_points)} points",
                f"{score.sign_hits}",
                f"{score.range_hits}",
            )
        )
        for score in known
    )
    return Table("How far off forecasts were; points are per cent of the baseline", columns, rows)
