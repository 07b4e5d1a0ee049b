"""What a recording is taken to say, where the truth is known."""

import math
from random import Random

import numpy as np
import pytest
from contracts.surfaces_made import header, line_of, records, small_spec
from hypothesis import given
from hypothesis import strategies as st
from surface_file import Recording, pack_requests, run_of
from surface_order import next_one
from surface_truth import drift_of, resampled, scaled, shrunk, truth_of, value_of

from kvtune.profilers.goal import parse_goal
from kvtune.profilers.metrics.base import measure
from kvtune.types import FailureClass

GOAL = parse_goal("max goodput")
RATE = "requests_per_s"


def speed(point):
    """Of a point, with two levers that act together."""
    block, width, dtype = point
    fits = 1.6 if block == 32 and width >= 12 else 1.0
    return fits * (1 + math.log2(min(width, 16))) * (0.9 if dtype == "fp8" else 1.0)


def recorded(*, noise=0.0, slowness=lambda at_s: 1.0, fails=(), seed=0):
    """A whole recording of a surface whose points are as fast as `speed` says."""
    spec, random, lines = small_spec(), Random(seed), []
    while (chosen := next_one(spec, lines, 0)) is not None:
        kind, point = chosen
        at_s = 60.0 * len(lines)
        factor = math.exp(random.gauss(0, noise)) / slowness(at_s)
        failure = "does-not-fit" if point in fails else None
        fast = speed(point) * factor
        lines.append(line_of(len(lines), kind, point, at_s=at_s, speed=fast, failure=failure))
    return Recording(header=header(spec), lines=tuple(lines))


def truth_rate(point):
    """Requests a second that an undisturbed measurement of a point gives."""
    made = records(speed(point))
    return len(made) / max(one.end_s for one in made)


def errors(truth):
    return np.array(
        [
            found.log_rate - math.log(truth_rate(point))
            for point, found in truth.points.items()
            if not found.failure
        ]
    )


@pytest.mark.parametrize("factor", [0.5, 1.3])
def test_a_slower_machine_makes_every_time_longer(factor):
    plain = run_of(line_of(0, "point", (128, 128, "auto")))
    before, after = measure(plain, GOAL), measure(scaled(plain, factor), GOAL)
    for name in ("ttft_p95_s", "itl_mean_s", "tpot_p50_s", "e2e_max_s"):
        assert after[name] == pytest.approx(before[name] * factor)
    assert after[RATE] == pytest.approx(before[RATE] / factor)


def test_drift_is_found_and_taken_out():
    def slowness(at_s):
        return 1 + 0.3 * math.sin(at_s / 2000)

    found = truth_of(recorded(noise=0.01, slowness=slowness), shrink=False)
    off = errors(found)
    # The mean speed of the machine is not known; differences between points are.
    assert np.std(off) < 0.03
    plain = truth_of(recorded(noise=0.01), shrink=False)
    assert np.std(errors(plain)) < 0.02


def test_drift_is_not_carried_from_one_session_to_the_next():
    stock = (128, 128, "auto")
    lines = [
        line_of(n, "reference", stock, session=n // 5, speed=1.0 if n < 5 else 0.5)
        for n in range(10)
    ]
    drift = drift_of(lines)
    assert drift(1, 95.0) / drift(0, 40.0) == pytest.approx(2.0, rel=0.01)


def test_shrunk_values_are_closer_to_the_truth_than_single_measurements():
    noisy = [recorded(noise=0.08, seed=seed) for seed in range(3)]
    raw = np.concatenate([errors(truth_of(one, shrink=False)) for one in noisy])
    truths = [truth_of(one) for one in noisy]
    drawn = np.concatenate([errors(truth) for truth in truths])
    assert np.std(drawn) < 0.9 * np.std(raw)
    told = np.array([one.log_rate_sd for truth in truths for one in truth.points.values()])
    assert 0.6 < np.sqrt(np.mean(told**2)) / np.std(drawn) < 1.6


def test_a_lucky_value_is_no_optimum():
    points = [(one, other) for one in range(8) for other in range(8)]
    rng = np.random.default_rng(1)
    true = np.array([0.1 * one for one, _ in points])
    values = true + rng.normal(0, 0.3, len(points))
    means, _ = shrunk(points, values, np.full(len(points), 0.09))
    assert values.max() - true.max() > 2 * abs(means.max() - true.max())


def test_what_is_known_exactly_is_not_moved():
    points = [(one, other) for one in range(5) for other in range(5)]
    values = np.array([float(one * other) for one, other in points])
    means, spread = shrunk(points, values, np.full(len(points), 1e-8))
    assert means == pytest.approx(values, abs=1e-3)
    assert spread.max() < 1e-3


def test_measurements_that_are_drawn_have_the_mean_of_the_truth_and_the_noise_of_the_recording():
    point = (32, 16, "auto")
    found = truth_of(recorded(noise=0.05)).points[point]
    random = Random(5)
    drawn = [measure(found.draw(random), GOAL)[RATE] for _ in range(400)]
    assert np.mean(drawn) == pytest.approx(found.value(GOAL), rel=0.015)
    assert np.std(np.log(drawn)) == pytest.approx(0.05, rel=0.35)


@given(st.integers(0, 1000))
def test_a_drawn_load_has_the_requests_of_the_recorded_one(seed):
    made = records()
    drawn = resampled(made, Random(seed))
    assert [one.index for one in drawn] == list(range(len(made)))
    kept = {(one.sent_s, one.end_s, one.gaps_s) for one in made}
    assert {(one.sent_s, one.end_s, one.gaps_s) for one in drawn} <= kept
    assert [one.sent_s for one in drawn] == sorted(one.sent_s for one in drawn)


def test_a_point_that_failed_has_its_class_and_no_value():
    broken = (64, 8, "fp8")
    found = truth_of(recorded(fails={broken})).points[broken]
    assert found.failure is FailureClass.DOES_NOT_FIT
    assert found.value(GOAL) == 0.0


def test_limits_decide_what_a_point_is_worth():
    goal = parse_goal("max goodput where p95 itl <= 100ms")
    figures = {"goodput_requests_per_s": 2.0, "itl_p95_s": 0.09}
    assert value_of(figures, goal) == 2.0
    assert value_of(figures | {"itl_p95_s": 0.11}, goal) == 0.0
    assert value_of({"goodput_requests_per_s": 2.0}, goal) == 0.0


def test_any_goal_can_be_applied_to_what_was_kept():
    made = records(first_s=0.4, gap_s=0.1)
    line = line_of(0, "point", (32, 2, "auto"), requests=pack_requests(made))
    figures = measure(
        run_of(line), parse_goal("max goodput where p99 e2e <= 1s and p90 tpot <= 1s")
    )
    assert figures["e2e_p99_s"] == pytest.approx(1.1, rel=0.01)
    assert figures["tpot_p90_s"] == pytest.approx(0.1, rel=0.01)
    assert figures["good_share_ratio"] == 0.0
