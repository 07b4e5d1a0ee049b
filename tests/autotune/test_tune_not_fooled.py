"""What a search does about figures that only look like some: failures, twins, goals without any."""

import optuna
import pytest
from contracts.landscape import ONLY_BLOCK_SIZE, failed

from kvtune.autotune.limits import Budget
from kvtune.errors import BadGoal
from kvtune.types import (
    EffectiveConfig,
    FailureClass,
    Goal,
    Harm,
    Measurement,
    Outcome,
    Slo,
    Status,
)

GOODPUT = {32: 2.0, 64: 1.5, 128: 1.0, 256: 0.5}
AS_128 = {256: 128}
"""What an engine makes of a block size that it does not like."""


@pytest.fixture
def search(tuning_on, landscape):
    landscape.goodput = lambda arguments: GOODPUT[arguments.get("block-size", 128)]

    def make(**options):
        return tuning_on(**{"base": ONLY_BLOCK_SIZE, "max_harm": Harm.LOSSLESS, **options})

    return make


# --- the baseline ------------------------------------------------------------------------------


def fail_times(landscape, times, failure):
    """Let the stock defaults fail so often."""
    works = landscape.goodput

    def goodput(arguments):
        tried = sum("block-size" not in one for one in landscape.points)
        if "block-size" in arguments or tried > times:
            return works(arguments)
        return failed(failure, "it went wrong")

    landscape.goodput = goodput


def test_a_baseline_that_failed_once_is_tried_again_and_the_search_goes_on(
    search, landscape, store
):
    fail_times(landscape, 1, FailureClass.CRASH_UNDER_LOAD)
    tuning = search()
    decision = tuning.run()
    assert decision.outcome is Outcome.WINNER
    assert decision.baseline == 0
    assert landscape.points[:2] == [ONLY_BLOCK_SIZE, ONLY_BLOCK_SIZE]
    assert len(landscape.points) == 5
    row = store.trial(tuning.study, 0)
    assert row.measurement.status is Status.OK
    assert len(row.attempts) == 2


COMES_AGAIN = {
    FailureClass.BAD_ARGUMENT,
    FailureClass.DOES_NOT_FIT,
    FailureClass.ENGINE_MISSING,
    FailureClass.WRONG_MODEL,
}
MENDABLE = {FailureClass.DOES_NOT_FIT, FailureClass.OUT_OF_MEMORY}


@pytest.mark.parametrize("failure", FailureClass)
def test_a_baseline_that_keeps_failing_ends_the_search_unless_less_memory_may_mend_it(
    failure, search, landscape
):
    fail_times(landscape, 9, failure)
    tuning = search()
    decision = tuning.run()
    tries = 1 if failure in COMES_AGAIN else 2
    assert landscape.points[:tries] == [ONLY_BLOCK_SIZE] * tries
    assert len(landscape.points) == tries + (3 if failure in MENDABLE else 0)
    if failure in MENDABLE:
        assert decision.recommended is not None
        return
    assert decision.outcome is Outcome.NOTHING_MEASURED
    cause = f"{failure}: it went wrong"
    assert f"the stock defaults: {cause}" in decision.reasons
    assert [note for note in tuning.reporter.notes if note.endswith(cause)]


def test_a_baseline_is_not_tried_again_beyond_the_time_budget(search, landscape):
    fail_times(landscape, 9, FailureClass.HANG_UNDER_LOAD)
    search(budget=Budget(trials=6, time_s=1.5)).run()
    assert len(landscape.points) == 1, "a try takes a second"


# --- goals without a value ----------------------------------------------------------------------


def goal(metric, objective="goodput"):
    return Goal(objective=objective, slos=(Slo(metric=metric, statistic="p95", limit_s=1.0),))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (goal("itl"), "p95 itl <= 1s cannot be measured.* no answer came in more than one piece"),
        (goal("tpot"), "p95 tpot <= 1s cannot be measured.* no answer has more than one token"),
        (goal("ttft", "throughput"), "throughput cannot be measured.* without a value of output_"),
    ],
)
def test_a_goal_without_a_value_is_refused_once_the_baseline_shows_it(
    wanted, message, search, landscape
):
    for _ in range(2):
        with pytest.raises(BadGoal, match=message) as refused:
            search(goal=wanted).run()
        assert refused.value.fix
    assert len(landscape.asked) == 1, "and no trial is spent on it, nor another baseline"


def test_a_baseline_that_fails_says_so_and_not_that_the_goal_has_no_value(search, landscape):
    fail_times(landscape, 9, FailureClass.CRASH_UNDER_LOAD)
    assert search(goal=goal("itl")).run().outcome is Outcome.NOTHING_MEASURED


# --- twins --------------------------------------------------------------------------------------


@pytest.fixture
def clamped(landscape):
    """An engine that runs blocks of 256 as blocks of 128, its own; there they seem to do better."""

    def effective(arguments):
        size = arguments.get("block-size", 128)
        return EffectiveConfig(block_size_tokens=AS_128.get(size, size), start_kind="cold")

    landscape.effective = effective


def number_of(tuning, size):
    return next(
        entry.trial.number
        for entry in tuning.ledger.entries
        if entry.trial.stack.arguments == {"block-size": size}
    )


def test_what_runs_as_another_trial_is_said_once_and_no_finalist(search, landscape, clamped):
    landscape.goodput = lambda arguments: {256: 9.0}.get(arguments.get("block-size"), 1.0)
    tuning = search(budget=Budget(trials=9, finalists=3, confirm_rounds=2))
    decision = tuning.run()
    twin = number_of(tuning, 256)
    assert [note for note in tuning.reporter.notes if "exactly as" in note] == [
        f"the engine runs trial {twin} exactly as trial 0: it counts as a repeat of that one"
    ]
    assert set(landscape.confirmed) == {0, number_of(tuning, 32), number_of(tuning, 64)}
    assert decision.rejected[twin] == "runs exactly as trial 0, whose repeat it is"
    assert decision.recommended == 0
    assert len(landscape.points) == 4, "a launch is a launch to the budget"


def test_a_luckier_repeat_of_the_defaults_wins_nothing_where_nothing_was_confirmed(
    search, landscape, clamped
):
    landscape.goodput = lambda arguments: {256: 9.0}.get(arguments.get("block-size"), 1.0)
    tuning = search(budget=Budget(trials=4, confirm_rounds=0))
    decision = tuning.run()
    assert decision.outcome is Outcome.NO_CLEAR_WINNER
    assert decision.recommended != number_of(tuning, 256)
    assert decision.baseline_figures["goodput_requests_per_s"].estimate == 1.0


def test_the_sampler_is_told_what_twins_gave_together(
    search, landscape, clamped, store, optuna_tables
):
    tuning = search(budget=Budget(trials=4, confirm_rounds=2))
    tuning.run()
    study = optuna.load_study(study_name=tuning.study.name, storage=store.url)
    row = store.trial(tuning.study, number_of(tuning, 256))
    assert study.trials[row.optuna_number].value == pytest.approx((1.0 + 0.5) / 2)
    alone = store.trial(tuning.study, number_of(tuning, 32))
    assert study.trials[alone.optuna_number].value == pytest.approx(2.0)


def test_a_trial_that_crashes_is_no_repeat_of_the_one_that_it_would_run_as(
    search, landscape, clamped
):
    def goodput(arguments):
        if arguments.get("block-size") != 256:
            return 1.0
        crash = failed(message="it died of its own")
        return Measurement.model_validate(
            {**crash.model_dump(), "effective": landscape.effective(arguments)}
        )

    landscape.goodput = goodput
    tuning = search(budget=Budget(trials=4, confirm_rounds=2))
    decision = tuning.run()
    assert decision.rejected[number_of(tuning, 256)] == "crash-under-load: it died of its own"
