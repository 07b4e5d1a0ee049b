"""The A/A bench: its noise is what it says, and its counts are of what the product decides."""

from dataclasses import replace
from itertools import islice
from statistics import fmean, stdev

import aa
import pytest

CALM = aa.Scenario("calm", noise=0.05)


def errors(scenario, number=1, many=4000):
    ledger = aa.Simulated(scenario, 1)
    return [ledger._error(number) for _ in range(many)]


@pytest.mark.parametrize("tails", [False, True])
def test_noise_has_the_spread_that_it_says(tails):
    found = errors(replace(CALM, tails=tails), many=20_000)
    assert fmean(found) == pytest.approx(0, abs=0.002)
    assert stdev(found) == pytest.approx(0.05, rel=0.1 if tails else 0.03)


def test_a_wild_configuration_is_the_only_one():
    wild = replace(CALM, wild=3.0)
    assert [round(stdev(errors(wild, n)), 2) for n in (0, 1, 2)] == [0.05, 0.05, 0.15]
    stock = replace(wild, is_stock_wild=True)
    assert [round(stdev(errors(stock, n)), 2) for n in (0, 1, 2)] == [0.15, 0.05, 0.05]


def test_a_machine_that_walks_takes_all_with_it():
    walk = errors(replace(CALM, noise=0.0, walk=0.03))
    steps = [after - before for before, after in zip(walk, islice(walk, 1, None), strict=False)]
    assert stdev(steps) == pytest.approx(0.03, rel=0.05)


def test_one_in_so_many_is_bad():
    found = errors(replace(CALM, noise=0.0, bad=20))
    assert sum(error < -0.4 for error in found) / len(found) == pytest.approx(1 / 20, rel=0.2)


NEAR_ZERO = aa.Scenario("near zero", gains=(1.0, 0.0), good=(0.05, 0.98, 0.05))


def test_requests_are_good_by_chance_around_their_share():
    ledger = aa.Simulated(replace(NEAR_ZERO, cliff=0.0), 1)
    shares = [ledger._share(0) for _ in range(4000)]
    assert fmean(shares) == pytest.approx(0.05, rel=0.05)
    assert stdev(shares) == pytest.approx((0.05 * 0.95 / 40) ** 0.5, rel=0.05)
    scattered = aa.Simulated(replace(NEAR_ZERO, cliff=1.0), 1)
    assert stdev(scattered._share(0) for _ in range(4000)) > 1.5 * stdev(shares)


def test_what_a_finalist_gains_is_in_good_requests():
    assert NEAR_ZERO.gain(1) == pytest.approx(2 * 0.98 / 0.05 - 1)
    assert NEAR_ZERO.gain(2) == 0
    assert CALM.gain(1) == 0


def test_a_factor_over_next_to_nothing_is_found_at_the_first_look():
    ours, before = aa.count(NEAR_ZERO, 20, 8, 0)
    assert ours.found == before.studies == 20
    assert ours.measured.count(9) >= 16, "three rounds of three; by logarithms, every second one"
    assert before.found < ours.found


def test_hardly_any_winner_is_false_where_hardly_a_request_is_good():
    flat = replace(NEAR_ZERO, name="flat near zero", gains=(0.0, 0.0), good=(0.05,) * 3)
    ours, _ = aa.count(flat, 200, 8, 0)
    assert ours.found == 0
    assert ours.false <= 10, "5%, where 2.5% are designed for"


def test_a_large_gain_is_found_in_few_measurements():
    ours, before = aa.count(replace(CALM, name="large", gains=(9.0, 0.0)), 20, 8, 0)
    assert ours.found == 20
    assert ours.false == 0
    assert set(ours.measured) == {9}, "three rounds of three"
    assert before.found == 20


def test_small_gains_are_found_more_often_than_by_the_rule_of_before():
    ours, before = aa.count(replace(CALM, name="+10%", gains=(0.1, 0.0)), 100, 8, 0)
    assert ours.found > before.found + 20


def test_hardly_any_winner_is_false():
    ours, _ = aa.count(CALM, 300, 8, 0)
    assert ours.found == 0
    assert ours.false <= 15, "5%, where 2.5% are designed for"
    assert ours.figures()["false"][0] == ours.false / 300


def test_a_winner_that_gains_next_to_nothing_is_false():
    tiny = replace(CALM, noise=0.001, gains=(0.01,))
    count = aa.Count()
    count.add(tiny, aa.Found(winner=1, measured=9))
    count.add(tiny, aa.Found(winner=None, measured=9))
    assert (count.false, count.found, count.studies) == (1, 0, 2)


def test_a_table_holds_a_row_a_scenario():
    ours, before = aa.count(CALM, 2, 8, 0)
    row = {"scenario": {"name": "calm"}, "ours": ours.figures(), "before": before.figures()}
    *_, last = aa.table([row], "false").splitlines()
    assert last.startswith("| calm | 0.0 (0.0 to 84.2) | ")
