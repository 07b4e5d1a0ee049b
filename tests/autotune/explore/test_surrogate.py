import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.autotune.explore import surrogate
from kvtune.autotune.explore.surrogate import Samples, field_over, fit, main_effects

PLACES = np.array(list(product((0.0, 0.5, 1.0), (0.0, 1.0))))
FIELD = field_over(PLACES, [True, False], seed=1)
NOTHING = np.zeros(len(PLACES))


def samples(rows, values, variance=1e-4, at_s=None):
    count = len(rows)
    return Samples(
        np.array(rows, dtype=np.intp),
        np.array(values, dtype=float),
        np.full(count, variance),
        np.zeros(count) if at_s is None else np.array(at_s, dtype=float),
    )


def believed(found, prior=NOTHING, field=FIELD, watched=(0,), **changes):
    settings_ = {"scale": 1.0, "noise": 1e-4, "centre": 0.2, "seed": 3} | changes
    return fit(field, found, prior, watched=np.array(watched, dtype=np.intp), **settings_)


def by_hand(found, prior, scale=1.0, centre=0.2):
    """The average over the grid, written out cell by cell with plain matrices and loops."""
    weights, means, variances = [], [], []
    points = range(len(PLACES))
    off = found.values - 0.9 * prior[found.rows]
    middle = np.median(off)
    moments = range(len(found.rows))
    wander = {
        (one, other): math.exp(-abs(found.at_s[one] - found.at_s[other]) / 3600)
        for one, other in product(moments, repeat=2)
    }
    # cov(d_i - mean, d_j - mean), term by term.
    whole_mean = sum(wander.values()) / len(moments) ** 2
    means_of = [sum(wander[one, other] for other in moments) / len(moments) for one in moments]
    for length, joint, size, own, louder, drift in product(
        surrogate.LENGTHS,
        surrogate.JOINT,
        surrogate.SIZES,
        surrogate.OWNS,
        surrogate.NOISES,
        surrogate.DRIFTS,
    ):
        size, own = size * scale, own * scale

        def alike(one, other, length=length, joint=joint, size=size, own=own):
            first = math.exp(-abs(PLACES[one, 0] - PLACES[other, 0]) / length)
            second = 1.0 if PLACES[one, 1] == PLACES[other, 1] else 0.3
            mixed = (1 - joint) * (first + second) / 2 + joint * first * second
            special = own**2 if one == other else 0.0
            return size**2 * mixed + special + 0.09 * prior[one] * prior[other] + (0.5 * scale) ** 2

        inside = np.array([[alike(one, other) for other in found.rows] for one in found.rows])
        for one, other in product(range(len(found.rows)), repeat=2):
            inside[one, other] += drift**2 * (
                wander[one, other] - means_of[one] - means_of[other] + whole_mean
            )
        inside += louder**2 * np.diag(found.variance)
        across = np.array([[alike(one, other) for other in found.rows] for one in points])
        back = np.linalg.inv(inside)
        means.append(0.9 * prior + middle + across @ back @ (off - middle))
        whole = np.array([alike(one, one) for one in points])
        variances.append(whole - np.einsum("pi,ij,pj->p", across, back, across))
        fits = -0.5 * (off - middle) @ back @ (off - middle) - 0.5 * np.linalg.slogdet(inside)[1]
        before = (math.log(size / scale / centre), math.log(louder) / 0.5)
        weights.append(fits - 0.5 * sum(one**2 for one in before))
    weights = np.exp(np.array(weights) - max(weights))
    weights[weights <= 0.01] = 0
    weights /= weights.sum()
    mean = weights @ np.array(means)
    return mean, weights @ (np.array(variances) + (np.array(means) - mean) ** 2)


def test_the_mean_and_variance_are_those_of_the_averaged_grid():
    prior = np.array([0.0, 0.3, -0.2, 0.5, 0.1, 0.4])
    found = samples([0, 3, 3, 5], [0.1, 0.7, 0.62, 0.35], 0.002, [0, 600, 1800, 4000])
    mean, variance = by_hand(found, prior)
    beliefs = believed(found, prior)
    assert beliefs.mean == pytest.approx(mean, abs=1e-4)
    assert beliefs.variance == pytest.approx(variance, abs=1e-4)


def test_draws_have_the_mean_the_spread_and_the_covariance_that_are_told():
    found = samples([0, 3, 4], [0.0, 0.5, -0.3], 0.01)
    beliefs = believed(found, np.linspace(0, 1, 6), watched=(0, 2))
    spread = np.sqrt(beliefs.variance)
    assert np.all(np.abs(beliefs.draws.mean(axis=0) - beliefs.mean) < 4 * spread / 16)
    assert beliefs.draws.std(axis=0) == pytest.approx(spread, rel=0.25)
    together = np.cov(beliefs.draws.T)[[0, 2]]
    bound = 5 * np.outer(spread[[0, 2]], spread) / 16
    assert np.all(np.abs(together - beliefs.linked) < bound)


def test_a_watched_point_varies_with_itself_as_its_variance_says():
    beliefs = believed(samples([0, 3], [0.0, 0.5]), watched=(1, 3))
    assert beliefs.linked[0, 1] == pytest.approx(beliefs.variance[1], rel=1e-6)
    assert beliefs.linked[1, 3] == pytest.approx(beliefs.variance[3], rel=1e-6)


def test_before_anything_was_measured_most_of_the_prior_is_believed():
    prior = np.linspace(-1, 1, 6)
    assert believed(samples([], []), prior).mean == pytest.approx(0.9 * prior)


def test_an_exact_measurement_is_believed_and_its_neighbour_more_than_who_is_far():
    beliefs = believed(samples([0], [0.0], 1e-6))
    near, far = beliefs.variance[2], beliefs.variance[5]
    assert beliefs.variance[0] < near < far


def test_repeats_make_a_point_surer():
    once = believed(samples([0], [0.0], 0.01))
    often = believed(samples([0] * 16, [0.0] * 16, 0.01, range(0, 960, 60)))
    assert often.variance[0] < once.variance[0] / 6


def test_a_prior_that_says_too_much_is_believed_less():
    prior = np.linspace(0, 2, 6)
    beliefs = believed(samples([0, 1, 2, 3], 0.4 * prior[:4]), prior)
    assert beliefs.mean[5] - beliefs.mean[0] == pytest.approx(0.4 * 2, abs=0.2)


def test_one_more_measurement_is_thought_noisier_where_repeats_differ():
    calm = believed(samples([0] * 5, [0.0, 0.01, -0.01, 0.0, 0.01], 0.01), noise=0.01)
    loud = believed(samples([0] * 5, [0.3, -0.2, 0.25, -0.3, 0.0], 0.01), noise=0.01)
    assert calm.noise < loud.noise


def test_a_machine_that_wandered_is_told_from_points_that_differ():
    # The same point twice at once, and a third time hours later: only the machine can differ.
    hours = believed(samples([0, 0, 0, 3], [0.0, 0.0, 0.2, 0.2], 1e-4, [0, 1, 9000, 9001]))
    at_once = believed(samples([0, 0, 0, 3], [0.0, 0.0, 0.0, 0.2], 1e-4, [0, 1, 2, 3]))
    assert hours.mean[3] - hours.mean[0] < at_once.mean[3] - at_once.mean[0] - 0.03


def test_what_is_special_to_a_point_is_believed_of_it_and_not_of_its_neighbours():
    line = field_over(np.linspace(0, 1, 15)[:, None], [True], seed=1)
    rows, values = [*range(0, 15, 2), 6, 6], [0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0, 0.0, 0.3, 0.3]
    found = believed(samples(rows, values), prior=np.zeros(15), field=line)
    assert found.mean[6] > 0.25
    assert max(found.mean[5], found.mean[7]) < 0.13, "half way, if it were smooth"
    assert found.variance[6] < found.variance[5]


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(5)))
def test_the_order_of_measurements_does_not_matter(order):
    rows, values, times = [0, 2, 3, 3, 5], [0.1, 0.4, 0.2, 0.25, 0.0], [0, 10, 500, 900, 2000]
    first = believed(samples(rows, values, 0.01, times))
    turned = [[column[at] for at in order] for column in (rows, values, times)]
    second = believed(samples(turned[0], turned[1], 0.01, turned[2]))
    assert second.mean == pytest.approx(first.mean, abs=1e-9)
    assert second.variance == pytest.approx(first.variance, abs=1e-9)


def test_equal_seeds_draw_the_same():
    found = samples([0, 3], [0.0, 0.5])
    assert np.array_equal(believed(found).draws, believed(found).draws)
    assert not np.array_equal(believed(found).draws, believed(found, seed=4).draws)


def test_effects_that_add_up_are_explained_by_their_knobs_alone():
    shares = main_effects(PLACES, 2.0 * PLACES[:, 0] + 1.0 * PLACES[:, 1])
    # Variances of 2 x (0, .5, 1) and of (0, 1), each in equal parts.
    assert shares == pytest.approx([(2 / 3) / (2 / 3 + 0.25), 0.25 / (2 / 3 + 0.25)])
    together = main_effects(PLACES, np.where(PLACES[:, 1] > 0, 1, -1) * (PLACES[:, 0] - 0.5))
    assert together == pytest.approx([0.0, 0.0])
    assert list(main_effects(PLACES, NOTHING)) == [0.0, 0.0]
