import math
import random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.statistics import (
    Contrast,
    binomial_interval,
    binomial_tail,
    block_contrast,
    bootstrap_interval,
    fisher_probability,
    mean_interval,
    paired_ratio_interval,
    percentile,
    ratio_interval,
    t_probability,
    t_quantile,
)

numbers = st.floats(-1e6, 1e6, allow_nan=False)
positive = st.floats(1e-3, 1e3, allow_nan=False)


@given(st.lists(numbers, min_size=1, max_size=40), st.floats(0, 100))
def test_percentile_is_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(
        float(numpy.percentile(values, percent)), rel=1e-9, abs=1e-6
    )


@given(st.lists(numbers, min_size=1, max_size=20), st.floats(0, 100))
def test_percentile_stays_within_the_data(values, percent):
    assert min(values) <= percentile(values, percent) <= max(values)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_impossible_percentile_is_refused(values, percent):
    with pytest.raises(ValueError, match="does not exist"):
        percentile(values, percent)


@pytest.mark.parametrize(  # printed tables of Student's t
    ("probability", "freedom", "expected"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.95, 5, 2.015),
        (0.995, 10, 3.169),
        (0.9995, 2, 31.599),
        (0.975, 1e7, 1.960),
    ],
)
def test_t_quantile_matches_the_table(probability, freedom, expected):
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=6e-4)


@given(st.floats(0.51, 0.995), st.floats(1, 60))
def test_t_quantile_inverts_the_integrated_density(probability, freedom):
    quantile = t_quantile(probability, freedom)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    grid = numpy.linspace(0, quantile, 20001)
    density = scale / math.sqrt(freedom * math.pi)
    density = density * (1 + grid**2 / freedom) ** (-(freedom + 1) / 2)
    assert 0.5 + float(numpy.trapezoid(density, grid)) == pytest.approx(probability, abs=1e-6)
    assert t_quantile(1 - probability, freedom) == pytest.approx(-quantile, rel=1e-9)


def test_mean_interval_of_known_values():
    # mean 3, standard error sqrt(2.5 / 5), t(4) = 2.7764
    estimate, low, high = mean_interval([1, 2, 3, 4, 5])
    assert (estimate, low, high) == pytest.approx((3, 3 - 1.96324, 3 + 1.96324), abs=1e-4)


def test_single_value_has_no_interval():
    assert mean_interval([2.5]) == (2.5, None, None)
    assert bootstrap_interval([2.5], max, seed=1) == (2.5, None, None)
    assert paired_ratio_interval([(3.0, 2.0)]) == (pytest.approx(1.5), None, None)


def test_mean_interval_covers_the_truth_as_often_as_it_says():
    rng = random.Random(7)
    covered = 0
    for _ in range(2000):
        _, low, high = mean_interval([rng.gauss(10, 3) for _ in range(4)])
        covered += low <= 10 <= high
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_ratio_interval_covers_the_truth_as_often_as_it_says():
    rng = random.Random(11)
    covered = 0
    for _ in range(1500):
        pairs = [(1.2 * math.exp(rng.gauss(0, 0.1)), math.exp(rng.gauss(0, 0.02))) for _ in "abcd"]
        _, low, high = paired_ratio_interval(pairs)
        covered += low <= 1.2 <= high
    assert covered / 1500 == pytest.approx(0.95, abs=0.02)


def test_bootstrap_interval_covers_the_truth_and_repeats_by_seed():
    rng = random.Random(3)
    covered = 0
    for trial in range(60):
        values = [rng.expovariate(1.0) for _ in range(80)]
        _, low, high = bootstrap_interval(values, lambda v: sum(v) / len(v), seed=trial)
        covered += low <= 1.0 <= high
    assert covered >= 52
    values = [rng.random() for _ in range(30)]
    assert bootstrap_interval(values, max, seed=5) == bootstrap_interval(values, max, seed=5)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=8), st.floats(0.01, 100))
def test_ratio_interval_turns_over_and_scales(pairs, factor):
    there = paired_ratio_interval(pairs)
    back = paired_ratio_interval([(theirs, ours) for ours, theirs in pairs])
    scaled = paired_ratio_interval([(ours * factor, theirs) for ours, theirs in pairs])
    assert there.estimate * back.estimate == pytest.approx(1)
    # With two pairs the bounds may span a hundred orders of magnitude.
    assert math.log(there.low) == pytest.approx(-math.log(back.high), abs=1e-6)
    assert scaled.estimate == pytest.approx(there.estimate * factor)
    assert there.low <= there.estimate * (1 + 1e-9)
    assert there.estimate <= there.high * (1 + 1e-9)


@pytest.mark.parametrize("pairs", [[(0.0, 1.0)], [(1.0, 0.0)], [(1.0, 1.0), (-1.0, 1.0)], []])
def test_ratio_without_positive_values_is_unknown(pairs):
    assert paired_ratio_interval(pairs) is None


def test_pairing_removes_drift_that_both_share():
    machine = [1.0, 1.4, 0.7, 1.1]
    ours, theirs = [1.1 * speed for speed in machine], machine
    assert paired_ratio_interval(list(zip(ours, theirs, strict=True))).low > 1.09
    ours_alone, theirs_alone = mean_interval(ours), mean_interval(theirs)
    assert ours_alone.low < theirs_alone.estimate, "apart, they cannot be told"


contrasts = st.builds(Contrast, st.floats(-0.9, 40), st.floats(0.01, 3), st.floats(1, 20))


@given(contrasts, st.floats(0.001, 0.2), st.floats(0, 60))
def test_a_ratio_interval_holds_the_ratios_that_a_t_test_does_not_refuse(contrast, level, ratio):
    found = ratio_interval(contrast, 1.0, level)
    missed = abs(1.0 + contrast.difference - ratio * 1.0)
    error = contrast.error * math.sqrt((1 + ratio**2) / 2)
    by_how_much = missed - t_quantile(1 - level, contrast.freedom) * error
    is_inside = (found.low is None or found.low <= ratio) and (
        found.high is None or ratio <= found.high
    )
    assert is_inside == (by_how_much <= 0) or by_how_much == pytest.approx(0, abs=1e-6)


@given(contrasts, st.floats(0.001, 0.2))
def test_a_ratio_of_one_is_refused_exactly_where_a_difference_is_proved(contrast, level):
    found = ratio_interval(contrast, 1.0, level)
    low, high = contrast.bounds(level)
    assert (found.low is not None and found.low > 1) == (low > 0)
    assert (found.high is not None and found.high < 1) == (high < 0)


def test_a_ratio_without_noise_is_exact_and_of_nothing_there_is_none():
    assert ratio_interval(Contrast(3.0, 0.0, 4), 1.5, 0.01) == (3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="multiple of 0"):
        ratio_interval(Contrast(3.0, 1.0, 4), 0.0, 0.01)


@given(st.floats(0.01, 0.99), st.floats(1, 60))
def test_t_probability_turns_the_quantile_back(probability, freedom):
    assert t_probability(t_quantile(probability, freedom), freedom) == pytest.approx(probability)


def test_t_probability_needs_a_freedom():
    with pytest.raises(ValueError, match="freedom 0"):
        t_probability(1.0, 0)


@given(st.integers(0, 30), st.integers(-1, 32), st.floats(0.001, 0.999))
def test_binomial_tail_is_the_sum_of_its_terms(trials, least, share):
    expected = math.fsum(
        math.comb(trials, count) * share**count * (1 - share) ** (trials - count)
        for count in range(max(0, least), trials + 1)
    )
    assert binomial_tail(least, trials, share) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_fishers_probability_is_what_the_lady_with_the_tea_had():
    # Three of four cups right, four with milk first: (16 + 1) / 70. All four: 1 / 70.
    assert fisher_probability(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert fisher_probability(4, 4, 0, 4) == pytest.approx(1 / 70)
    assert fisher_probability(0, 9, 0, 4) == 1.0
    assert fisher_probability(0, 0, 2, 4) == 1.0


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_fishers_two_sides_share_the_whole_probability(of, other_of, data):
    count, other = data.draw(st.integers(1, of)), data.draw(st.integers(0, other_of - 1))
    at_least = fisher_probability(count, of, other, other_of)
    fewer = fisher_probability(other + 1, other_of, count - 1, of)
    assert at_least + fewer == pytest.approx(1)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
def test_fishers_test_is_wrong_no_oftener_than_it_says(share):
    items, alpha = 30, 0.01
    weights = [math.comb(items, k) * share**k * (1 - share) ** (items - k) for k in range(31)]
    wrong = sum(
        weights[ours] * weights[theirs]
        for ours in range(items + 1)
        for theirs in range(items + 1)
        if fisher_probability(ours, items, theirs, items) <= alpha
    )
    assert 0 < wrong <= alpha


@pytest.mark.parametrize("counts", [(5, 4, 0, 4), (-1, 4, 0, 4), (1, 4, 5, 4), (1, 4, -1, 4)])
def test_fishers_test_refuses_counts_that_cannot_be(counts):
    with pytest.raises(ValueError, match="do not exist"):
        fisher_probability(*counts)


# Rows 2 and 3 are one and four above row 1, and column 2 is one above column 1, give or take 0.1.
BLOCKS = ((1.0, 2.1, 5.0), (2.0, 2.9, 6.0))


def test_a_contrast_in_blocks_leaves_out_what_rows_share():
    # Differences 1.0, 0.8, 1.0: mean 14/15, variance 1/75; error sqrt(1/75 / 3) with 2 degrees.
    found = block_contrast(BLOCKS, 1, 0)
    assert found == pytest.approx((14 / 15, math.sqrt(1 / 225), 2))


def test_all_columns_tell_the_noise_of_two():
    # Rows are 1, 2, 3 and no column is above another; what is left has squares of 0.30 in all, with
    # 4 degrees of freedom. Those of the first two columns alone would be 0.06 / 2 / 2.
    columns = ((1.2, 1.9, 2.9), (1.1, 2.1, 2.8), (0.7, 2.0, 3.3))
    found = block_contrast(columns, 1, 0)
    assert found == pytest.approx((0.0, math.sqrt(2 * 0.30 / 4 / 3), 4), abs=1e-12)


def test_a_noisy_pair_does_not_borrow_the_calm_of_others():
    calm = (1.0, 2.0, 3.0)
    noisy = (1.5, 1.4, 3.2)
    alone = block_contrast((calm, noisy), 1, 0)
    assert block_contrast((calm, noisy, calm, calm), 1, 0) == pytest.approx(alone)


def test_a_calm_pair_does_not_suffer_from_a_wild_column():
    calm, close, wild = (1.0, 2.0, 3.0), (1.1, 2.0, 3.1), (9.0, -4.0, 7.0)
    alone = block_contrast((calm, close), 1, 0)
    assert block_contrast((calm, close, wild), 1, 0) == pytest.approx(alone)


def test_a_contrast_of_one_row_or_one_column_is_refused():
    for columns in (((1.0,), (2.0,)), ((1.0, 2.0),)):
        with pytest.raises(ValueError, match="no contrast"):
            block_contrast(columns, 0, 0)


def test_bounds_and_chance_of_a_contrast_are_those_of_the_table():
    found = Contrast(2.776, 1.0, 4)
    assert found.bounds(0.025) == pytest.approx((0.0, 5.552), abs=1e-3)
    assert found.chance() == pytest.approx(0.025, abs=1e-4)


def test_a_difference_without_noise_is_sure():
    assert Contrast(0.1, 0.0, 4).bounds(0.01) == (0.1, 0.1)
    assert [Contrast(d, 0.0, 4).chance() for d in (0.1, 0.0, -0.1)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(  # printed tables of Clopper and Pearson's interval
    ("count", "of", "low", "high"),
    [(5, 100, 0.0164, 0.1128), (1, 20, 0.0013, 0.2487), (10, 20, 0.2720, 0.7280)],
)
def test_an_exact_interval_of_a_share_matches_the_table(count, of, low, high):
    assert binomial_interval(count, of) == pytest.approx((count / of, low, high), abs=6e-5)


def test_none_and_all_leave_one_bound_open():
    # With none of n, the upper bound is where n failures in a row have a chance of 2.5%.
    assert binomial_interval(0, 100) == pytest.approx((0, 0, 1 - 0.025 ** (1 / 100)))
    assert binomial_interval(100, 100) == pytest.approx((1, 0.025 ** (1 / 100), 1))


@pytest.mark.parametrize(("count", "of"), [(1, 0), (-1, 5), (6, 5)])
def test_an_impossible_share_is_refused(count, of):
    with pytest.raises(ValueError, match="no share"):
        binomial_interval(count, of)
