"""What the items of a category say about a limit."""

import random
from dataclasses import replace

import pytest
from contracts.quality_rows import AGREEMENT, KL, LEAK, LENGTH, RATING, TOP1, changed, judged


def test_many_unchanged_items_support_the_limit():
    figure = judged(changed(0, 0, 60, wrong=20))
    assert figure.outcome == "pass"
    assert figure.because == "no item broke of 60: at most 4.31 points worse, 5 points allowed"
    assert figure.items_needed is None
    assert (figure.candidate, figure.baseline) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


def test_few_unchanged_items_are_not_enough_evidence():
    figure = judged(changed(0, 0, 12))
    assert figure.outcome == "unclear"
    assert figure.because == (
        "no item broke of 12, but 12 items cannot rule out a loss of 5 points: 52 needed"
    )
    assert figure.items_needed == 52


def test_many_broken_items_fail_with_what_is_sure_of_the_loss():
    figure = judged(changed(24, 1, 60))
    assert figure.outcome == "fail"
    assert figure.because.startswith("24 of 60 items broke (40%), 1 mended: at least ")
    assert figure.because.endswith(" points worse, 5 points allowed")
    assert (figure.broken, figure.mended) == (24, 1)
    assert figure.change.estimate == pytest.approx(-23 / 60)
    assert figure.change.low < -23 / 60 < figure.change.high < -0.05


def test_loss_that_the_second_run_shows_too_is_no_failure():
    values = changed(24, 0, 60)
    alone = judged(values, again=[1.0] * 60)
    shared = judged(values, again=[ours for ours, _ in values])
    assert alone.outcome == "fail"
    assert alone.floor.estimate == 0
    assert shared.outcome == "unclear"
    assert "second run" in shared.because
    assert shared.floor.estimate == pytest.approx(-0.4)


def test_baseline_that_gets_nothing_right_is_not_informative():
    figure = judged([(0.0, 0.0)] * 80)
    assert figure.outcome == "unclear"
    assert figure.because.startswith("not informative: the baseline itself scores 0% on 80 items")
    assert figure.items_needed is None


def test_a_baseline_that_leaks_all_has_nothing_to_lose_either():
    assert judged([(1.0, 1.0)] * 80, LEAK).because.startswith("not informative")
    assert judged([(0.0, 0.0)] * 80, LEAK).outcome == "pass"


def test_a_share_that_should_be_low_fails_when_it_rises():
    figure = judged([(1.0, 0.0)] * 30 + [(0.0, 0.0)] * 30, LEAK)
    assert figure.outcome == "fail"
    assert figure.broken == 30
    assert figure.change.estimate == pytest.approx(0.5)
    assert 0.05 < figure.change.low < 0.5 < figure.change.high


def test_graded_scores_tell_their_means():
    figure = judged([(0.25, 0.75), (0.3, 0.75)] * 20)
    assert figure.outcome == "fail"
    assert figure.because.startswith("from 75% to 27.5% over 40 items: at least ")


def test_bounds_give_the_scale_of_a_metric():
    figure = judged([(6.0, 9.0)] * 40 + [(9.5, 9.0)] * 3, RATING)
    assert figure.outcome == "fail"
    assert figure.change.estimate == pytest.approx((-3 * 40 + 0.5 * 3) / 43)
    assert figure.change.high < -1
    assert figure.because.endswith("1 marks allowed")


def test_unbounded_changes_are_judged_in_their_own_unit():
    rng = random.Random(3)
    same = [(rng.gauss(0, 0.1), 0.0) for _ in range(30)]
    longer = [(ours + 0.5, theirs) for ours, theirs in same]
    assert judged(same, LENGTH).outcome == "pass"
    figure = judged(longer, LENGTH)
    assert figure.outcome == "fail"
    assert "nats worse, 0.1 nats allowed" in figure.because
    assert (figure.broken, figure.mended) == (0, 0)


def test_a_few_equal_lengths_do_not_prove_that_lengths_stay():
    few = judged([(3.5, 3.5)] * 3, LENGTH)
    assert few.outcome == "unclear"
    assert few.because.endswith(f"{few.items_needed} needed")
    assert judged([(3.5, 3.5)] * (few.items_needed - 1), LENGTH).outcome == "unclear"
    assert judged([(3.5, 3.5)] * few.items_needed, LENGTH).outcome == "pass"


def test_a_few_equal_longer_answers_do_not_prove_that_lengths_grew():
    assert judged([(3.7, 3.5)] * 3, LENGTH).outcome == "unclear"
    assert judged([(4.5, 3.5)] * 40, LENGTH).outcome == "fail"


@pytest.mark.parametrize(("spread", "outcome"), [(0.002, "pass"), (None, "unclear")])
def test_how_much_a_few_equal_levels_prove_is_for_the_metric_to_say(spread, outcome):
    metric = replace(KL, spread=spread)
    assert judged([(0.001, 0.0)] * 4, metric).outcome == outcome


@pytest.mark.parametrize(
    ("values", "again", "outcome", "says"),
    [
        ([0.001, 0.002, 0.001, 0.003], None, "pass", "surely within"),
        ([1.1, 0.9, 1.0, 1.2], None, "fail", "surely beyond"),
        ([0.001, 0.05, 0.001, 0.02], None, "unclear", "needed"),
        ([0.03, 0.04, 0.05, 0.04], [0.04, 0.05, 0.04, 0.03], "unclear", "differs from itself by"),
        ([1.1, 0.9, 1.0, 1.2], [0.04, 0.05, 0.04, 0.03], "fail", "surely beyond"),
        ([0.001, 0.002], None, "unclear", "too few"),
    ],
)
def test_levels_are_judged_against_limit_and_floor(values, again, outcome, says):
    figure = judged([(value, 0.0) for value in values], KL, again=again)
    assert figure.outcome == outcome
    assert says in figure.because
    assert (figure.floor is None) is (again is None)


def test_a_level_that_should_be_high_is_judged_from_below():
    good = judged([(share, 1.0) for share in (0.97, 0.96, 0.98, 0.97)], TOP1)
    bad = judged([(share, 1.0) for share in (0.5, 0.52, 0.48, 0.5)], TOP1)
    assert good.outcome == "pass"
    assert good.because.startswith("97% over 4 items: surely within 9")
    assert good.because.endswith("90% allowed")
    assert bad.outcome == "fail"
    assert bad.change.high < -0.4


@pytest.mark.parametrize(("items", "outcome"), [(4, "unclear"), (30, "pass")])
def test_a_few_answers_that_agree_do_not_prove_that_most_do(items, outcome):
    assert judged([(1.0, 1.0)] * items, AGREEMENT).outcome == outcome


def test_as_many_answers_as_are_said_to_be_needed_do_prove_that_most_agree():
    few = [(0.9, 1.0), (1.0, 1.0), (0.8, 1.0), (0.95, 1.0)]
    needed = judged(few, AGREEMENT).items_needed
    assert needed > 4
    more = (few * needed)[:needed]
    assert judged(more, AGREEMENT).outcome == "pass"
    assert judged([(0.5, 1.0)] * 3 + [(0.9, 1.0)], AGREEMENT).items_needed is None


def test_answers_that_agree_as_little_as_the_baselines_own_do_not_fail():
    rng = random.Random(2)
    low = [(rng.uniform(0.2, 0.4), 1.0) for _ in range(30)]
    own = [rng.uniform(0.2, 0.4) for _ in range(30)]
    assert judged(low, AGREEMENT, again=[0.97] * 30).outcome == "fail"
    assert judged(low, AGREEMENT, again=own).outcome == "unclear"
