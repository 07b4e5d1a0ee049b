"""Scores of forecasts, by hand."""

from __future__ import annotations

import pytest

from kvtune.autotune.forecast.score import Score, is_sign_right, scores
from kvtune.types import Forecast, Interval


def told(predicted, measured=None, metric="goodput_requests_per_s", low=None, high=None):
    ratio = Interval(estimate=predicted, low=low or predicted, high=high or predicted, unit="ratio")
    return Forecast(
        lever="x",
        arguments={},
        metric=metric,
        unit="",
        baseline=10.0,
        predicted=10 * predicted,
        ratio=ratio,
        reason="",
        measured=None if measured is None else 4.0 * measured,
        measured_baseline=None if measured is None else 4.0,
    )


def test_errors_signs_and_ranges_are_counted_by_metric():
    found = scores(
        [
            told(1.5, 1.25, low=1.2, high=1.6),  # 25 points off, right way, within
            told(0.9, 1.1),  # 20 points off, wrong way
            told(1.02, 0.99),  # 3 points off, rightly nothing
            told(1.5),  # not measured yet
            told(2.0, 2.0, "capacity_tokens"),
        ]
    )
    assert found == [
        Score("capacity_tokens", 1, 0.0, 1, 1),
        Score("goodput_requests_per_s", 3, pytest.approx(16.0), 2, 1),
    ]


@pytest.mark.parametrize(
    ("predicted", "measured", "right"),
    [
        (1.2, 1.01, True),
        (0.8, 0.99, True),
        (1.0, 1.2, False),
        (1.01, 0.98, True),
        (1.2, 0.9, False),
    ],
)
def test_direction_is_right_on_one_side_of_no_change_or_where_nothing_changes(
    predicted, measured, right
):
    assert is_sign_right(predicted, measured) is right


def test_nothing_measured_has_no_score():
    assert scores([told(1.5)]) == []
