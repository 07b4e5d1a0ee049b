"""What a number format makes of the time to read a cached token."""

from __future__ import annotations

import pytest
from contracts.forecast_baseline import CPU, context
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.forecast.experience import MeasuredRead
from kvtune.autotune.forecast.read_times import read_times, times_by_bytes

UNCHANGED = (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [("auto", "bfloat16"), ("fp8", "fp8_e5m2"), ("nvfp4", "nvfp4"), ("auto", "auto")],
)
def test_formats_of_one_size_are_read_alike(before, after):
    assert read_times(before, after, context(), {}) == (UNCHANGED, "")


@given(
    st.lists(st.floats(0.05, 8), min_size=3, max_size=3).map(sorted),
    st.lists(st.floats(0.05, 8), min_size=3, max_size=3).map(sorted),
)
def test_way_back_takes_the_inverse_with_its_ends_swapped(fp8, int4):
    reads = {
        "fp8": MeasuredRead(tuple(fp8), 1),
        "int4_per_token_head": MeasuredRead(tuple(int4), 2),
    }
    for before, after in (("auto", "fp8"), ("fp8", "int4_per_token_head")):
        there, source = read_times(before, after, context(), reads)
        back, _ = read_times(after, before, context(), reads)
        assert there == pytest.approx(tuple(1 / part for part in reversed(back)))
        assert list(there) == sorted(there)
        assert source.startswith("as ")


def test_read_that_was_measured_to_cost_nothing_has_a_way_back():
    reads = {"fp8": MeasuredRead((0.0, 0.1, 0.3), 2)}
    low, middle, high = read_times("fp8", "auto", context(), reads)[0]
    assert low <= middle <= high < float("inf")


@pytest.mark.parametrize("dtype", ["fp8", "int8_per_token_head", "vllm-int8-per-token-head"])
def test_8_bits_are_guessed_to_save_less_than_their_bytes(dtype):
    times, source = read_times("auto", dtype, context(), {})
    assert times == (0.5, 0.8, 1.25)
    assert source == "a guess, no trial here measured it"


def test_turboquant_is_guessed_to_be_slow_until_it_was_measured():
    times, _ = read_times("auto", "turboquant_4bit_nc", context(), {})
    assert times[1] > 1
    assert times[2] == 7
    reads = {"turboquant_4bit_nc": MeasuredRead((0.3, 0.4, 0.5), 3)}
    assert read_times("auto", "turboquant_4bit_nc", context(), reads)[0] == (0.3, 0.4, 0.5)


def test_what_is_read_on_a_cpu_is_guessed_as_before():
    assert read_times("auto", "fp8", context(CPU, block_tokens=32), {})[0] == (0.8, 1.0, 1.25)


def test_half_of_what_fewer_bytes_save_may_be_lost():
    assert times_by_bytes(0.5) == (0.5, 0.5, 0.75)
    assert times_by_bytes(1.2) == (pytest.approx(1.1), 1.2, 1.2)
