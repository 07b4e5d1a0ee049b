"""Figures as a reader sees them."""

import pytest

from kvtune.autotune.quality import words
from kvtune.types import Interval, QualityFigure, QualityReport


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
        figure(metric="side", decides=False),
        figure(metric="side", category="b", outcome="fail"),
        figure(suite="fidelity", metric="kl", kind="level", unit="nats"),
        figure(suite="fidelity", metric="top1", kind="level"),
        figure(suite="fidelity", metric="log-perplexity", decides=False),
        figure(suite="turns", metric="recall", decides=False),
        figure(suite="turns", metric="first-recall"),
    ]
    assert [(one.metric, one.category) for one in words.telling(figures)] == [
        ("recall", "single"),
        ("recall", ""),
        ("side", "b"),
        ("kl", "single"),
        ("top1", "single"),
        ("recall", "single"),
        ("first-recall", "single"),
    ]


def verdict(*figures, outcome="unclear"):
    return words.verdict(QualityReport(outcome=outcome, figures=figures))


BROKEN = {"suite": "any", "category": "", "metric": "broken-output", "better": "lower"}
SAME = interval(0.0, -0.3, 0.3)


def test_a_screen_that_found_nothing_says_so_and_what_could_prove_it():
    told = verdict(
        figure(change=SAME, items_needed=52),
        figure(category="multi-key", change=SAME, items_needed=60),
        figure(category="hard", because="not informative", decides=False),
        figure(**BROKEN, change=SAME, items_needed=133),
    )
    assert told.startswith("No sign of damage, but not enough evidence: no item broke, and every")
    assert "not proved for needle/single recall, needle/multi-key recall, any/all" in told
    assert told.endswith(
        "60 items of each category (--items 60), and 133 of any/all broken-output."
    )


def test_what_looks_worse_is_never_called_no_sign_of_damage():
    told = verdict(
        figure(change=SAME, items_needed=52),
        figure(category="multi-key", change=interval(-0.2, -0.6, 0.1), broken=1),
        figure(suite="leakage", metric="leak", better="lower", change=interval(0.2, 0.0, 0.5)),
    )
    assert "No sign" not in told
    assert "by chance: needle/multi-key recall, leakage/single leak." in told


@pytest.mark.parametrize(
    ("better", "limit", "candidate", "is_beyond"),
    [
        ("lower", 0.02, 0.03, True),
        ("lower", 0.02, 0.01, False),
        ("higher", 0.85, 0.8, True),
        ("higher", 0.85, 0.9, False),
    ],
)
def test_a_level_looks_worse_by_its_own_value(better, limit, candidate, is_beyond):
    level = figure(kind="level", better=better, limit=limit, candidate=candidate, change=SAME)
    assert ("by chance" in verdict(level)) is is_beyond


def test_a_few_broken_items_within_the_limit_are_counted():
    told = verdict(figure(change=interval(-0.04, -0.1, 0.0), items=50, broken=2, items_needed=90))
    assert "2 of 50 items broke" in told


def test_failures_are_named_and_many_are_counted():
    failed = [figure(category=f"c{n}", outcome="fail") for n in range(7)]
    told = verdict(*failed, figure(metric="side", outcome="fail", decides=False), outcome="fail")
    assert told.endswith("c4 recall and 2 more.")
    assert verdict(outcome="unclear").startswith("Not enough evidence")
    assert verdict(figure(outcome="pass"), outcome="pass").startswith("No category lost")
