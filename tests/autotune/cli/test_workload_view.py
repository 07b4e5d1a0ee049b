"""Bars of the terminal, and what a profile shows beside its verdict."""

import pytest
from contracts.pages import profile_view, seen, workload
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.cli.workload_view import LEVELS, print_profile_view, sparkline


@given(st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=1, max_size=60))
def test_a_sparkline_is_as_high_as_its_values_and_shows_all_that_is_not_0(values):
    drawn = sparkline(tuple(values))
    heights = [LEVELS.index(mark) for mark in drawn]
    assert len(drawn) == len(values)
    assert all((height == 0) == (value == 0) for height, value in zip(heights, values, strict=True))
    for (a, x), (b, y) in zip(
        zip(values, heights, strict=True), zip(values[1:], heights[1:], strict=True), strict=False
    ):
        assert (a < b) <= (x <= y)
    if any(values):
        assert max(heights) == len(LEVELS) - 1


@pytest.fixture
def said(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def said(view):
        print_profile_view(view)
        return capsys.readouterr().out

    return said


def test_a_step_is_drawn_in_its_parts(said):
    lines = said(profile_view()).splitlines()
    assert "A mean step of 100 ms:" in lines
    (kv,) = [line for line in lines if line.startswith("  reading KV ")]
    assert kv.split()[2:5] == ["44", "ms", "44%"]


def test_reuse_is_drawn_beside_what_was_served(said):
    lines = said(profile_view()).splitlines()
    (blocks,) = [line for line in lines if line.split()[:1] == ["128"]]
    assert blocks.endswith("the server's")
    (served,) = [line for line in lines if line.split()[:1] == ["served"]]
    assert served.split()[1] == "40.0%"
    assert served.count("█") == 16, "of 40 columns"


def test_the_roofline_is_told_by_each_kind_of_step(said):
    text = said(profile_view())
    assert "read 50 GB/s and 1 Tflop/s: equal at 20 flop/byte" in text
    (decode,) = [line for line in text.splitlines() if line.startswith("decode ")]
    # 1.308 Gflop over 370 MB, read in 74 ms: 10% of 50 GB/s.
    assert decode.split()[-3:] == ["3.53", "memory", "10%"]


def test_an_ideal_division_is_called_one(said):
    assert "as of an ideal device" in said(profile_view(seen(step_time=None)))


def test_what_keeps_the_roofline_from_being_drawn_is_said(said):
    view = profile_view(seen(weight_bytes=None, step_time=None), view=workload(prompts=None))
    assert "roofline without the bytes of weights and KV" in said(view)
