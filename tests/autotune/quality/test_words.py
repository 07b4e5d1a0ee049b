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


# --- one line -------------------------------------------------------------------------------------

FULL_OF_FIGURES = {"limit": 0.05, "items": 24}


def summary(*figures, outcome, **fields):
    return words.summary(QualityReport(outcome=outcome, figures=figures, size="standard", **fields))


def test_a_pass_names_what_came_nearest_to_its_limit():
    told = summary(
        figure(outcome="pass", change=interval(-0.01, -0.03, 0.01)),
        figure(
            category="multi-key", outcome="pass", change=interval(-0.004, -0.021, 0.012), limit=0.01
        ),
        figure(category="side", outcome="fail", decides=False, change=interval(-0.9)),
        outcome="pass",
    )
    assert told == (
        "quality, standard size: no category is worse than its limit; the worst, "
        "needle/multi-key recall, -0.4pt (-2.1 to +1.2)"
    )


@pytest.mark.parametrize(
    ("nearer", "farther"),
    [
        (
            {"kind": "level", "better": "lower", "limit": 0.02, "baseline": 0.0, "estimate": 0.015},
            {"limit": 0.05, "estimate": -0.035},
        ),
        (
            {
                "kind": "level",
                "better": "higher",
                "limit": 0.97,
                "baseline": 1.0,
                "estimate": -0.02,
            },
            {"limit": 0.05, "estimate": 0.2},
        ),
        (
            {"better": "lower", "limit": 0.02, "estimate": 0.01},
            {"kind": "level", "better": "lower", "limit": 1.0, "baseline": 0.0, "estimate": 0.4},
        ),
    ],
)
def test_figures_of_all_kinds_are_held_against_their_own_limits(nearer, farther):
    def made(category, estimate, **fields):
        return figure(category=category, outcome="pass", change=interval(estimate), **fields)

    told = summary(made("b", **farther), made("a", **nearer), outcome="pass")
    assert "the worst, needle/a recall" in told


@pytest.mark.parametrize(
    ("better", "limit", "baseline", "candidate"),
    [("lower", 0.02, 0.05, 0.06), ("higher", 0.9, 0.8, 0.7)],
)
def test_a_level_that_is_beyond_its_limit_from_the_start_is_the_worst(
    better, limit, baseline, candidate
):
    level = figure(
        suite="fidelity",
        category="c",
        kind="level",
        better=better,
        limit=limit,
        baseline=baseline,
        candidate=candidate,
        change=interval(candidate - baseline),
        outcome="fail",
    )
    told = summary(
        figure(category="a", outcome="fail", change=interval(-0.5)),
        figure(category="b", outcome="fail", change=interval(-0.4)),
        level,
        outcome="fail",
    )
    assert "worse than allowed: fidelity/c recall" in told


def test_a_failure_says_by_how_much_and_what_was_allowed():
    told = summary(
        figure(outcome="fail", change=interval(-0.123, -0.16, -0.08), limit=0.01),
        figure(
            suite="fidelity",
            metric="kl",
            unit="nats",
            kind="level",
            better="lower",
            category="long",
            baseline=0.0,
            outcome="fail",
            change=Interval(estimate=1.3, low=1.1, high=1.5, unit="nats"),
            limit=0.02,
        ),
        outcome="fail",
    )
    assert told == (
        "quality, standard size: worse than allowed: fidelity/long kl, +1.3 nats (+1.1 to +1.5), "
        "limit 0.02 nats, needle/single recall, -12pt (-16 to -8), limit 1pt"
    )


def test_what_is_not_proved_says_how_many_items_could():
    told = summary(
        figure(items_needed=240, **FULL_OF_FIGURES),
        figure(category="multi-key", items_needed=90, **FULL_OF_FIGURES),
        figure(category="third", items_needed=None, **FULL_OF_FIGURES),
        outcome="unclear",
    )
    assert told == (
        "quality, standard size: not enough evidence for needle/single recall, needle/multi-key "
        "recall and 1 more: 240 items needed of needle/single recall, which had 24"
    )
    hopeless = summary(figure(items_needed=None), outcome="unclear")
    assert hopeless.endswith("for needle/single recall: more items would hardly prove it")


def test_a_whole_suite_is_named_only_where_none_of_its_categories_is():
    whole = figure(category="", outcome="fail", change=interval(-0.9))
    part = figure(outcome="fail", change=interval(-0.5))
    assert "needle/all" not in summary(whole, part, outcome="fail")
    assert "needle/all recall, -90pt" in summary(whole, outcome="fail")


def test_what_could_not_be_asked_is_named():
    told = summary(figure(outcome="pass"), outcome="unclear", skipped={"fidelity": "all failed"})
    assert told == "quality, standard size: not all could be judged: fidelity: all failed"
