"""Arrivals in bins that double, against counting all of them at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.profilers.arrivals import FINEST_S, MOST_BINS, ArrivalCounter, arrivals

TIMES = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=80).map(sorted)


@given(TIMES)
def test_bins_that_doubled_on_the_way_hold_what_wide_ones_would(times_s):
    found = arrivals(times_s)
    span_s = times_s[-1] - times_s[0]
    if span_s < FINEST_S:
        assert found is None
        return
    expected = [0] * len(found.counts)
    for time_s in times_s:
        expected[int((time_s - times_s[0]) / found.bin_s)] += 1
    assert list(found.counts) == expected
    assert 2 <= len(found.counts) <= MOST_BINS
    assert found.bin_s == FINEST_S or len(found.counts) > MOST_BINS // 2, "no wider than needed"


def test_rates_and_times_of_bins_are_those_of_the_clock():
    found = arrivals([10.0, 10.1, 10.2, 10.9])
    assert found.bin_s == FINEST_S
    assert sum(found.rates_per_s) * FINEST_S == pytest.approx(4)
    assert found.starts_s[-1] == pytest.approx(0.9, abs=FINEST_S)


def test_order_is_no_matter_when_all_times_are_known():
    assert arrivals([3.0, 1.0, 2.0]) == arrivals([1.0, 2.0, 3.0])


@pytest.mark.parametrize("times_s", [[], [1.0], [0.0, None], [None], [2.0, 2.0]])
def test_without_times_that_differ_there_is_nothing_to_show(times_s):
    assert arrivals(times_s) is None


def test_a_request_before_the_first_is_refused():
    counter = ArrivalCounter()
    counter.add(5.0)
    with pytest.raises(BadInput, match="4 s before"):
        counter.add(1.0)
