"""A whole search: what is measured, in which order, within which budget, and what is decided."""

import json

import pytest
from contracts.landscape import (
    FEW_POINTS,
    GOAL,
    ONLY_BLOCK_SIZE,
    RIGHT,
    WRONG,
    failed,
    workload,
)

from kvtune.autotune.ladder import UNLIKELY_TRIALS
from kvtune.autotune.limits import Budget, Sampler
from kvtune.types import FailureClass, Goal, Harm, Outcome, OutputHealth, Slo, Status

SMALL_BLOCKS_WIN = {32: 2.0, 64: 1.5, 128: 1.0, 256: 0.5}


def by_block_size(arguments):
    return SMALL_BLOCKS_WIN[arguments.get("block-size", 128)]


def test_the_stock_defaults_are_trial_0(tuning_on, landscape):
    tuning_on(base={"enforce-eager": True}).run()
    first = landscape.asked[0]
    assert first.trial.number == 0
    assert first.arguments == {"enforce-eager": True}


def test_the_best_settings_win_and_the_decision_is_kept(tuning_on, landscape, store):
    landscape.goodput = by_block_size
    tuning = tuning_on(base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS)
    decision = tuning.run()
    assert decision.outcome is Outcome.WINNER
    winner = store.trial(tuning.study, decision.recommended).trial
    assert winner.stack.arguments == {"block-size": 32}
    assert decision.gain_ratio.estimate == pytest.approx(2.0)
    assert decision.figures["goodput_requests_per_s"].repeats == 3
    assert store.decision(tuning.study) == decision
    assert not tuning.interrupted


@pytest.mark.parametrize("trials", [1, 4, 9])
def test_the_trial_budget_counts_the_defaults_and_not_the_confirmation(
    trials, tuning_on, landscape
):
    budget = Budget(trials=trials, finalists=2, confirm_rounds=2)
    tuning_on(base=FEW_POINTS, budget=budget).run()
    assert len(landscape.points) == trials
    assert len(landscape.confirmed) == {1: 0, 4: 6, 9: 6}[trials], "alone they are not confirmed"


@pytest.mark.parametrize("trial_s", [2, 3, 7, 19, 21, 30, 99])
def test_the_time_budget_is_kept_whatever_a_trial_takes(trial_s, tuning_on, landscape):
    landscape.trial_s = trial_s
    decision = tuning_on(base=FEW_POINTS, budget=Budget(trials=500, time_s=40.0)).run()
    assert landscape.now_s <= max(40, trial_s), "the defaults alone may take longer"
    assert decision.recommended == 0


def test_a_search_whose_time_is_spent_says_so(tuning_on, landscape):
    landscape.trial_s = 10
    tuning = tuning_on(budget=Budget(trials=500, time_s=200.0))
    tuning.run()
    assert len(landscape.points) == 5, "150 s are kept for five rounds of three"
    assert len(landscape.confirmed) == 9, "and three are enough where there is no noise"
    assert any("the time budget is spent after 5 trials" in n for n in tuning.reporter.notes)


def test_a_search_with_time_for_the_defaults_alone_says_what_more_takes(tuning_on, landscape):
    landscape.trial_s = 60
    tuning = tuning_on(budget=Budget(trials=500, time_s=200.0))
    tuning.run()
    assert len(landscape.points) == 1
    said = next(note for note in tuning.reporter.notes if "the time budget is spent" in note)
    # A trial of 60 s, and at least three rounds of it and the defaults.
    assert "another trial and its confirmation take about 420 s, and 140 s are left" in said


def test_where_nothing_meets_the_goal_it_says_what_limits_the_closest_trial(tuning_on, landscape):
    landscape.ttft_s = lambda arguments: 2.0 if arguments else 3.0
    decision = tuning_on(budget=Budget(trials=3)).run()
    assert decision.outcome is Outcome.INFEASIBLE
    assert decision.recommended != 0
    # There is no verdict on the run of a landscape, which would be told too.
    assert "what limits it is p95 ttft <= 1s, which it exceeds by 100%" in decision.reasons


def test_without_time_to_confirm_the_decision_says_that_nothing_was(tuning_on, landscape):
    landscape.trial_s = 400
    decision = tuning_on(budget=Budget(trials=5, time_s=300.0)).run()
    assert landscape.confirmed == []
    assert any("nothing was confirmed" in reason for reason in decision.reasons)


def test_no_point_is_measured_twice_and_a_space_that_is_used_up_ends_the_search(
    tuning_on, landscape
):
    tuning = tuning_on(
        base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS, budget=Budget(trials=30, confirm_rounds=2)
    )
    tuning.run()
    seen = [json.dumps(arguments, sort_keys=True) for arguments in landscape.points]
    assert len(seen) == len(set(seen)) == 4
    assert "every configuration of this space was measured or cannot run" in tuning.reporter.notes


def test_a_space_without_knobs_measures_the_defaults_and_says_why(tuning_on, landscape):
    tuning = tuning_on(base={**ONLY_BLOCK_SIZE, "block-size": 64}, max_harm=Harm.LOSSLESS)
    decision = tuning.run()
    assert len(landscape.points) == 1
    assert decision.outcome is Outcome.KEEP_BASELINE
    (note,) = [said for said in tuning.reporter.notes if said.startswith("nothing can")]
    assert "nothing can be searched here" in note
    assert "block-size is fixed by --engine-args" in note


def test_the_sampler_learns_where_it_is_good(tuning_on, landscape):
    landscape.goodput = by_block_size
    tuning_on(budget=Budget(trials=20, confirm_rounds=2), max_harm=Harm.LOSSLESS).run()
    later = landscape.points[8:]
    small = sum(arguments.get("block-size") == 32 for arguments in later)
    assert small > len(later) / 2, "blind luck gives a quarter"


def test_a_trial_that_fails_is_kept_with_its_reason_and_never_wins(tuning_on, landscape, store):
    landscape.goodput = lambda arguments: (
        failed() if arguments.get("block-size") == 32 else by_block_size(arguments)
    )
    tuning = tuning_on(base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS)
    decision = tuning.run()
    (crashed,) = [
        row for row in store.trials(tuning.study) if row.trial.stack.arguments == {"block-size": 32}
    ]
    assert crashed.measurement.status is Status.FAILED
    assert crashed.measurement.failure.failure is FailureClass.CRASH_UNDER_LOAD
    assert crashed.measurement.failure.log_excerpt == "the decisive line"
    assert crashed.measurement.metrics == {}
    assert decision.rejected[crashed.number] == "crash-under-load: it died"
    assert crashed.number not in landscape.confirmed
    winner = store.trial(tuning.study, decision.recommended).trial
    assert winner.stack.arguments == {"block-size": 64}


def test_of_settings_that_tie_the_simplest_is_recommended(tuning_on, landscape, store):
    """Watermarks change nothing here, so block-size alone must win."""
    landscape.goodput = by_block_size
    tuning = tuning_on(
        base=FEW_POINTS,
        max_harm=Harm.LOSSLESS,
        budget=Budget(trials=30, finalists=5, confirm_rounds=2),
        sampler=Sampler.TPE,
    )
    decision = tuning.run()
    assert len(landscape.points) == 20, "four block sizes, five watermarks"
    assert store.trial(tuning.study, decision.recommended).trial.stack.arguments == {
        "block-size": 32
    }
    assert len(decision.ties) == 4


def test_when_the_defaults_fail_others_can_still_win_and_they_are_not_tried_again(
    tuning_on, landscape, store
):
    landscape.goodput = lambda arguments: (
        by_block_size(arguments)
        if "block-size" in arguments
        else failed(FailureClass.DOES_NOT_FIT, "too small")
    )
    tuning = tuning_on(base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS)
    decision = tuning.run()
    assert decision.outcome is Outcome.WINNER
    assert decision.baseline_figures == {}
    assert "the stock defaults cannot start" in decision.reasons[0]
    assert decision.rejected[0] == "does-not-fit: too small"
    assert 0 not in landscape.confirmed
    assert store.trial(tuning.study, 0).measurement.failure.message == "too small"


def test_when_everything_fails_nothing_is_recommended_and_every_reason_is_there(
    tuning_on, landscape
):
    landscape.goodput = lambda arguments: failed(FailureClass.DOES_NOT_FIT, "too small")
    decision = tuning_on(base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS).run()
    assert decision.outcome is Outcome.NOTHING_MEASURED
    assert decision.recommended is None
    assert decision.rejected == dict.fromkeys(range(4), "does-not-fit: too small")
    assert landscape.confirmed == []


def test_when_nothing_meets_the_goal_the_closest_point_is_named(tuning_on, landscape, store):
    landscape.ttft_s = lambda arguments: 1.0 + arguments.get("block-size", 128) / 100
    landscape.goodput = by_block_size
    tuning = tuning_on(base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS)
    decision = tuning.run()
    assert decision.outcome is Outcome.INFEASIBLE
    assert any("p95 ttft <= 1s is missed: measured 1.32 s" in why for why in decision.reasons)
    closest = store.trial(tuning.study, decision.recommended).trial
    assert closest.stack.arguments == {"block-size": 32}


def test_what_policies_may_ask_about_has_the_rule_of_host_memory(tuning_on, landscape):
    tuning = tuning_on(base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS, max_host_bytes=0)
    tuning.run()
    assert tuning.exploration.context.max_host_bytes == 0


def test_what_the_engine_is_known_to_refuse_is_not_launched(tuning_on, landscape):
    base = {**ONLY_BLOCK_SIZE, "max-num-seqs": 9, "max-num-batched-tokens": 8}
    tuning = tuning_on(base=base, max_harm=Harm.LOSSLESS)
    tuning.run()
    assert landscape.points == [base], "the defaults are measured whatever is thought of them"
    refused = [note for note in tuning.reporter.notes if note.startswith("tried only in ")]
    assert len(refused) == 1, "what is refused for the same reason is told once"
    assert all("max-num-batched-tokens below max-num-seqs" in note for note in refused)


def test_what_the_sampler_proposes_and_the_engine_refuses_is_not_launched(tuning_on, landscape):
    base = {**ONLY_BLOCK_SIZE, "max-num-seqs": 9, "max-num-batched-tokens": 8}
    tuning = tuning_on(base=base, max_harm=Harm.LOSSLESS, sampler=Sampler.TPE)
    tuning.run()
    assert landscape.points == [base]
    refused = [note for note in tuning.reporter.notes if note.startswith("not launched, ")]
    assert len(refused) == 1


# --- the confirmation -------------------------------------------------------------------------


def test_the_confirmation_is_interleaved_with_turning_order_on_held_out_requests(
    tuning_on, landscape, store
):
    landscape.goodput = by_block_size
    load = workload()
    tuning = tuning_on(base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS, on=load)
    tuning.run()
    again = [one for one in landscape.asked if one.trial.parent is not None]
    first, second = landscape.confirmed[1:3]
    assert landscape.confirmed == [0, first, second, first, second, 0, second, 0, first]
    assert all(one.requests == load.heldout for one in again)
    assert all(one.requests == load.requests for one in landscape.asked[:4])
    seeds = [one.trial.seed for one in again]
    assert seeds == sorted(seeds)
    assert len(set(seeds)) == 3, "each round has prompts of its own"
    assert 0 not in seeds, "and none that the search has seen"
    stored = [row for row in store.trials(tuning.study) if row.trial.parent is not None]
    assert [row.trial.parent for row in stored] == landscape.confirmed
    assert all(len(row.measurement.metrics["ttft_p95_s"]) == 1 for row in stored)


def test_trials_are_confirmed_beside_the_defaults_even_when_those_looked_best(tuning_on, landscape):
    landscape.goodput = lambda arguments: 0.5 if "block-size" in arguments else 1.0
    decision = tuning_on(base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS).run()
    assert len(set(landscape.confirmed)) == 3
    assert decision.outcome is Outcome.KEEP_BASELINE


def test_a_finalist_that_fails_when_it_is_confirmed_is_out_with_its_reason(tuning_on, landscape):
    def goodput(arguments):
        is_confirmation = len(landscape.points) == 4
        if is_confirmation and arguments.get("block-size") == 32:
            return failed(message="died later")
        return by_block_size(arguments)

    landscape.goodput = goodput
    tuning = tuning_on(
        base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS, budget=Budget(trials=9, finalists=2)
    )
    decision = tuning.run()
    (fell,) = [
        entry.trial.number
        for entry in tuning.ledger.entries
        if entry.trial.stack.arguments == {"block-size": 32} and entry.trial.parent is None
    ]
    assert decision.outcome is Outcome.WINNER
    assert decision.recommended != fell
    assert decision.rejected[fell] == "crash-under-load: died later"


def test_a_lossless_finalist_that_answers_garbage_when_it_is_confirmed_is_out(
    tuning_on, landscape, store
):
    def outputs(trial):
        garbage = trial.parent and trial.stack.arguments == {"block-size": 32}
        return OutputHealth(
            answers=64, text_prompts=64, long_prompts=64, looping=50 if garbage else 1
        )

    landscape.goodput, landscape.outputs = by_block_size, outputs
    tuning = tuning_on(
        base=ONLY_BLOCK_SIZE, budget=Budget(trials=4, finalists=2), max_harm=Harm.LOSSLESS
    )
    decision = tuning.run()
    winner = store.trial(tuning.study, decision.recommended).trial
    assert winner.stack.arguments == {"block-size": 64}
    said = "at the confirmation, 50 of 64 answers to the workload's own requests are looping"
    assert [reason.startswith(said) for reason in decision.rejected.values()].count(True) == 1


def test_without_held_out_requests_those_of_the_search_confirm(tuning_on, landscape):
    load = workload(tuned=8, heldout=0)
    tuning_on(on=load, budget=Budget(trials=2, confirm_rounds=2)).run()
    assert landscape.confirmed
    assert all(one.requests == load.requests for one in landscape.asked)


# --- harm -------------------------------------------------------------------------------------


def harmful(landscape):
    return [arguments for arguments in landscape.points if "kv-cache-dtype" in arguments]


def test_lossless_settings_that_meet_the_goal_leave_fp8_alone(tuning_on, landscape):
    landscape.goodput = lambda arguments: 9.0 if "kv-cache-dtype" in arguments else 1.0
    tuning_on(base=FEW_POINTS, budget=Budget(trials=12, confirm_rounds=2)).run()
    assert harmful(landscape) == []


@pytest.mark.parametrize(
    ("sampler", "first_least"), [(Sampler.TPE, 7), (Sampler.AUTO, UNLIKELY_TRIALS)]
)
def test_fp8_is_unlocked_when_lossless_settings_miss_the_goal(
    sampler, first_least, tuning_on, landscape, store
):
    landscape.ttft_s = lambda arguments: 0.5 if "kv-cache-dtype" in arguments else 2.0
    tuning = tuning_on(budget=Budget(trials=12, confirm_rounds=2), sampler=sampler)
    decision = tuning.run()
    first = landscape.points.index(harmful(landscape)[0])
    assert first >= first_least, "lossless levers get their share first"
    assert store.trial(tuning.study, decision.recommended).trial.stack.harm is Harm.NEAR_LOSSLESS


def test_fp8_is_unlocked_as_soon_as_there_is_nothing_lossless_left(tuning_on, landscape):
    landscape.ttft_s = lambda arguments: 0.5 if "kv-cache-dtype" in arguments else 2.0
    tuning_on(base=ONLY_BLOCK_SIZE, budget=Budget(trials=9, confirm_rounds=2)).run()
    assert all("kv-cache-dtype" not in arguments for arguments in landscape.points[:4])
    assert harmful(landscape)


def test_fp8_is_never_tried_when_the_search_is_lossless(tuning_on, landscape):
    landscape.ttft_s = lambda arguments: 2.0
    tuning_on(
        base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS, budget=Budget(trials=20, confirm_rounds=2)
    ).run()
    assert harmful(landscape) == []


def test_harm_can_be_explored_from_the_start_and_the_canary_is_asked_of_it_and_the_defaults(
    tuning_on, landscape
):
    budget = Budget(trials=12, confirm_rounds=2)
    tuning_on(base=FEW_POINTS, explore_lossy=True, budget=budget).run()
    assert harmful(landscape)
    for one in landscape.asked:
        is_point = one.trial.parent is None
        may_harm = one.trial.number == 0 or "kv-cache-dtype" in one.arguments
        assert one.canary is (is_point and may_harm)


@pytest.mark.parametrize(
    ("stock", "ours", "reason"),
    [
        (RIGHT, WRONG, "the baseline found '7194' in a long prompt"),
        (WRONG, RIGHT, "the baseline itself answers no canary prompt"),
        (RIGHT, None, "there is nothing to compare its answers with"),
    ],
)
def test_settings_whose_answers_are_not_vouched_for_never_win(
    stock, ours, reason, tuning_on, landscape
):
    landscape.goodput = lambda arguments: 99.0 if "kv-cache-dtype" in arguments else 1.0
    landscape.canary = lambda arguments: ours if "kv-cache-dtype" in arguments else stock
    budget = Budget(trials=8, confirm_rounds=2)
    tuning = tuning_on(base=ONLY_BLOCK_SIZE, explore_lossy=True, budget=budget)
    decision = tuning.run()
    out = {
        entry.trial.number
        for entry in tuning.ledger.entries
        if entry.trial.stack.harm is not Harm.LOSSLESS
    }
    assert out
    assert decision.recommended not in out
    assert not out & set(landscape.confirmed)
    assert all(reason in decision.rejected[number] for number in out)


def test_a_goal_of_throughput_is_decided_by_throughput(tuning_on, landscape, monkeypatch):
    goal = Goal(objective="throughput", slos=(Slo(metric="ttft", statistic="p95", limit_s=1.0),))
    landscape.metric = "output_tokens_per_s"
    landscape.goodput = by_block_size
    decision = tuning_on(goal=goal, base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS).run()
    assert decision.outcome is Outcome.WINNER
    assert "throughput is above" in decision.reasons[0]
    assert goal != GOAL
