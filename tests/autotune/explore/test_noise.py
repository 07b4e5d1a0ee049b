import math

import numpy as np
import pytest

from kvtune.autotune.explore.base import Observation
from kvtune.autotune.explore.noise import LIMIT_NOISE, Noise
from kvtune.autotune.explore.responses import RATE, SHARE
from kvtune.types import FailureClass


def seen(value, **changed):
    usual = {"arguments": {}, "figures": {"x": value}, "at_s": 5.0, "wall_s": 1.0}
    return Observation(**{**usual, **changed})


def samples_of(noise, name, *observations):
    rows = list(range(10, 10 + len(observations)))
    return noise.samples(name, rows, observations, lambda figures: {name: figures["x"]})


def test_each_measurement_is_a_sample_at_its_point_and_failures_are_none():
    dead = seen(0.0, failure=FailureClass.OUT_OF_MEMORY)
    found = samples_of(Noise({RATE: 0.2}, 64), RATE, seen(1.5), dead, seen(2.5, at_s=9.0))
    assert found.rows.tolist() == [10, 12]
    assert found.values.tolist() == [1.5, 2.5]
    assert found.variance == pytest.approx([0.04, 0.04])
    assert found.at_s.tolist() == [5.0, 9.0]


def test_a_part_of_a_run_and_a_kin_say_less():
    part, kin = seen(1.0, share=0.25), seen(1.0, task=0.5)
    found = samples_of(Noise({RATE: 0.2}, 64), RATE, part, kin)
    # A quarter of the load has four times the variance; half as alike adds (1 / 0.5 - 1)².
    assert found.variance == pytest.approx([0.16, 1.04])


def test_a_share_is_as_uncertain_as_its_requests_are_few():
    # Odds of 3 are a share of 0.75, so log odds have a variance of 1 / (16 * 0.75 * 0.25) = 1 / 3.
    noise = Noise({}, 16)
    found = samples_of(noise, SHARE, seen(math.log(3)))
    assert found.variance == pytest.approx([1 / 3])
    assert noise.variance(SHARE, found) == pytest.approx(1 / 3)


def test_what_nobody_says_has_a_usual_noise():
    nothing = samples_of(Noise({}, 64), "itl")
    assert len(nothing.rows) == 0
    assert Noise({}, 64).variance("itl", nothing) == pytest.approx(LIMIT_NOISE**2)
    assert Noise({}, 64).variance(RATE, nothing) == pytest.approx(0.05**2)
    assert np.isfinite(Noise({}, 64).variance(SHARE, nothing))
