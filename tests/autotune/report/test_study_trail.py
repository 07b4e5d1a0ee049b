"""The steps of a study, in the order in which they happened."""

from datetime import datetime

import pytest
from contracts.store_values import a_config
from contracts.studies import add, add_round, failed, measured, new_study, of, report

from kvtune.autotune.report.study_trail import trail
from kvtune.autotune.report.study_view import study_view
from kvtune.store.database import open_store
from kvtune.types import Decision, Forecast, Interval, Measurement, Outcome, Status

FP8 = {"kv-cache-dtype": "fp8"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with open_store(tmp_path_factory.mktemp("store") / "s.db") as opened:
        yield opened


def kinds(view):
    return [step.kind for step in trail(view)]


def says(view, kind):
    return [step.says for step in trail(view) if step.kind == kind]


def test_a_whole_search_is_told_from_its_goal_to_its_files(store):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0))
    add(store, study, 1, {"block-size": 32}, measured(4.0))
    add_round(store, study, 2, 0, {}, 2.0, of_round=1)
    add_round(store, study, 3, 1, {"block-size": 32}, 4.0, of_round=1)
    decision = Decision(
        outcome=Outcome.WINNER, recommended=1, baseline=0, reasons=("beyond noise",)
    )
    store.save_decision(study, decision)
    config = a_config(study.name).model_copy(update={"trial": 1})
    store.save_emitted(config, "shell", "deploy", {"serve.sh": "abcdef0123456789"})
    view = study_view(store, study)
    assert kinds(view) == [
        *("begin", "trial", "trial", "finalists", "confirm", "confirm", "decide", "emit"),
    ]
    assert says(view, "trial")[1] == "block-size 32: goodput 4 requests/s, meets the goal"
    assert says(view, "confirm") == [
        "round 1, stock: goodput 2 requests/s",
        "round 1, trial 1: goodput 4 requests/s",
    ]
    assert says(view, "decide") == ["winner: trial 1; beyond noise"]
    assert says(view, "emit") == ["shell written to deploy: serve.sh (SHA-256 abcdef012345)"]


def test_times_grow_from_the_beginning(store):
    view = of(store, ({}, measured(2.0)), ({"a": 1}, measured(2.0)), ({"a": 2}, failed()))
    times = [step.at_s for step in trail(view)]
    assert times[0] == 0
    assert times == sorted(times)


def test_failures_and_interrupts_are_steps_with_their_cause(store):
    view = of(
        store,
        ({}, measured(2.0)),
        ({"a": 1}, failed(message="no room")),
        ({"a": 2}, Measurement(status=Status.STOPPED)),
        ({"a": 3}, None),
    )
    assert says(view, "trial")[1:] == [
        "a 1: failed: crash-under-load: no room",
        "a 2: stopped before there was an outcome",
        "a 3: begun, and has not ended",
    ]


def test_an_interrupted_trial_that_is_tried_again_is_two_steps(store):
    study = new_study(store)
    add(store, study, 0, {}, Measurement(status=Status.STOPPED))
    add(store, study, 0, {}, measured(2.0))
    assert says(study_view(store, study), "trial") == [
        "stock defaults: stopped before there was an outcome",
        "stock defaults: goodput 2 requests/s, meets the goal",
    ]


@pytest.mark.parametrize(
    ("ttft_s", "stood"),
    [
        (0.9, "0 of 2 lossless trials met the goal by then (the goal was missed so far)"),
        (
            0.5,
            "2 of 2 lossless trials met the goal by then (asked for, or nothing lossless was left)",
        ),
    ],
)
def test_the_unlock_stands_before_the_first_trial_that_may_change_answers(store, ttft_s, stood):
    view = of(
        store,
        ({}, measured(2.0, ttft_s=ttft_s)),
        ({"a": 1}, measured(3.0, ttft_s=ttft_s)),
        (FP8, measured(4.0)),
        ({**FP8, "a": 1}, measured(5.0)),
    )
    steps = trail(view)
    assert [(step.kind, step.trial, step.rung) for step in steps[3:]] == [
        ("unlock", 2, "L2"),
        ("trial", 2, "L2"),
        ("trial", 3, "L2"),
    ]
    assert steps[3].says.endswith(stood)


def test_without_such_a_trial_nothing_was_unlocked(store):
    assert "unlock" not in kinds(of(store, ({}, measured(2.0)), ({"a": 1}, measured(2.0))))


def test_what_answers_are_worth_is_a_step_of_its_own(store):
    view = of(store, ({}, measured(2.0)), (FP8, measured(3.0)))
    store.save_quality_report(report("fail"), study=view.study, trial=1)
    view = study_view(store, view.study)
    assert says(view, "trial")[1] == "kv-cache-dtype fp8: goodput 3 requests/s"
    assert says(view, "quality")[0].startswith(
        "answers beside stock's fail, screen size: worse than allowed: fidelity/all kl"
    )


def test_a_forecast_stands_before_the_trial_that_measured_it(store):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0))
    told = Forecast(
        lever="block-size 32",
        arguments={"block-size": 32},
        metric="goodput_requests_per_s",
        unit="requests/s",
        baseline=2.0,
        predicted=3.0,
        ratio=Interval(estimate=1.5, low=1.2, high=1.8, unit="ratio"),
        reason="less is wasted",
    )
    store.save_forecasts(study.name, [told])
    add(store, study, 1, {"block-size": 32}, measured(4.0))
    store.score_forecasts(
        study.name,
        {"block-size": 32},
        {"goodput_requests_per_s": (4.0, 2.0)},
        study=study.name,
        trial=1,
    )
    view = study_view(store, study)
    assert kinds(view) == ["begin", "trial", "forecast", "trial"]
    assert says(view, "forecast") == ["block-size 32: goodput +50%"]


def test_a_study_that_has_only_begun_has_its_goal(store):
    assert kinds(study_view(store, new_study(store))) == ["begin"]


# --- what the search itself said ------------------------------------------------------------------


def test_what_was_kept_stands_in_the_place_of_what_is_worked_out(store):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0, ttft_s=0.9))
    store.save_step(study, "verdict", "bound by kv-capacity (high confidence): the pool is full")
    add(store, study, 1, {"a": 1}, measured(3.0, ttft_s=0.9))
    store.save_step(study, "unlock", "asked for by name")
    add(store, study, 2, FP8, measured(4.0))
    store.save_step(study, "note", "trial 2 is out: worse answers", trial=2)
    store.save_step(study, "stop", "all 3 trials of the budget are used")
    steps = trail(study_view(store, study))
    assert [(step.kind, step.trial, step.rung) for step in steps[1:]] == [
        ("trial", 0, "L0"),
        ("verdict", 0, "L0"),
        ("trial", 1, "L1"),
        ("unlock", 2, "L2"),
        ("trial", 2, "L2"),
        ("note", 2, "L2"),
        ("stop", None, ""),
    ]
    assert steps[4].says == "asked for by name"


def test_an_unlock_that_no_trial_followed_is_told_all_the_same(store):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0))
    store.save_step(study, "unlock", "nothing lossless is left")
    (step,) = [step for step in trail(study_view(store, study)) if step.kind == "unlock"]
    assert (step.trial, step.rung) == (None, "")


def test_steps_that_only_a_newer_kvtune_knows_are_left_out(store):
    study = new_study(store)
    store.save_step(study, "surprise", "of a newer kvtune")
    assert kinds(study_view(store, study)) == ["begin"]


def test_the_decision_has_its_own_time(store):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0))
    store.save_decision(study, Decision(outcome=Outcome.KEEP_BASELINE, recommended=0, baseline=0))
    row = store.decision_row(study)
    (step,) = [step for step in trail(study_view(store, study)) if step.kind == "decide"]
    began = datetime.fromisoformat(study.created_at)
    assert step.at_s == (datetime.fromisoformat(row.created_at) - began).total_seconds() > 0
