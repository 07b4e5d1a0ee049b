"""What each step of harm buys, over what, for which loss of answers, and how sure that is."""

import math

import pytest
from contracts.landscape import GOAL, ONLY_BLOCK_SIZE
from contracts.studies import figure, measured, report, stack

from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import Budget
from kvtune.autotune.prices import Offer, Worth, buys_text, cost_texts, offers_of, price_list
from kvtune.autotune.report.study_prices import prices
from kvtune.autotune.report.study_view import study_view
from kvtune.profilers.statistics import t_quantile
from kvtune.types import Harm, Interval, Price, Trial

LOSSLESS, NEAR, LOSSY = Harm


def offer(number, harm, value, worth=Worth.MEETS, asked=None):
    settings = "stock defaults" if number == 0 else f"setting {number}"
    return Offer(number, harm, settings, value, worth, asked)


STOCK = offer(0, LOSSLESS, 2.0)


def listed(*offers, confirmed=None, **more):
    return price_list(GOAL, [STOCK, *offers], confirmed or {}, **more)


def rounds(*values):
    return measured(1.0).model_copy(update={"metrics": {"goodput_requests_per_s": values}})


def test_each_rung_is_beside_the_best_below_it():
    found = listed(
        offer(1, LOSSLESS, 3.0),
        offer(2, LOSSLESS, 4.0),
        offer(3, NEAR, 3.5),
        offer(4, LOSSY, 6.0),
    )
    assert [(p.rung, p.trial, p.over) for p in found] == [
        ("L0", 0, None),
        ("L1", 2, 0),
        ("L2", 3, 2),
        ("L3", 4, 2),  # L2 did not get further than L1.
    ]
    assert [p.gain and p.gain.estimate for p in found] == [None, 2.0, 0.875, 1.5]


def test_what_may_be_shipped_speaks_for_its_rung_before_what_is_faster():
    found = listed(
        offer(1, NEAR, 9.0, Worth.OUT),
        offer(2, NEAR, 8.0, Worth.MISSES),
        offer(3, NEAR, 7.0, Worth.UNPROVED),
        offer(4, NEAR, 6.0),
    )
    assert found[-1].trial == 4
    assert (
        listed(offer(1, NEAR, 9.0, Worth.OUT), offer(3, NEAR, 7.0, Worth.UNPROVED))[-1].trial == 3
    )


def test_a_rung_that_lost_too_much_is_no_ground_for_the_next():
    found = listed(offer(1, NEAR, 9.0, Worth.OUT), offer(2, LOSSY, 4.0))
    assert [(p.trial, p.over) for p in found] == [(0, None), (1, 0), (2, 0)]


def test_of_equals_the_one_that_was_confirmed_speaks():
    confirmed = {0: rounds(1.0, 1.1), 1: rounds(2.0, 2.1)}
    found = listed(offer(1, NEAR, 4.0), offer(2, NEAR, 4.5), confirmed=confirmed)
    assert found[-1].trial == 1


def test_a_gain_of_common_rounds_has_their_interval():
    stock, ours = (1.0, 1.2, 1.1), (2.0, 2.3, 2.5)
    found = listed(offer(1, NEAR, 9.0), confirmed={0: rounds(*stock), 1: rounds(*ours)})
    gain = found[-1].gain
    logs = [math.log(b / a) for a, b in zip(stock, ours, strict=True)]
    mean = sum(logs) / 3
    # Of two configurations the two-way layout is the paired t test.
    half = t_quantile(0.975, 2) * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    assert gain.estimate == pytest.approx(math.exp(mean))
    assert (gain.low, gain.high) == pytest.approx((math.exp(mean - half), math.exp(mean + half)))
    assert gain.repeats == 3


def test_a_gain_that_noise_leaves_without_bounds_was_not_measured_apart():
    confirmed = {0: rounds(0.0, 0.1, 0.0), 1: rounds(0.0, 0.3, 0.0)}
    gain = (found := listed(offer(1, NEAR, 9.0), confirmed=confirmed)[-1]).gain
    assert (gain.estimate, gain.low, gain.high) == (pytest.approx(3.0), None, None)
    assert buys_text(found) == "+200% over stock"


def test_the_gain_that_was_decided_by_is_the_one_that_is_shown():
    decided = Interval(estimate=1.9, low=1.5, high=2.3, unit="ratio")
    found = listed(offer(1, NEAR, 4.0), offer(2, LOSSY, 5.0), decided={1: decided, 2: decided})
    assert found[1].gain == decided
    assert found[2].gain != decided, "that one is over stock"


def test_there_is_no_ratio_to_nothing():
    found = price_list(GOAL, [offer(0, LOSSLESS, 0.0), offer(1, NEAR, 4.0)], {})
    assert found[1].gain is None
    assert "no ratio, stock has 0" in found[1].says


NEEDLE = figure(
    suite="needle",
    metric="recall",
    unit="share",
    better="higher",
    kind="difference",
    limit=0.05,
    change=Interval(estimate=-0.02, low=-0.04, high=0.0, unit="points"),
)
WORST = NEEDLE.model_copy(update={"category": "4k", "change": NEEDLE.change})
MILD = figure(category="0-512", limit=0.9)


@pytest.mark.parametrize(
    ("outcome", "size", "proof"),
    [
        ("pass", "standard", "proved"),
        ("pass", "screen", "not proven"),
        ("unclear", "standard", "not proven"),
        ("fail", "standard", "too much"),
    ],
)
def test_what_it_costs_is_told_in_figures_and_whether_it_is_proved(outcome, size, proof):
    asked = report(outcome, figure(), NEEDLE, MILD, WORST).model_copy(update={"size": size})
    found = listed(offer(1, NEAR, 2.36, asked=asked), size="standard")[-1]
    assert cost_texts(found) == [
        "fidelity/all kl +0.01 (0.008 to 0.012) nats",
        "needle/all recall -2 (-4 to 0) points",
        "needle/4k recall -2 (-4 to 0) points",
        proof,
    ]
    assert found.says == (
        "L2, trial 1 (setting 1): goodput +18% (measured apart) over stock; costs "
        + ", ".join(cost_texts(found))
    )


def test_answers_that_nobody_asked_for_are_no_proof():
    assert cost_texts(listed(offer(1, NEAR, 3.0))[-1]) == ["not asked"]


def test_lossless_settings_cost_nothing_whatever_was_asked():
    asked = report("unclear", figure())
    found = listed(offer(1, LOSSLESS, 3.0, asked=asked))[-1]
    assert cost_texts(found) == ["nothing: answers are computed as before"]
    assert found.costs == {}
    assert buys_text(found) == "+50% (measured apart) over stock"


def test_a_price_is_stored_as_it_is():
    (_, found) = listed(offer(1, NEAR, 3.0, asked=report("pass", figure())))
    assert Price.model_validate_json(found.model_dump_json()) == found


class Gate:
    """Speaks against trial 3, and has not seen proof of trial 2."""

    def objection(self, entry):
        return "against" if entry.trial.number == 3 else None

    def unproved(self, entry):
        return "unproved" if entry.trial.number == 2 else None


def entry(number, arguments, found):
    trial = Trial(number=number, stack=stack(arguments), base_arguments={}, repeats=1, seed=0)
    return Entry(trial, found, reused=False)


def test_trials_are_worth_what_the_gates_and_the_goal_say():
    fp8 = {"kv-cache-dtype": "fp8"}
    points = [
        entry(0, {}, measured(2.0)),
        entry(1, {"a": 1}, measured(3.0, ttft_s=9.0)),
        entry(2, fp8, measured(4.0)),
        entry(3, fp8, measured(5.0)),
        entry(4, {"a": 2}, measured(6.0)),
        entry(5, {"a": 3}, measured(7.0)),
    ]
    confirmed = {0: measured(2.0), 4: measured(6.0), 5: measured(7.0, ttft_s=9.0)}
    rejected = {4: "broken answers at the confirmation", 2: "not among the best"}
    found = offers_of(GOAL, points, Gate(), {2: report("unclear", figure())}, confirmed, rejected)
    assert [(one.number, one.worth) for one in found] == [
        (0, Worth.MEETS),
        (1, Worth.MISSES),
        (2, Worth.UNPROVED),
        (3, Worth.OUT),
        (4, Worth.OUT),
        (5, Worth.MISSES),
    ]
    assert [one.rung for one in found] == ["L0", "L1", "L2", "L2", "L1", "L1"]
    assert found[2].report is not None


def test_a_search_that_tried_harm_keeps_its_prices_and_its_page_shows_the_same(
    tuning_on, landscape
):
    """Its model sees no use in lossless settings; one is measured all the same, for its price."""
    landscape.goodput = lambda arguments: 2.0 if "kv-cache-dtype" in arguments else 1.0
    budget = Budget(trials=8, confirm_rounds=2)
    tuning = tuning_on(explore_lossy=True, base=ONLY_BLOCK_SIZE, budget=budget)
    kept = tuning.run().prices
    assert [price.rung for price in kept] == ["L0", "L1", "L2"]
    assert kept[2].gain.estimate == pytest.approx(2.0, rel=0.01)
    assert kept[2].proof == "not asked"
    assert tuning.store.decision(tuning.study).prices == kept
    assert prices(study_view(tuning.store, tuning.study)) == kept


def test_a_lossless_search_has_no_price_list(tuning_on, landscape):
    tuning = tuning_on(base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS)
    assert tuning.run().prices == ()
