import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.autotune.explore import cells, surrogate
from kvtune.autotune.explore.likeness import field_over
from kvtune.autotune.explore.surrogate import Samples, fit

PLACES = np.array(list(product((0.0, 0.5, 1.0), (0.0, 1.0))))
FIELD = field_over(PLACES, [True, False])
NOTHING = np.zeros(len(PLACES))


def samples(rows, values, variance=1e-4, at_s=None):
    count = len(rows)
    return Samples(
        np.array(rows, dtype=np.intp),
        np.array(values, dtype=float),
        np.full(count, variance),
        np.zeros(count) if at_s is None else np.array(at_s, dtype=float),
    )


def believed(found, prior=NOTHING, field=FIELD, **changes):
    settings_ = {"scale": 1.0, "noise": 1e-4, "centre": 0.2, "seed": 3} | changes
    return fit(field, found, prior, **settings_)


def by_hand(found, prior, settings_, scale=1.0):
    """The average over settings and their weights, with plain matrices and loops."""
    means, variances, weights = [], [], []
    points = range(len(PLACES))
    alone, off = two_by_three(prior), found.values - 0.9 * prior[found.rows]
    middle = np.median(off)
    moments = range(len(found.rows))
    wander = {
        (one, other): math.exp(-abs(found.at_s[one] - found.at_s[other]) / 3600)
        for one, other in product(moments, repeat=2)
    }
    # cov(d_i - mean, d_j - mean), term by term.
    whole_mean = sum(wander.values()) / len(moments) ** 2
    means_of = [sum(wander[one, other] for other in moments) / len(moments) for one in moments]
    for weight, lengths, size, joint, own, louder, drift, doubts in settings_:

        def alike(one, other, lengths=lengths, size=size, joint=joint, own=own, doubts=doubts):
            first = math.exp(-abs(PLACES[one, 0] - PLACES[other, 0]) / lengths[0])
            second = math.exp(-float(PLACES[one, 1] != PLACES[other, 1]) / lengths[1])
            special = own**2 if one == other else 0.0
            rest = prior - alone
            told = doubts[0] ** 2 * alone[one] * alone[other]
            told += doubts[1] ** 2 * rest[one] * rest[other]
            shared = size**2 * (first + second) / 2 + joint**2 * first * second
            return shared + special + told + (0.5 * scale) ** 2

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
        weights.append(weight)
    mean = np.array(weights) @ np.array(means)
    return mean, np.array(weights) @ (np.array(variances) + (np.array(means) - mean) ** 2)


def two_by_three(values):
    """Row mean plus column mean less the mean of all: what each of two knobs does alone."""
    table = np.asarray(values, dtype=float).reshape(3, 2)
    rows, columns = table.mean(axis=1, keepdims=True), table.mean(axis=0, keepdims=True)
    return (rows + columns - table.mean()).ravel()


def test_the_mean_and_variance_are_those_of_the_averaged_settings(monkeypatch):
    prior = np.array([0.0, 0.3, -0.2, 0.5, 0.1, 0.4])
    found = samples([0, 3, 3, 5], [0.1, 0.7, 0.62, 0.35], 0.002, [0, 600, 1800, 4000])
    # Three draws, two of them equal.
    places = np.array([[1, 2, 0, 2, 3, 1, 2, 1, 0, 2], [3, 0, 0, 3, 1, 0, 1, 2, 1, 0]])
    drawn = cells.cells_at(places[[0, 1, 0]], 2, 1.0)
    monkeypatch.setattr(surrogate, "drawn_cells", lambda *args, **kwargs: drawn)
    by_weight = [
        (2 / 3, (0.35, 0.8), 0.2, 0.4, 0.03, 1.25, 0.03, (0.2, 1.2)),
        (1 / 3, (2.0, 0.15), 0.4, 0.1, 0.0, 0.8, 0.1, (0.5, 0.2)),
    ]
    mean, variance = by_hand(found, prior, by_weight)
    beliefs = believed(found, prior, noise=0.002)
    assert beliefs.mean == pytest.approx(mean, abs=1e-4)
    assert beliefs.variance == pytest.approx(variance, abs=1e-4)
    assert beliefs.noise == pytest.approx(0.002 * (2 / 3 * 1.25**2 + 1 / 3 * 0.8**2))


def test_settings_are_weighed_by_the_likelihood_of_what_was_measured(monkeypatch):
    asked = {}

    def noted(likelihood, knobs, **settings_):
        asked["likelihood"] = likelihood
        return cells.drawn_cells(likelihood, knobs, **settings_)

    monkeypatch.setattr(surrogate, "drawn_cells", noted)
    found = samples([0, 3, 4], [0.4, 0.1, -0.2], 0.01)
    believed(found)
    places = np.array([[0, 2, 0, 2, 3, 1, 2, 0, 0, 0], [1, 5, 0, 4, 0, 0, 4, 0, 0, 0]])
    off = found.values - np.median(found.values)
    expected = []
    for lengths, size, joint, own, louder in (
        ((0.15, 0.8), 0.2, 0.4, 0.03, 1.25),
        ((0.35, 20.0), 0.8, 0.05, 0.0, 3.2),
    ):
        inside = np.empty((3, 3))
        for one, other in product(range(3), repeat=2):
            first, second = PLACES[found.rows[one]], PLACES[found.rows[other]]
            parts = [
                math.exp(-abs(first[0] - second[0]) / lengths[0]),
                math.exp(-float(first[1] != second[1]) / lengths[1]),
            ]
            same = float(one == other)
            inside[one, other] = size**2 * sum(parts) / 2 + joint**2 * parts[0] * parts[1]
            inside[one, other] += same * (own**2 + louder**2 * 0.01) + 0.25
        quadratic = off @ np.linalg.inv(inside) @ off
        expected.append(-0.5 * (quadratic + math.log(np.linalg.det(inside))))
    likelihoods = asked["likelihood"](cells.cells_at(places, 2, 1.0))
    assert likelihoods == pytest.approx(expected, abs=1e-3)


def test_draws_have_the_mean_the_spread_and_the_covariance_that_are_told():
    found = samples([0, 3, 4], [0.0, 0.5, -0.3], 0.01)
    beliefs = believed(found, np.linspace(0, 1, 6))
    spread = np.sqrt(beliefs.variance)
    assert np.all(np.abs(beliefs.draws.mean(axis=0) - beliefs.mean) < 4 * spread / 16)
    assert beliefs.draws.std(axis=0) == pytest.approx(spread, rel=0.25)
    together = np.cov(beliefs.draws.T)[[0, 2]]
    bound = 5 * np.outer(spread[[0, 2]], spread) / 16
    assert np.all(np.abs(together - beliefs.links(np.array([0, 2]))) < bound)


def test_a_watched_point_varies_with_itself_as_its_variance_says():
    beliefs = believed(samples([0, 3], [0.0, 0.5]))
    linked = beliefs.links(np.array([1, 3]))
    assert linked[0, 1] == pytest.approx(beliefs.variance[1], rel=1e-6)
    assert linked[1, 3] == pytest.approx(beliefs.variance[3], rel=1e-6)


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
    line = field_over(np.linspace(0, 1, 15)[:, None], [True])
    # Each even point is off by itself; nothing smooth is.
    rows = [*range(0, 15, 2)] * 3
    values = [0.3 if row in (2, 6, 12) else 0.0 for row in rows]
    found = believed(samples(rows, values), prior=np.zeros(15), field=line)
    assert found.mean[6] > 0.25
    assert max(found.mean[5], found.mean[7]) < 0.14, "half way, if it were smooth"
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
