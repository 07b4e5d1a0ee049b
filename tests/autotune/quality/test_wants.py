"""How many items a limit needs, and the chance with fewer."""

import random

import pytest

from kvtune.autotune.quality.seen import TYPICAL_CHANGE
from kvtune.autotune.quality.wants import chance_to_pass, difference_want, items_for
from kvtune.profilers.quality.limits import parse_limits
from kvtune.profilers.quality.paired import tango_interval
from kvtune.profilers.quality.suite import Size


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("length-shift <= 0.2", 13, 30), ("needle >= -5pt", 68, 200), ("kl <= 0.02", None, None)],
)
def test_a_limit_says_how_many_items_it_takes(text, least, most):
    (limit,) = parse_limits([text])
    found = items_for(limit, TYPICAL_CHANGE[Size.STANDARD], 0.95)
    assert found is None if least is None else least <= found <= most
    if least is not None:
        assert items_for(limit, 0.05, 0.95) > found


@pytest.mark.parametrize(("items", "change"), [(60, 0.02), (150, 0.0036), (140, 0.07)])
def test_the_chance_to_pass_is_how_often_random_items_pass(items, change):
    rng = random.Random(4)
    margin, runs, passed = 0.06, 3000, 0
    for _ in range(runs):
        changed = sum(rng.random() < change for _ in range(items))
        broken = sum(rng.random() < 0.5 for _ in range(changed))
        passed += tango_interval(broken, changed - broken, items).low >= -margin
    assert chance_to_pass(items, change, margin) == pytest.approx(passed / runs, abs=0.03)


def test_nothing_that_changes_passes_with_enough_items_and_never_with_too_few():
    assert chance_to_pass(60, 1e-12, 0.05) == pytest.approx(1.0)
    assert chance_to_pass(50, 1e-12, 0.05) == pytest.approx(0.0, abs=1e-9)


def test_the_wider_limit_that_is_named_is_the_nearest_that_so_many_items_prove():
    (limit,) = parse_limits(["needle >= -5pt"])
    found = difference_want(limit, 0.07, {"single": 400}, 0.99).too_few(400)
    assert found.needed > 400
    (six,) = parse_limits(["needle >= -6pt"])
    assert found.wider == six
    assert items_for(six, 0.07, 0.99) <= 400
