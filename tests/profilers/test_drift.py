"""Drift: a machine that slows down is told from a cache that fills up, and from noise."""

import math
from itertools import count

import numpy as np
import pytest
from contracts.decoding import Sequence, decode

from kvtune.profilers.drift import _trend, drift_warning, drift_within

STEPS = 400
MODEL = {"fixed_s": 0.02, "per_sequence_s": 0.001, "per_kv_token_s": 1e-6}


def crowd(random):
    """Eight at a time; each one's successor arrives when it is done, all of different lengths."""
    arrivals = []
    for _ in range(8):
        step = 0
        while step < STEPS:
            tokens = int(random.integers(20, 60))
            arrivals.append(Sequence(step, int(random.integers(50, 900)), tokens))
            step += tokens
    return arrivals


def run(seed=0, speed=lambda share: 1.0, noise=0.05, **model):
    """Records of a run whose steps take `speed` times as long, by the share of it that is over."""
    step = count()
    return decode(
        crowd(np.random.default_rng(seed)),
        noise=lambda random: speed(min(1, next(step) / STEPS)) * math.exp(random.normal(0, noise)),
        prefill_s=1e-5,
        **{**MODEL, **model},
    )


@pytest.mark.parametrize("change", [0.25, -0.2])
def test_a_machine_that_changes_all_the_time_is_found_with_its_change(change):
    drift = drift_within(run(speed=lambda share: 1 + change * (share - 0.5)))
    assert drift.matters
    assert drift.change.low < change < drift.change.high
    assert drift.change.high - drift.change.low < 0.15


def test_a_machine_that_others_use_from_half_of_the_run_on_is_doubted():
    found = drift_warning(run(speed=lambda share: 1.3 if share > 0.5 else 1.0))
    assert found.startswith("the machine became ")
    assert "slower during this run" in found


def test_a_machine_that_became_faster_is_doubted_too():
    assert "faster during this run" in drift_warning(run(speed=lambda share: 1.3 - 0.3 * share))


def test_quiet_runs_are_hardly_ever_doubted():
    assert sum(drift_warning(run(seed)) is not None for seed in range(40)) <= 1


def test_a_change_that_is_sure_and_small_is_not_worth_a_word():
    drift = drift_within(run(speed=lambda share: 1 + 0.04 * share, noise=0.005))
    assert drift.t > 3
    assert not drift.matters


def test_a_long_answer_that_goes_on_alone_is_no_drift():
    """Small batches may cost less than a straight line says, as here by half."""
    random, step = np.random.default_rng(0), count()
    long = [*crowd(random), Sequence(0, 100, 2 * STEPS)]
    records = decode(long, noise=lambda _: 1.0 if next(step) < STEPS + 60 else 0.5, **MODEL)
    drift = drift_within(records)
    assert abs(drift.change.estimate) < 0.02


def test_a_cache_that_fills_up_is_no_drift():
    """Batches that only grow: steps take 70% longer at the end, as resident tokens say."""
    grows = [Sequence(20 * i, 300, STEPS - 20 * i) for i in range(12)]
    random = np.random.default_rng(1)
    filled = decode(
        grows, noise=lambda _: math.exp(random.normal(0, 0.02)), **{**MODEL, "per_kv_token_s": 5e-6}
    )
    found = drift_within(filled)
    assert found is None or not found.matters


def test_growth_that_time_alone_explains_as_well_tells_nothing():
    """Sequences that begin together fill the cache by as many tokens in every step."""
    assert drift_within(decode([Sequence(0, 100, STEPS)] * 8, **MODEL)) is None


def test_a_run_of_few_steps_tells_nothing():
    assert drift_within(decode([Sequence(0, 100, 6)] * 8, **MODEL)) is None
    assert drift_within([]) is None
    assert drift_warning([]) is None


def test_steps_beside_waiting_requests_count_where_somebody_always_waits():
    """A long queue: no step is clear of prefills, and still the machine slowed down."""
    records = run(speed=lambda share: 1 + 0.3 * share)
    queued = [
        record.__class__(
            **{
                name: 0.0 if name in ("sent_s", "scheduled_s") else getattr(record, name)
                for name in record.__slots__
            }
        )
        for record in records
    ]
    assert drift_within(queued).matters


def trend(*values):
    """The trend of values at equal distances, with nothing beside time."""
    return _trend(np.linspace(0, 1, len(values)), np.array(values), np.empty((len(values), 0)))


def test_values_on_a_line_drift_by_what_it_rises():
    # From 10 to 13 in three steps, mean 11.5
    assert trend(10.0, 11.0, 12.0, 13.0).change == pytest.approx((3 / 11.5,) * 3)


def test_values_that_scatter_drift_within_their_interval():
    # Least squares by hand: slope 0.4 over the whole span, mean 10.2, residuals -0.2, 0.4, -0.2;
    # squares 0.24 of 1 degree over 0.5 of squared time, t(1) = 12.706.
    drift = trend(9.8, 10.6, 10.2)
    assert drift.change.estimate == pytest.approx(0.4 / 10.2)
    assert drift.change.high == pytest.approx(
        (0.4 + 12.706 * math.sqrt(0.24 / 0.5)) / 10.2, rel=1e-4
    )
    assert not drift.matters


def test_three_values_are_too_few_to_be_sure_by_chance():
    """More than three standard errors are nothing with a single degree of freedom."""
    drift = trend(9.0, 10.2, 11.0)
    assert drift.t > 3
    assert not drift.matters


def test_values_whose_neighbours_err_alike_say_less():
    # Mean 10 and no slope; residuals 0.1 times these signs, whose products with their neighbours
    # sum to 3 of 8: the error of the slope, sqrt(0.08 / 6 / (42 / 49)), grows by sqrt(11 / 5).
    drift = trend(*(10 + sign / 10 for sign in (1, 1, -1, -1, -1, -1, 1, 1)))
    error = math.sqrt(0.08 / 6 / (42 / 49)) * math.sqrt(11 / 5)
    assert drift.change == pytest.approx((0, -2.4469 * error / 10, 2.4469 * error / 10), abs=1e-6)


def test_values_that_never_change_do_not_drift():
    drift = trend(10.0, 10.0, 10.0)
    assert drift.change.estimate == 0
    assert not drift.matters
