import numpy as np
import pytest

from kvtune.autotune.explore.durations import seconds_of_trials

RATES = {0: 1.0, 1: 2.0, 3: 4.0, 4: 5.0}


def test_before_much_is_known_all_points_take_as_long():
    assert seconds_of_trials([], {}, np.ones(2)) == pytest.approx([1.0, 1.0])
    assert seconds_of_trials([20.0, 40.0], {0: 1.0, 1: 2.0}, np.ones(2)) == pytest.approx([30, 30])


def test_a_slower_point_takes_longer_by_its_load_alone():
    # 10 s for the server, and 40 requests; the third trial failed early.
    walls_s = [10 + 40 / 1, 10 + 40 / 2, 3.0, 10 + 40 / 4, 10 + 40 / 5]
    found = seconds_of_trials(walls_s, RATES, np.array([0.5, 8.0]))
    assert found == pytest.approx([10 + 40 / 0.5, 10 + 40 / 8])


def test_no_point_is_thought_to_take_next_to_nothing():
    walls_s = [50.0, 25.0, 0.0, 12.5, 10.0]
    assert seconds_of_trials(walls_s, RATES, np.array([1e6])) == pytest.approx([0.2 * 19.5])


def test_where_slower_points_were_faster_the_rate_says_nothing():
    found = seconds_of_trials([5.0, 6.0, 7.0, 7.0, 8.0], RATES, np.array([1.0, 8.0]))
    assert found[0] == pytest.approx(found[1])
