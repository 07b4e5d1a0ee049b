"""What the store says of a study, put together."""

import pytest
from contracts.studies import add, add_round, failed, measured, new_study, of, report

from kvtune.autotune.report.study_view import Standing, basis, seconds_of, study_view
from kvtune.store.database import open_store
from kvtune.store.rows import AttemptRow, AttemptStatus
from kvtune.types import Measurement, Profile, Status, Verdict

FP8 = {"kv-cache-dtype": "fp8"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with open_store(tmp_path_factory.mktemp("store") / "s.db") as opened:
        yield opened


def standings(view):
    return {point.number: point.standing for point in view.points}


def test_each_trial_stands_as_its_measurement_says(store):
    view = of(
        store,
        ({}, measured(2.0)),
        ({"a": 1}, measured(3.0, ttft_s=0.9)),
        ({"a": 2}, failed(message="no room")),
        ({"a": 3}, Measurement(status=Status.STOPPED)),
        ({"a": 4}, None),
        ({"a": 5}, Measurement(status=Status.OK)),
    )
    assert standings(view) == {
        0: Standing.MET,
        1: Standing.MISSED,
        2: Standing.FAILED,
        3: Standing.STOPPED,
        4: Standing.RUNNING,
        5: Standing.FAILED,
    }
    assert view.point(1).why == "p95 ttft <= 800ms: 900 ms"
    assert view.point(2).why == "crash-under-load: no room"
    assert [point.number for point in view.measured] == [0, 1]


def test_a_trial_that_was_given_up_early_has_no_value_and_says_why(store):
    cut = measured(9.0, status=Status.CUT, share=0.45, cut="cut after 45% of its requests")
    view = of(store, ({}, measured(2.0)), ({"a": 1}, cut))
    point = view.point(1)
    assert (point.standing, point.value) == (Standing.CUT, None)
    assert point.why == "cut after 45% of its requests"
    assert [point.number for point in view.measured] == [0]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_objective_that_is_no_number_is_a_failure(store, value):
    point = of(store, ({}, measured(value))).point(0)
    assert (point.standing, point.value) == (Standing.FAILED, None)
    assert point.why == f"its goodput is {value}"


def test_a_limit_whose_metric_is_missing_is_not_met(store):
    found = measured(2.0, metrics={"goodput_requests_per_s": (2.0,)})
    assert of(store, ({}, found)).point(0).why == "p95 ttft <= 800ms: not measured"


@pytest.mark.parametrize(
    ("outcome", "standing"),
    [
        ("pass", Standing.MET),
        ("unclear", Standing.UNPROVED),
        ("fail", Standing.OUT),
    ],
)
def test_answers_decide_where_a_trial_that_may_change_them_stands(store, outcome, standing):
    view = of(store, ({}, measured(2.0)), (FP8, measured(3.0)))
    store.save_quality_report(report(outcome), study=view.study, trial=1)
    assert study_view(store, view.study).point(1).standing is standing


@pytest.mark.parametrize(
    ("size", "standing"), [("screen", Standing.MET), ("standard", Standing.UNPROVED)]
)
def test_a_screen_proves_answers_only_where_no_more_is_asked(store, size, standing):
    view = of(store, ({}, measured(2.0)), (FP8, measured(3.0)))
    store.save_quality_report(report("pass"), study=view.study, trial=1)
    rules = {"quality": {"limits": [], "size": size}}
    study = view.study.model_copy(update={"settings": rules})
    assert study_view(store, study).point(1).standing is standing


def test_the_newest_report_of_a_trial_counts(store):
    view = of(store, ({}, measured(2.0)), (FP8, measured(3.0)))
    for outcome in ("unclear", "pass"):
        store.save_quality_report(report(outcome), study=view.study, trial=1)
    assert study_view(store, view.study).point(1).standing is Standing.MET


def test_a_trial_that_lost_the_canary_may_not_be_shipped(store):
    wrong = measured(3.0, canary_answers=("no idea",) * 3)
    point = of(store, ({}, measured(2.0)), (FP8, wrong)).point(1)
    assert point.standing is Standing.OUT
    assert "7194" in point.why
    assert point.is_measured


def test_rounds_are_numbered_by_their_seeds_and_are_no_points(store):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0))
    for number, seed in ((1, 8), (2, 9)):
        add_round(store, study, number, 0, {}, 2.0, of_round=seed)
    view = study_view(store, study)
    assert [point.number for point in view.points] == [0]
    assert [(each.number, each.trial) for each in view.rounds] == [(1, 0), (2, 0)]
    assert view.repeats == ()


def test_what_is_measured_again_outside_of_the_confirmation_is_a_repeat(store):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0))
    add(store, study, 1, {}, measured(2.1), parent=0, seed=100, rung=8)
    view = study_view(store, study)
    assert view.rounds == ()
    assert [row.number for row in view.repeats] == [1]
    assert [row.number for row in view.rows] == [0, 1]


def test_the_profile_is_that_of_the_stock_load(store):
    def a_profile(found, summary, model="some/model"):
        return Profile(
            model=model,
            endpoint_url="",
            device=None,
            engine=None,
            effective=None,
            fingerprint=None,
            metrics=found.metrics,
            counters={},
            window_s=1.0,
            verdict=Verdict(
                bottleneck="kv-capacity", confidence="high", evidence=(), summary=summary
            ),
        )

    ours = measured(2.125)
    view = of(store, ({}, ours))
    for found, summary, more in (
        (measured(2.5), "another load", {}),
        (ours, "another model", {"model": "other"}),
        (ours, "ours", {}),
    ):
        store.save_profile(a_profile(found, summary, **more))
    assert study_view(store, view.study).profile.profile.verdict.summary == "ours"


def test_a_study_without_trials_is_seen(store):
    view = study_view(store, new_study(store))
    assert (view.points, view.rounds, view.decision, view.config) == ((), (), None, None)
    assert view.stock is None


def test_the_basis_says_how_many_how_cold_and_which_engine(store):
    view = of(store, ({}, measured(2.0)))
    found = [measured(2.0), measured(2.0, cache="warm", requests_per_repeat=12), failed()]
    assert basis(view, found, "trial") == (
        "n = 2 trials of 12 or 40 requests each; prefix cache cold (1) and warm (1) at the start; "
        "servers started warm; vllm 0.11.0."
    )
    assert basis(view, [], "trial") == "n = 0 trials; vllm 0.11.0."


@pytest.mark.parametrize(
    ("status", "ended_at", "seconds"),
    [
        (AttemptStatus.FINISHED, "2026-11-30T10:01:30.500000+00:00", 90.5),
        (AttemptStatus.REUSED, "2026-11-30T10:01:30.500000+00:00", 0.0),
        (AttemptStatus.RUNNING, None, 0.0),
    ],
)
def test_only_attempts_that_measured_took_time(status, ended_at, seconds):
    attempt = AttemptRow(
        id="a",
        study_id="s",
        number=0,
        status=status,
        host="h",
        pid=1,
        process="p",
        started_at="2026-11-30T10:00:00.000000+00:00",
        ended_at=ended_at,
    )
    assert seconds_of(attempt) == seconds
