"""What a screen shows of a candidate."""

import math
import random
from statistics import fmean

import pytest
from contracts.store_values import a_quality_report

from kvtune.autotune.quality.seen import (
    BROKEN_CHANGE,
    LEVEL_PRIOR,
    LIKE_THE_REST,
    PRIOR_ITEMS,
    TYPICAL_CHANGE,
    seen_in,
)
from kvtune.autotune.quality.sizing import POWER, asked_suites
from kvtune.autotune.quality.wants import chance_to_pass, items_for
from kvtune.profilers.quality.limits import parse_limits
from kvtune.profilers.quality.suite import Size
from kvtune.types import Interval, QualityFigure, QualityPoint

TYPICAL = TYPICAL_CHANGE[Size.STANDARD]


def points(suite, changed, items, again=0, category="one"):
    """Right answers of which the first `changed` are wrong, and `again` of the second's."""
    return [
        QualityPoint(
            suite=suite,
            category=category,
            item=str(number),
            candidate=float(number >= changed),
            baseline=1.0,
            again=float(number >= again),
        )
        for number in range(items)
    ]


def seen(*suites, figures=()):
    found = [point for own in suites for point in own]
    return seen_in(asked_suites(), a_quality_report(points=tuple(found), figures=tuple(figures)))


def test_what_a_screen_showed_is_told_as_it_is():
    found = seen(points("needle", 3, 30, again=1), points("tools", 1, 10))
    assert (found.items, found.changed, found.stock) == (40, 4 / 40, 1 / 40)


def test_nothing_that_changed_is_less_than_what_is_typical():
    assert seen(points("needle", 0, 90)).changes["needle"] < TYPICAL


def test_one_unlucky_suite_is_thought_to_change_little_more_than_the_others():
    alone = seen(points("tools", 2, 5)).changes["tools"]
    among = seen(points("tools", 2, 5), points("needle", 0, 80)).changes["tools"]
    assert among < 0.6 * alone < 2 / 5


def test_counts_are_shrunk_towards_the_rest_and_that_towards_the_stock_defaults():
    found = seen(points("needle", 6, 60, again=3), points("tools", 0, 20))
    stock = (3 + PRIOR_ITEMS * TYPICAL) / (80 + PRIOR_ITEMS)
    over_all = (6 + LIKE_THE_REST * stock) / (80 + LIKE_THE_REST)
    expected = (6 + LIKE_THE_REST * over_all) / (60 + LIKE_THE_REST)
    error = math.sqrt(expected / (80 + LIKE_THE_REST))
    assert found.changes["needle"] == pytest.approx(expected + error)


def test_a_suite_that_the_stock_defaults_change_by_themselves_counts_for_no_less():
    calm, noisy = (seen(points("needle", 0, 30, again)).changes["needle"] for again in (0, 15))
    assert noisy > calm + 0.05


def test_items_are_enough_on_average_over_the_luck_of_screens():
    """Screens of 84 items of somebody who changes a twentieth, and ten figures to prove."""
    rng, truth, figures = random.Random(1), 0.05, 10
    (limit,) = parse_limits(["needle >= -10pt"])
    chances = []
    for _ in range(40):
        suites = [("needle", 30), ("tools", 9), ("multi-turn", 16), ("instructions", 29)]
        screen = [points(s, sum(rng.random() < truth for _ in range(n)), n) for s, n in suites]
        change = max(TYPICAL, seen(*screen).changes["needle"])
        items = items_for(limit, change, POWER ** (1 / figures))
        chances.append(chance_to_pass(items, truth, 0.10) ** figures)
    assert fmean(chances) == pytest.approx(POWER, abs=0.1)


def figure(suite, metric, category, mean, kind="level", **changes):
    given = {
        "suite": suite,
        "category": category,
        "metric": metric,
        "unit": "",
        "better": "lower",
        "kind": kind,
        "limit": 0.02,
        "items": 4,
        "candidate": mean,
        "baseline": 0.0,
        "change": Interval(estimate=mean, low=None, high=None, unit="", method=""),
        "outcome": "unclear",
        "because": "",
    }
    return QualityFigure(**given | changes)


def test_a_level_has_the_mean_of_each_category_and_the_spread_within_them():
    values = {"near": (0.010, 0.012), "far": (0.017, 0.021)}
    own = [
        QualityPoint(suite="fidelity", category=name, item=f"{n}", candidate=value, baseline=0.0)
        for name, pair in values.items()
        for n, value in enumerate(pair)
    ]
    figures = [figure("fidelity", "kl", name, fmean(pair)) for name, pair in values.items()]
    found = seen(own, figures=figures).levels["fidelity", "kl"]
    assert {name: level.mean for name, level in found.items()} == pytest.approx(
        {"near": 0.011, "far": 0.019}
    )
    off = 2 * 0.001**2 + 2 * 0.002**2
    expected = (off + LEVEL_PRIOR * 0.002**2) / (2 + LEVEL_PRIOR)
    assert [level.squares for level in found.values()] == pytest.approx([expected] * 2)


def test_a_level_of_which_no_items_are_told_varies_as_is_usual():
    found = seen(figures=[figure("fidelity", "top1", "near", 0.92, better="higher")])
    assert found.levels["fidelity", "top1"]["near"].squares == pytest.approx(0.015**2)


def test_broken_outputs_are_counted_with_much_doubt_of_few():
    broken = figure("any", "broken-output", "", 0.03, "difference", items=100, broken=3, mended=1)
    expected = (4 + PRIOR_ITEMS * BROKEN_CHANGE) / (100 + PRIOR_ITEMS)
    assert seen(figures=[broken]).broken == pytest.approx(expected)
    assert seen().broken == BROKEN_CHANGE
