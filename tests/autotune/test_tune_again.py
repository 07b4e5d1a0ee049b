"""Going on: interrupts keep what was measured, and nothing that is known is measured again."""

import pytest
from contracts.landscape import FEW_POINTS, failed, run_of

from kvtune.autotune.tune import Budget
from kvtune.errors import BadInput
from kvtune.types import FailureClass, Harm, Outcome, PolicyStack, Status

pytestmark = pytest.mark.usefixtures("optuna_tables")

BUDGET = Budget(trials=4, finalists=1, confirm_rounds=2)
"""Four trials and 2 x 2 confirmations: eight measurements."""

FULL = 8


def settings_help(arguments):
    return 1.0 + len(arguments)


@pytest.fixture
def search(tuning_on, landscape):
    landscape.goodput = settings_help
    return lambda budget=BUDGET, base=FEW_POINTS, **rules: tuning_on(
        budget=budget, base=base, max_harm=Harm.LOSSLESS, **rules
    )


def arguments_of(landscape):
    return [one.arguments for one in landscape.asked]


def test_the_same_command_again_measures_nothing_and_decides_the_same(search, landscape):
    first = search().run()
    assert len(landscape.asked) == FULL
    again = search()
    assert again.run() == first
    assert len(landscape.asked) == FULL
    assert all(reused for _, _, reused in again.reporter.trials)


def test_a_larger_budget_goes_on_in_the_same_study(search, landscape, store):
    search().run()
    known = arguments_of(landscape)
    larger = search(budget=Budget(trials=6, finalists=1, confirm_rounds=2))
    larger.run()
    assert [row.name for row in store.studies()] == [larger.study.name]
    new = landscape.asked[FULL:]
    assert len([one for one in new if one.trial.parent is None]) == 2
    assert all(one.arguments not in known for one in new if one.trial.parent is None)
    confirmed = [one.trial.parent for one in new if one.trial.parent is not None]
    if set(confirmed) - {0}:
        assert confirmed.count(0) == 2, "a new finalist is interleaved with the defaults of today"
    else:
        assert confirmed == [], "complete rounds are taken as they are"


def test_more_rounds_of_confirmation_add_to_those_that_are_there(search, landscape):
    search().run()
    decision = search(budget=Budget(trials=4, finalists=1, confirm_rounds=3)).run()
    assert len(landscape.asked) == FULL + 2
    assert decision.figures["ttft_p95_s"].repeats == 3


@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 7])
def test_an_interrupt_at_any_point_keeps_what_was_measured_and_can_go_on(
    at, search, landscape, store
):
    landscape.interrupt_at = at
    stopped = search()
    decision = stopped.run()
    assert stopped.interrupted
    assert store.decision(stopped.study) == decision
    assert (decision.outcome is Outcome.NOTHING_MEASURED) is (at == 0)
    assert any("nothing was confirmed" in reason for reason in decision.reasons)
    rows = store.trials(stopped.study)
    assert [row.measured for row in rows] == [True] * at + [False]
    (attempt,) = rows[-1].attempts
    assert attempt.status == "stopped"
    assert rows[-1].measurement.status is Status.STOPPED

    landscape.interrupt_at = None
    onward = search()
    whole = onward.run()
    assert not onward.interrupted
    half_a_round = at in (5, 7)
    assert len(landscape.asked) == FULL + half_a_round, "only half a round is measured twice"
    again = landscape.asked[at - half_a_round].arguments
    assert again == rows[-1 - half_a_round].trial.arguments, "it begins where it stopped"
    assert len(store.trials(onward.study)) == FULL
    assert whole.outcome is Outcome.WINNER
    assert [len(row.attempts) for row in store.trials(onward.study)].count(2) == 1 + half_a_round


def test_a_trial_is_planned_under_the_same_number_after_an_interrupt(search, landscape, store):
    landscape.interrupt_at = 2
    stopped = search()
    stopped.run()
    landscape.interrupt_at = None
    search().run()
    row = store.trial(stopped.study, 2)
    assert [attempt.status for attempt in row.attempts] == ["stopped", "finished"]
    assert row.measurement.status is Status.OK


def test_an_attempt_that_ends_in_an_error_is_stored_as_stopped(search, landscape, store):
    def goodput(arguments):
        raise BadInput("no request fits")

    landscape.goodput = goodput
    tuning = search()
    with pytest.raises(BadInput, match="no request fits"):
        tuning.run()
    (row,) = store.trials(tuning.study)
    assert row.attempts[0].status == "stopped"


def test_attempts_of_a_process_that_is_gone_are_closed(search, landscape, store, monkeypatch):
    tuning = search()
    trial = tuning.ledger._trial(PolicyStack(), repeats=1, seed=0, parent=None)
    monkeypatch.setattr("kvtune.store.attempts.process_identity", lambda pid: "one that is gone")
    store.begin_attempt(
        tuning.study, trial, tuning.ledger._key(trial, tuning.tuning_set, canary=True)
    )
    monkeypatch.undo()
    search().run()
    attempts = store.trial(tuning.study, 0).attempts
    assert [attempt.status for attempt in attempts] == ["stopped", "finished"]


# --- what other studies know --------------------------------------------------------------------


def test_what_another_study_measured_is_not_measured_again(search, landscape, store):
    search().run()
    other = search(name="other")
    other.run()
    assert store.trial("other", 0).attempts[0].status == "reused"
    stock = [one for one in landscape.asked if one.arguments == FEW_POINTS]
    assert stock[1:] == [one for one in stock if one.trial.parent == 0]


def test_remeasure_measures_what_another_study_knows(search, landscape, store):
    search(budget=Budget(trials=1)).run()
    assert len(landscape.asked) == 1
    search(budget=Budget(trials=1), name="other", remeasure=True).run()
    assert len(landscape.asked) == 2
    assert store.trial("other", 0).attempts[0].status == "finished"


def test_the_defaults_of_a_study_are_asked_the_canary_although_another_knows_the_point(
    search, landscape
):
    """There the point was a lossless trial, which nobody asks the canary."""
    search(budget=Budget(trials=8, finalists=1, confirm_rounds=2)).run()
    known = next(arguments for arguments in landscape.points if arguments != FEW_POINTS)
    before = len(landscape.asked)
    search(budget=Budget(trials=1, confirm_rounds=2), base=known).run()
    first = landscape.asked[before]
    assert first.arguments == known
    assert first.canary


def test_a_failure_is_not_tried_again_unless_asked_for(search, landscape):
    landscape.goodput = lambda arguments: failed(FailureClass.DOES_NOT_FIT)
    search(budget=Budget(trials=1)).run()
    search(budget=Budget(trials=1)).run()
    assert len(landscape.asked) == 1
    landscape.goodput = settings_help
    decision = search(budget=Budget(trials=1), remeasure=True).run()
    assert decision.outcome is Outcome.KEEP_BASELINE
    assert len(landscape.asked) == 1 + 1


def test_a_crash_of_the_defaults_is_tried_again_by_the_next_command(search, landscape):
    landscape.goodput = lambda arguments: failed(FailureClass.CRASH_UNDER_LOAD)
    search(budget=Budget(trials=1)).run()
    landscape.goodput = settings_help
    assert search(budget=Budget(trials=1)).run().outcome is Outcome.KEEP_BASELINE


def test_the_raw_runs_of_every_repeat_are_kept(search, landscape, store):
    tuning = search(budget=Budget(trials=1, confirm_rounds=2, repeats=2))
    tuning.run()
    assert landscape.asked[0].trial.repeats == 2
    assert store.records(tuning.study, 0) == [run_of().records] * 2
    assert len(store.trial(tuning.study, 0).measurement.metrics["ttft_p95_s"]) == 2


@pytest.mark.parametrize(
    "other", [{"seed": 7}, {"budget": Budget(trials=4, repeats=2)}], ids=["seed", "repeats"]
)
def test_another_seed_or_number_of_repeats_is_another_study(other, search, landscape):
    assert search().study.name != search(**other).study.name


def test_repeats_on_one_server_each_prove_nothing_without_a_confirmation(search, landscape):
    landscape.goodput = lambda arguments: 3.0 if arguments.get("block-size") == 32 else 2.0
    budget = Budget(trials=6, finalists=1, repeats=4)
    tuning = search(budget=budget)
    landscape.interrupt_at = 6
    decision = tuning.run()
    assert tuning.interrupted
    assert landscape.confirmed == []
    assert decision.outcome is Outcome.NO_CLEAR_WINNER
    assert decision.gain_ratio.low is None
