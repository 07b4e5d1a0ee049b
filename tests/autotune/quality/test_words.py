"""Figures as a reader sees them."""

import pytest

from kvtune.autotune.quality import words
from kvtune.types import Interval, QualityFigure


def figure(**changes):
    fields = {
        "suite": "needle",
        "category": "single",
        "metric": "recall",
        "unit": "share",
        "better": "higher",
        "kind": "difference",
        "limit": 0.05,
        "items": 9,
        "candidate": 0.5,
        "baseline": 0.75,
        "change": interval(-0.25, -0.5, 0.0),
        "outcome": "unclear",
        "because": "why",
    }
    return QualityFigure(**{**fields, **changes})


def interval(estimate, low=None, high=None):
    return Interval(estimate=estimate, low=low, high=high, unit="share")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (interval(-0.2531, -0.5, 0.012), "share", "-25 (-50 to 1.2)"),
        (interval(0.333, 0.2, 0.48), "share", "+33 (20 to 48)"),
        (interval(0.0), "share", "0"),
        (interval(-0.0001, -0.0002, 0.0), "share", "0 (0 to 0)"),
        (interval(0.01234, 0.0, 0.02), "nats", "+0.012 (0 to 0.02)"),
        (None, "share", "-"),
    ],
)
def test_shares_change_by_points_and_the_rest_by_its_unit(value, unit, text):
    assert words.change(value, unit) == text


def test_levels_of_shares_are_per_cent():
    assert words.level(0.5833, "share") == "58.3%"
    assert words.level(0.0123, "nats") == "0.0123 nats"


def test_what_fails_or_counts_is_shown_and_the_whole_comes_last():
    figures = [
        figure(category=""),
        figure(),
        figure(metric="side"),
        figure(metric="side", category="b", outcome="fail"),
        figure(suite="fidelity", metric="kl", kind="level", unit="nats"),
        figure(suite="fidelity", metric="top1", kind="level"),
        figure(suite="fidelity", metric="log-perplexity"),
    ]
    assert [(one.metric, one.category) for one in words.telling(figures)] == [
        ("recall", "single"),
        ("recall", ""),
        ("side", "b"),
        ("kl", "single"),
        ("top1", "single"),
    ]
