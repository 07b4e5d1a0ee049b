"""The front of several objectives: exact where there is no noise, and patient where there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.explore.front import (
    Figure,
    beaten,
    beats,
    ends,
    is_better_somewhere,
    knee,
    no_better_than,
)

VALUES = st.integers(0, 6).map(float)
NOISES = st.sampled_from([0.0, 0.4, 1.0, 2.5])


@st.composite
def figures(draw):
    value = draw(VALUES)
    return Figure(value, value - draw(NOISES), value + draw(NOISES))


@st.composite
def clouds(draw, one=figures):
    """Points with the same objectives, by number."""
    count = draw(st.integers(1, 3))
    drawn = st.tuples(*[one()] * count)
    points = draw(st.lists(drawn, max_size=9))
    numbers = draw(st.permutations(range(len(points))))
    return dict(zip(numbers, points, strict=True))


def exact(*values):
    return tuple(Figure(value, value, value) for value in values)


def front(points):
    out = beaten(points)
    return {number for number in points if number not in out}


@given(clouds())
def test_nobody_on_the_front_is_beaten_and_everybody_else_is(points):
    members = front(points)
    for number, own in points.items():
        rivals = [beats(theirs, own) for other, theirs in points.items() if other != number]
        assert (number in members) is not any(rivals)


@given(clouds())
def test_who_is_named_beats(points):
    for number, by in beaten(points).items():
        assert beats(points[by], points[number])


@given(clouds())
def test_for_everybody_else_a_member_is_as_good_in_all_and_better_in_one(points):
    """Who beats may be beaten, but then by somebody who is on the front in the end."""
    members = [points[number] for number in front(points)]
    for number in beaten(points):
        own = [figure.value for figure in points[number]]
        assert any(
            all(ours.value >= value for ours, value in zip(member, own, strict=True))
            and any(ours.value > value for ours, value in zip(member, own, strict=True))
            for member in members
        )


@given(clouds())
def test_of_any_points_some_are_on_the_front(points):
    assert bool(front(points)) is bool(points)


@given(clouds(), st.randoms(use_true_random=False))
def test_the_order_of_points_does_not_matter(points, random):
    order = list(points)
    random.shuffle(order)
    turned = {number: points[number] for number in order}
    for ask in (beaten, no_better_than, knee, ends):
        assert ask(turned) == ask(points)


@given(clouds(one=lambda: VALUES.map(lambda value: Figure(value, value, value))))
def test_without_noise_it_is_the_set_of_pareto(points):
    """Checked from the other side: nothing measured has as much of all and more of one."""
    values = {number: [one.value for one in own] for number, own in points.items()}
    expected = {
        number
        for number, own in values.items()
        if not any(
            other != own and all(b >= a for a, b in zip(own, other, strict=True))
            for other in values.values()
        )
    }
    assert front(points) == expected


def test_what_lies_within_noise_is_not_beaten():
    ours, theirs = (Figure(10, 9, 11), *exact(5)), (Figure(9.5, 8.5, 10.5), *exact(5))
    assert front({0: ours, 1: theirs}) == {0, 1}
    assert no_better_than({0: ours, 1: theirs}) == {0: (1,), 1: (0,)}


def test_noise_in_one_objective_hides_nothing_in_another():
    ours, theirs = (Figure(10, 9, 11), *exact(5)), (Figure(9.5, 8.5, 10.5), *exact(4))
    assert beaten({0: ours, 1: theirs}) == {1: 0}


def test_a_point_that_only_noise_keeps_on_the_front_is_told():
    fast, exact_one = (Figure(9.1, 8.6, 9.6), *exact(-0.004)), (Figure(9.0, 8.5, 9.5), *exact(0))
    points = {4: fast, 7: exact_one}
    assert front(points) == {4, 7}
    assert no_better_than(points) == {4: (7,), 7: ()}


def test_the_ends_have_the_most_of_each_objective_and_of_equals_the_most_of_the_rest():
    points = {0: exact(1, 9), 1: exact(5, 5), 2: exact(9, 1), 3: exact(9, 2)}
    assert ends(points) == (3, 0)


def test_the_knee_gives_up_the_least_of_any_objective():
    points = {0: exact(0, 10), 1: exact(10, 0), 2: exact(8, 7), 3: exact(9, 3)}
    assert knee(points) == 2


@pytest.mark.parametrize("points", [{}, {0: exact(1, 1)}, {0: exact(0, 1), 1: exact(1, 0)}])
def test_there_is_no_knee_without_something_between_the_ends(points):
    assert knee(points) is None


def test_less_of_a_negated_figure_is_better():
    little, much = Figure(2, 1, 3).negated(), Figure(9, 8, 10).negated()
    assert is_better_somewhere((little,), (much,))
    assert little == Figure(-2, -3, -1)
