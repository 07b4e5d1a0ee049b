"""Noise is found again from runs whose noise is known."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.forecast.noise import BETWEEN_SERVERS, noise_of
from kvtune.types import Goal, LoadRun, RequestRecord

RATE = "requests_per_s"


def record(index: int, end_s: float, first_s: float = 0.5) -> RequestRecord:
    return RequestRecord(
        index=index,
        scheduled_s=end_s - 2.0,
        sent_s=end_s - 2.0,
        first_token_s=end_s - 2.0 + first_s,
        end_s=end_s,
        gaps_s=(2.0 - first_s,),
        input_tokens=10,
        output_tokens=2,
        requested_output_tokens=2,
        cached_tokens=0,
        finish_reason="length",
    )


def run(gaps_s) -> LoadRun:
    """Requests that end one after the other, so many seconds apart."""
    ends_s, now_s = [], 2.0
    for gap_s in gaps_s:
        now_s += gap_s
        ends_s.append(now_s)
    records = tuple(record(index, end_s) for index, end_s in enumerate(ends_s))
    return LoadRun(records, now_s, 0.0, {}, {})


def found(measured, simulated, repeats=None):
    """The noise of the rate beside that of any two servers."""
    noise = noise_of((RATE,), measured, simulated, Goal(), repeats or {})[RATE]
    return math.sqrt(noise**2 - BETWEEN_SERVERS**2)


def test_warm_up_that_the_simulation_has_too_is_no_noise():
    slow_start = run([1.0] * 8 + [0.1] * 24)
    assert found(slow_start, slow_start) == pytest.approx(0.0, abs=1e-6)
    assert found(slow_start, run([0.325] * 32)) > 0.2


def test_requests_that_end_together_tell_no_noise():
    clumps = run(([5.0] + [0.001] * 7) * 2)
    assert found(clumps, run([0.626] * 16)) == pytest.approx(0.0, abs=1e-6)


def test_noise_of_a_mean_falls_with_the_root_of_the_stretches():
    # Rates of 10, 8, 10 and 8 requests a second beside 9 all the time: 1 apart, of 9, in 4.
    gaps_s = ([0.1] * 4 + [0.125] * 4) * 2
    measured, simulated = run(gaps_s), run([1 / 9] * 16)
    rates = [10, 8, 10, 8]
    # The first stretch began 2 s before its first request was sent.
    rates[0] = 4 / (2.0 + 0.4)
    told = [4 / (2.0 + 4 / 9), 9, 9, 9]
    apart = [real - ours for real, ours in zip(rates, told, strict=True)]
    middle = sum(apart) / 4
    deviation = math.sqrt(sum((one - middle) ** 2 for one in apart) / 3)
    assert found(measured, simulated) == pytest.approx(deviation / (sum(rates) / 4) / 2)


def test_repeats_that_differ_more_than_stretches_count():
    even = run([0.1] * 16)
    # Mean 1, standard deviation 0.2 of four values.
    values = (0.8, 1.2, 0.8, 1.2)
    deviation = math.sqrt(4 * 0.04 / 3)
    assert found(even, even, {RATE: values}) == pytest.approx(deviation / 2)


def test_one_short_run_says_only_what_servers_differ_by():
    short = run([0.1] * 15)
    assert found(short, short, {RATE: (1.0,)}) == pytest.approx(0.0, abs=1e-6)


def test_failed_requests_belong_to_no_stretch():
    even = run([0.1] * 16)
    failed = replace(even.records[0], error="cut", first_token_s=None)
    assert found(replace(even, records=(failed, *even.records[1:])), even) == pytest.approx(
        0.0, abs=1e-6
    )


@given(seed=st.integers(0, 500), scale=st.floats(0.1, 50))
def test_a_machine_that_is_slower_all_the_time_is_as_noisy(seed, scale):
    numbers = random.Random(seed)
    gaps_s = [numbers.uniform(0.05, 0.4) for _ in range(24)]
    told_s = [numbers.uniform(0.05, 0.4) for _ in range(24)]

    def scaled(gaps):
        made = run(gaps)
        records = tuple(
            replace(one, end_s=one.end_s * scale, sent_s=one.sent_s * scale) for one in made.records
        )
        return replace(made, records=records)

    plain = found(run(gaps_s), run(told_s))
    assert found(scaled(gaps_s), scaled(told_s)) == pytest.approx(plain)
