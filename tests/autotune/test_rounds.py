"""The plan of a confirmation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.rounds import (
    ALPHA,
    level_at,
    level_left,
    looks,
    next_look,
    rounds_left,
    turned,
    usual,
)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, (1,)), (2, (2,)), (3, (3,)), (4, (3, 4)), (5, (3, 5)), (8, (3, 5, 8)), (9, (3, 5, 8, 9))],
)
def test_rounds_are_looked_at_at_three_five_eight_and_the_last(most, expected):
    assert looks(most) == expected


def test_later_looks_may_be_wrong_more_often_as_they_have_more_rounds():
    assert [level_at(look, 8) for look in (3, 5, 8)] == pytest.approx(
        [0.0046875, 0.0078125, 0.0125]
    )


@given(st.integers(1, 40))
def test_all_looks_together_spend_what_a_confirmation_may_be_wrong_by(most):
    assert sum(level_at(look, most) for look in looks(most)) == pytest.approx(ALPHA)


@given(st.integers(1, 40), st.data())
def test_wherever_rounds_end_exactly_the_rest_is_left(most, data):
    rounds = data.draw(st.integers(1, most))
    spent = sum(level_at(look, most) for look in looks(most) if look < rounds)
    assert spent + level_left(rounds, most) == pytest.approx(ALPHA)
    assert level_left(rounds, most) > 0


@given(st.integers(1, 6))
def test_everybody_has_every_place_once_in_as_many_rounds_as_there_are(size):
    orders = [turned(range(size), number) for number in range(size)]
    for places in zip(*orders, strict=True):
        assert sorted(places) == list(range(size))


def test_nobody_needs_no_order():
    assert turned([], 3) == []


def test_the_next_look_is_the_first_after_the_rounds_that_are_over():
    assert [next_look(number, 8) for number in range(8)] == [3, 3, 3, 5, 5, 8, 8, 8]
    assert next_look(0, 2) == 2


def test_rounds_go_on_to_the_usual_one_or_to_the_next_look():
    assert [rounds_left(number, 8) for number in range(8)] == [5, 4, 3, 2, 1, 3, 2, 1]
    assert [rounds_left(number, 2) for number in range(2)] == [2, 1]


def test_time_is_kept_for_the_rounds_that_are_usual():
    assert [usual(most) for most in (2, 5, 8)] == [2, 5, 5]
