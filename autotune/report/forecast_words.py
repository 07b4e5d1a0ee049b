"""Forecasts beside what came of them, lever by lever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtune.autotune.forecast.calibrate import FIRST_TOKEN, GOODPUT, STEP
from kvtune.autotune.forecast.predict import CAPACITY
from kvtune.autotune.forecast.score import ratios
from kvtune.autotune.words import percent
from kvtune.types import Forecast

COLUMNS: Mapping[str, str] = {
    CAPACITY: "KV tokens",
    STEP: "step",
    FIRST_TOKEN: "first token",
    GOODPUT: "goodput",
}
OUTSIDE = "*"
"""Follows what was measured outside of the range that was told."""


@dataclass(frozen=True, slots=True)
class MeasuredLever:
    """A lever that a study measured, with its forecasts by metric."""

    study: str
    lever: str
    by_metric: Mapping[str, Forecast]

    def cell(self, metric: str) -> str:
        """What was told of a metric and what was measured, as changes."""
        found = self.by_metric.get(metric)
        pair = None if found is None else ratios(found)
        if found is None or pair is None:
            return "-"
        mark = OUTSIDE if is_outside(found) else ""
        return f"{percent(pair[0])} -> {percent(pair[1])}{mark}"


def measured_levers(told: Iterable[Forecast]) -> list[MeasuredLever]:
    """The levers of which something was measured, by study and in the order they were told."""
    found: dict[tuple[str, str], list[dict[str, Forecast]]] = {}
    for forecast in told:
        if ratios(forecast) is not None:
            rows = found.setdefault((forecast.study or "", forecast.lever), [])
            # What was told again is another row.
            row = next((row for row in rows if forecast.metric not in row), None)
            if row is None:
                rows.append(row := {})
            row[forecast.metric] = forecast
    levers = [
        MeasuredLever(study, lever, row) for (study, lever), rows in found.items() for row in rows
    ]
    return sorted(levers, key=lambda one: one.study)


def is_outside(forecast: Forecast) -> bool:
    """Whether what was measured is outside of the range that was told, if there was one."""
    ratio, measured = forecast.ratio, forecast.measured_ratio
    if ratio is None or ratio.low is None or ratio.high is None or measured is None:
        return False
    return not ratio.low <= measured <= ratio.high
