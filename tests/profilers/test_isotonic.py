"""The nearest rising curve, and where it passes zero."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.isotonic import crossing, rising

SOME = st.lists(st.floats(-100, 100), min_size=1, max_size=8)


def test_values_that_fall_are_pooled_with_their_neighbours():
    assert rising([1.0, 3.0, 2.0, 4.0]) == (1.0, 2.5, 2.5, 4.0)
    assert rising([3.0, 2.0, 1.0]) == (2.0, 2.0, 2.0)
    assert rising([]) == ()


def test_a_value_that_was_measured_more_often_counts_more():
    assert rising([3.0, 0.0], [1.0, 2.0]) == (1.0, 1.0)


def test_a_load_that_was_not_carried_at_all_is_above_every_other():
    assert rising([-0.5, math.inf]) == (-0.5, math.inf)
    assert rising([-0.5, math.inf, 0.1]) == (-0.5, math.inf, math.inf)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0]])
def test_every_value_has_a_weight(weights):
    with pytest.raises(ValueError, match="weight"):
        rising([1.0, 2.0], weights)


@given(SOME)
def test_the_curve_never_falls_and_keeps_the_mean(values):
    found = rising(values)
    assert all(before <= after + 1e-9 for before, after in pairwise(found))
    assert sum(found) == pytest.approx(sum(values), abs=1e-6)


@given(SOME, st.data())
def test_no_other_rising_curve_is_nearer(values, data):
    found = rising(values)
    other = sorted(data.draw(st.lists(st.floats(-100, 100), min_size=len(values), max_size=8)))

    def far(curve):
        return sum((one - two) ** 2 for one, two in zip(curve, values, strict=False))

    assert far(found) <= far(other[: len(values)]) + 1e-6


@given(SOME)
def test_a_curve_that_rises_already_stays(values):
    assert rising(sorted(values)) == tuple(sorted(values))


def test_a_curve_passes_zero_between_two_places():
    assert crossing([1.0, 2.0, 4.0], [-1.0, -0.5, 1.5]) == 2.5
    assert crossing([1.0, 2.0], [0.0, 1.0]) == 1.0, "what is met exactly is met"


@pytest.mark.parametrize("values", [[-2.0, -1.0], [1.0, 2.0], [-1.0, math.inf]])
def test_nothing_is_guessed_beyond_what_was_measured(values):
    assert crossing([1.0, 2.0], values) is None
