from itertools import pairwise

import numpy as np
import pytest

from kvtune.autotune.explore.crashes import chance_to_run, normal_cdf
from kvtune.autotune.explore.likeness import field_over
from kvtune.types import FailureClass

LINE = field_over(np.linspace(0, 1, 5)[:, None], [True])
AT_START, UNDER_LOAD = FailureClass.CRASH_AT_START, FailureClass.CRASH_UNDER_LOAD


def chances(*seen):
    return chances_of(*((row, failure, 1.0) for row, failure in seen))


def chances_of(*seen):
    rows, failures, tasks = zip(*seen, strict=True) if seen else ((), (), ())
    return chance_to_run(LINE, np.array(rows, dtype=np.intp), failures, np.array(tasks))


def test_nothing_is_avoided_before_something_failed():
    assert list(chances()) == [1.0] * 5
    assert list(chances((0, None), (4, None))) == [1.0] * 5


@pytest.mark.parametrize("failure", [AT_START, UNDER_LOAD, FailureClass.OUT_OF_MEMORY])
def test_a_failure_is_expected_again_at_its_point_and_less_further_off(failure):
    found = chances((0, failure))
    assert found[0] < 0.2
    assert all(here < there for here, there in pairwise(found))


def test_what_ran_speaks_for_its_neighbours():
    alone, beside = chances((0, AT_START)), chances((0, AT_START), (2, None))
    assert beside[2] > 0.9
    assert beside[3] > alone[3]


def test_who_crashes_under_load_has_started():
    # Two failures of two kinds: neither makes the other's kind likelier at its own point.
    both = chances((0, UNDER_LOAD), (4, AT_START))
    only = chances((0, UNDER_LOAD), (4, UNDER_LOAD))
    assert both[2] > only[2]


def test_what_failed_for_another_workload_is_less_of_a_warning():
    own, alike, far = (chances_of((0, AT_START, task))[0] for task in (1.0, 0.9, 0.6))
    assert own < alike < far < 1


def test_a_taken_port_says_nothing_about_the_point():
    assert list(chances((2, FailureClass.PORT_TAKEN))) == [1.0] * 5


def test_the_curve_is_near_the_normal_distribution():
    values = np.array([-40.0, -1.645, 0.0, 1.0, 40.0])
    assert normal_cdf(values) == pytest.approx([0.0, 0.05, 0.5, 0.8413, 1.0], abs=0.01)
