"""How well forecasts were met: errors, signs, and how often the range held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvtune.types import Forecast

NO_CHANGE = 0.03
"""A ratio this near to 1 is no change."""


@dataclass(frozen=True, slots=True)
class Score:
    """The forecasts of one metric that were measured.

    `error_points` is the mean absolute difference of predicted and measured change, in points of
    per cent of the baseline. `sign_hits` of them said the right direction, or rightly none, and
    `range_hits` have the measured ratio within their range.
    """

    metric: str
    measured: int
    error_points: float
    sign_hits: int
    range_hits: int


def scores(told: Iterable[Forecast]) -> list[Score]:
    """One score for each metric of which something was measured, by name."""
    by_metric: dict[str, list[tuple[Forecast, float, float]]] = {}
    for forecast in told:
        pair = ratios(forecast)
        if pair is not None:
            by_metric.setdefault(forecast.metric, []).append((forecast, *pair))
    return [_score(metric, by_metric[metric]) for metric in sorted(by_metric)]


def ratios(forecast: Forecast) -> tuple[float, float] | None:
    """The predicted and the measured ratio; None until there are both."""
    if forecast.ratio is None or forecast.measured_ratio is None:
        return None
    return forecast.ratio.estimate, forecast.measured_ratio


def is_sign_right(predicted: float, measured: float) -> bool:
    """Whether two ratios are on one side of 1, or both so near to it that nothing changes."""
    near = max(abs(predicted - 1), abs(measured - 1)) < NO_CHANGE
    return near or (predicted - 1) * (measured - 1) > 0


def _score(metric: str, found: Sequence[tuple[Forecast, float, float]]) -> Score:
    return Score(
        metric=metric,
        measured=len(found),
        error_points=100 * fmean(abs(predicted - measured) for _, predicted, measured in found),
        sign_hits=sum(is_sign_right(predicted, measured) for _, predicted, measured in found),
        range_hits=sum(_is_within(forecast, measured) for forecast, _, measured in found),
    )


def _is_within(forecast: Forecast, measured: float) -> bool:
    ratio = forecast.ratio
    if ratio is None or ratio.low is None or ratio.high is None:
        return False
    return ratio.low <= measured <= ratio.high
