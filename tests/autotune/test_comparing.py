"""Finalists beside the baseline: what is proved, what is excluded, and who is measured again."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.comparing import Next, Value, at_last, contrast_of, findings, next_round
from kvtune.autotune.rounds import ALPHA, level_at
from kvtune.profilers.statistics import t_quantile


def seen(**rounds):
    """What configurations gave, each with a logarithm that is as good as any."""
    return {int(name[1:]): tuple(map(Value, own)) for name, own in rounds.items()}


# Two finalists beside the baseline, 5 rounds of which the third one was slow for everybody.
ROUNDS = seen(
    c0=(10.0, 10.3, 8.1, 9.9, 10.2),
    c1=(11.2, 11.3, 9.2, 10.7, 11.6),
    c2=(10.1, 10.0, 8.3, 10.1, 10.0),
)


def counted(good, of, rates):
    """Rounds with so many good requests of `of`, at these rates of all requests a second."""
    return tuple(Value(rate * n / of, n, of) for n, rate in zip(good, rates, strict=True))


def by_regression(values, first, second):
    """The same contrast by ordinary least squares on indicators, with NumPy."""
    numbers = sorted(values)
    rows, told = [], []
    for place, number in enumerate(numbers):
        for round_number, value in enumerate(values[number]):
            row = np.zeros(len(numbers) + len(values[number]))
            row[place] = row[len(numbers) + round_number] = 1
            rows.append(row)
            told.append(math.log(value.value))
    design, told = np.array(rows), np.array(told)
    fitted = np.linalg.pinv(design) @ told
    freedom = len(told) - np.linalg.matrix_rank(design)
    variance = ((told - design @ fitted) ** 2).sum() / freedom
    c = np.zeros(design.shape[1])
    c[numbers.index(first)], c[numbers.index(second)] = 1, -1
    return c @ fitted, math.sqrt(variance * c @ np.linalg.pinv(design.T @ design) @ c), freedom


def test_a_contrast_is_that_of_the_two_way_model():
    found, is_ratio = contrast_of(ROUNDS, 1, 0)
    assert is_ratio
    assert found == pytest.approx(by_regression(ROUNDS, 1, 0))
    assert found.freedom == 8


def test_a_slow_round_changes_nothing():
    slowed = {
        n: tuple(Value(v.value / 3 if i == 1 else v.value) for i, v in enumerate(own))
        for n, own in ROUNDS.items()
    }
    assert contrast_of(slowed, 1, 0)[0] == pytest.approx(contrast_of(ROUNDS, 1, 0)[0])


def test_only_common_rounds_are_compared():
    stopped = {**ROUNDS, 2: ROUNDS[2][:3]}
    first_three = {n: own[:3] for n, own in ROUNDS.items()}
    assert contrast_of(stopped, 2, 0) == contrast_of(first_three, 2, 0)
    without = {n: own for n, own in ROUNDS.items() if n != 2}
    assert contrast_of(stopped, 1, 0) == contrast_of(without, 1, 0)


def test_one_round_compares_nothing():
    assert contrast_of(seen(c0=(1.0,), c1=(2.0,)), 1, 0) is None
    assert findings(seen(c0=(1.0,), c1=(2.0,)), 0, lambda rounds: ALPHA) == {}


def test_a_value_of_zero_is_compared_by_differences():
    found, is_ratio = contrast_of(seen(c0=(0.0, 0.0, 0.0), c1=(2.0, 2.1, 1.9)), 1, 0)
    assert not is_ratio
    # mean 2.0, standard deviation 0.1 in three rounds
    assert found == pytest.approx((2.0, 0.1 / math.sqrt(3), 2.0))


NEAR_ZERO = {
    0: counted((2, 5, 3), 40, (2.2, 2.2, 2.2)),
    1: counted((39, 40, 40), 40, (4.7, 5.0, 4.8)),
    2: counted((40, 39, 40), 40, (4.6, 4.7, 4.9)),
}
"""Stock that serves hardly a request in time, one more or less is a factor, beside two that do."""


def test_where_few_requests_are_good_values_are_compared_and_a_clear_gain_is_seen_at_once():
    found = findings(NEAR_ZERO, 0, lambda rounds: level_at(rounds, 8))
    assert all(one.is_above and not one.is_ratio for one in found.values())
    assert go(NEAR_ZERO).why == "a finalist is above the stock defaults beyond noise"
    logs = {n: tuple(Value(v.value) for v in own) for n, own in NEAR_ZERO.items()}
    assert go(logs).going, "by logarithms, the same rounds prove nothing"


@pytest.mark.parametrize(
    ("good", "of", "is_ratio"),
    [(20, 40, True), (19, 40, False), (8, 8, True), (2, 8, False), (0, 40, False)],
)
def test_one_round_with_few_good_requests_is_enough_to_compare_values(good, of, is_ratio):
    many = counted((of, of, of), of, (2.0, 2.1, 1.9))
    once = counted((of, good, of), of, (2.0, 2.1, 1.9))
    assert contrast_of({0: once, 1: many}, 1, 0)[1] is is_ratio
    assert contrast_of({0: many, 1: once}, 1, 0)[1] is is_ratio
    assert contrast_of({0: many, 1: many, 2: once}, 1, 0)[1], "whoever is compared counts"


def test_counts_that_happen_to_agree_are_no_proof():
    """One good request of 40 beside two, in each of three rounds: the rounds do not scatter at all,
    yet with 3 and 6 of 120 requests good, Fisher's exact test gives 0.25, one-sided."""
    rates = (2.0, 2.0, 2.0)
    values = {0: counted((1, 1, 1), 40, rates), 1: counted((2, 2, 2), 40, rates)}
    (found,) = findings(values, 0, lambda rounds: ALPHA).values()
    # By request: variances of 1 * 39/40 and 2 * 38/40 good ones, each worth 2.0 / 40
    error = 2.0 / 40 * math.sqrt((39 / 40 + 76 / 40) / 3)
    assert found.contrast == pytest.approx((0.05, error, 2))
    assert not found.is_above


def test_gains_by_value_and_by_logarithm_are_told_alike():
    few = findings(NEAR_ZERO, 0, lambda rounds: ALPHA)[1]
    assert few.gain == pytest.approx(few.contrast.difference / few.stock)
    assert few.ratio.estimate == pytest.approx(1 + few.gain)
    many = findings(ROUNDS, 0, lambda rounds: ALPHA)[1]
    assert many.gain == pytest.approx(math.exp(many.contrast.difference) - 1)
    assert many.ratio.estimate == pytest.approx(1 + many.gain)
    assert many.ratio.low == pytest.approx(math.exp(many.bounds[0]))


def test_nothing_is_a_multiple_of_zero():
    none = seen(c0=(0.0, 0.0, 0.0), c1=(2.0, 2.1, 1.9))
    assert findings(none, 0, lambda rounds: ALPHA)[1].ratio is None


def test_a_ratio_reaches_no_lower_than_nothing():
    values = {
        0: counted((12, 14, 13), 40, (4.0, 4.0, 4.0)),
        1: counted((0, 5, 0), 40, (4.0, 4.0, 4.0)),
    }
    (found,) = findings(values, 0, lambda rounds: ALPHA).values()
    assert -found.bounds[0] > found.stock, "the difference may be more than all there was"
    assert found.ratio.low == 0.0
    assert found.ratio.estimate == pytest.approx(5 / 39)


def test_finalists_are_tested_together():
    """By Holm: the clearest against a half of what a look may be wrong by, the next against all."""
    both = seen(c0=(1.0, 1.02, 0.99), c1=(2.0, 2.1, 1.95), c2=(1.5, 1.49, 1.53))
    found = findings(both, 0, lambda rounds: 0.02)
    assert all(one.is_above for one in found.values())
    assert sorted(one.level for one in found.values()) == [0.01, 0.02]
    none = {**both, **seen(c1=(1.0, 1.04, 0.97), c2=(1.01, 1.0, 1.01))}
    assert [one.level for one in findings(none, 0, lambda rounds: 0.02).values()] == [0.01, 0.01]


@given(st.integers(0, 10_000), st.floats(0.01, 0.2), st.integers(1, 4))
def test_bounds_and_p_values_say_the_same(seed, sigma, finalists):
    rng = random.Random(seed)
    values = {
        n: tuple(Value(math.exp(rng.gauss(0.15 * n, sigma))) for _ in range(3))
        for n in range(1 + finalists)
    }
    for one in findings(values, 0, lambda rounds: ALPHA).values():
        assert one.is_above == (one.contrast.chance() < one.level)
        assert one.bounds[0] < one.contrast.difference < one.bounds[1]
        assert one.most_gain == pytest.approx(math.exp(one.bounds[1]) - 1)


def go(values, most=8, able=(1, 2), sure=(1, 2), baseline=0):
    return next_round(values, baseline, most, able=able, sure=sure)


def flat(spread, rounds=3, **gains):
    """Rounds that scatter by about `spread`, a finalist with each of the `gains`."""
    rng = random.Random(5)
    return {
        n: tuple(Value(gain * math.exp(rng.gauss(0, spread))) for _ in range(rounds))
        for n, gain in {0: 1.0, **{int(name[1:]): gain for name, gain in gains.items()}}.items()
    }


def test_between_looks_everybody_goes_on():
    for rounds in (1, 2, 4, 6, 7):
        assert go(flat(0.05, rounds, f1=9.0, f2=0.1), able=()).going == (0, 1, 2)


def test_a_clear_gain_ends_at_the_first_look():
    found = go(flat(0.02, f1=1.5, f2=1.0))
    assert found == Next(why="a finalist is above the stock defaults beyond noise")


def test_a_gain_that_is_not_clear_yet_goes_on():
    assert go(flat(0.05, f1=1.12, f2=0.5)).going == (0, 1), "and the other one cannot win any more"


def test_a_finalist_ahead_of_a_proved_one_goes_on():
    values = seen(c0=(1.0, 1.01, 0.99), c1=(1.5, 1.51, 1.52), c2=(1.3, 2.9, 1.8))
    assert go(values).going == (0, 2)
    assert go({**values, **seen(c2=(1.0, 2.0, 1.3))}).going == ()


def test_a_proved_one_whose_answers_may_be_refused_keeps_nobody_from_going_on():
    values = seen(c0=(1.0, 1.05, 0.98), c1=(4.0, 4.2, 4.1), c2=(1.15, 1.14, 1.19))
    assert go(values).going == ()
    assert go(values, sure=(2,)).going == (0, 2)


def test_it_ends_when_no_gain_that_matters_is_possible():
    assert go(flat(0.001, f1=1.002, f2=0.999)) == Next(
        why="a gain above 2% over the stock defaults is excluded"
    )


def test_it_ends_when_more_rounds_would_hardly_prove_a_gain():
    found = go(flat(0.1, 5, f1=0.99, f2=0.98))
    assert found == Next(why="more rounds would hardly prove a gain over the stock defaults")


def test_finalists_that_miss_the_goal_are_given_up_at_a_look():
    assert go(flat(0.02, f1=1.5, f2=1.5), able=()) == Next(why="no finalist meets the goal")


def test_nothing_goes_on_after_the_last_round():
    assert go(flat(0.05, 8, f1=1.04, f2=1.04)) == Next()
    assert go(flat(0.05, 3, f1=1.04, f2=1.04), most=3) == Next()


def test_without_stock_defaults_there_is_nothing_to_prove():
    two = seen(c1=(1.0, 1.0), c2=(1.1, 1.0))
    assert go(two).going == (1, 2), "the first look has to tell them apart"
    assert go({n: (*own, Value(1.0)) for n, own in two.items()}) == Next(
        why="there are no stock defaults to compare with"
    )


@pytest.mark.parametrize("rounds", [1, 3, 4])
def test_stock_defaults_are_not_measured_alone(rounds):
    assert go({0: tuple(map(Value, (1.0, 1.1, 1.0, 0.9)[:rounds]))}).going == ()
    alone = {0: flat(0.05, 4)[0], 2: flat(0.05, 3, f2=0.2)[2]}
    assert go(alone) == Next(why="no finalist is left")


def test_what_failed_does_not_go_on():
    """It has no values."""
    assert go(seen(c0=(1.0, 1.0), c2=(1.0, 1.0))).going == (0, 2)
    assert go({}).going == ()


@given(st.integers(0, 10_000))
def test_hope_of_what_is_known_is_what_rounds_to_come_would_show(seed):
    """By drawing the difference and the rounds to come, with the noise as it was estimated."""
    rng = np.random.default_rng(seed)
    values = {n: tuple(map(Value, np.exp(rng.normal(0.05 * n, 0.05, 5)))) for n in (0, 1)}
    (found,) = findings(values, 0, lambda rounds: 0.01).values()
    difference, error, freedom = found.contrast
    sigma = error * math.sqrt(5 / 2)
    truth = difference + error * rng.standard_t(freedom, 4000)
    later = truth + rng.normal(0, 1, 4000) * sigma * math.sqrt(2 / 3)
    last = (5 * difference + 3 * later) / 8
    proof = t_quantile(1 - level_at(8, 8), 7) * sigma * math.sqrt(2 / 8)
    assert found.hope(8, 1) == pytest.approx((last > proof).mean(), abs=0.06)


def test_who_was_given_up_at_a_look_is_judged_as_at_that_look():
    noise = random.Random(3)
    stock, on, given_up = (tuple(noise.gauss(10, 0.5) for _ in range(8)) for _ in range(3))
    found = at_last(seen(c0=stock, c1=on, c2=given_up[:3]), 0, 8)
    # 0.025 in all; 3, 5 and 8 of 16 parts at the looks, so that 8 are left for the last of them.
    levels = {found[1].level, found[2].level}
    assert found[2].level in (0.025 * 3 / 16, 0.025 * 3 / 16 / 2)
    assert found[1].level in (0.025 * 8 / 16, 0.025 * 8 / 16 / 2)
    assert len(levels) == 2
