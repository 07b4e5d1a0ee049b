"""What a store remembers."""

import io
import os
from datetime import datetime

import pytest
from contracts.store_fixtures import StoreFixtures
from contracts.store_values import (
    DEVICE,
    GOAL,
    a_config,
    a_decision,
    a_forecast,
    a_key,
    a_profile,
    a_quality_report,
    a_run,
    a_study,
    a_trial,
    failed,
    measure,
    ok,
    some_ceilings,
)
from sqlalchemy import select

from kvtune.errors import BadInput, NotFound, StoreError
from kvtune.store import AttemptStatus, open_store, schema
from kvtune.types import FailureClass, Goal, Measurement, Outcome, Status


class HistoryContract(StoreFixtures):
    """Studies, attempts, what is known, what is handed over, and references."""

    # --- studies ---

    def test_study_is_read_back_as_it_was_created(self, store, url):
        study = a_study(store)
        with open_store(url) as again:
            assert again.study("chat") == study
            assert again.study("cha") is None
        assert study.settings == {"requests": 200, "rate": 2.5, "nested": {"a": [1, None]}}
        assert study.fingerprint.reusable_prefix_share == {16: 0.5, 512: 0.0}

    def test_second_study_of_a_name_is_refused(self, store):
        a_study(store)
        with pytest.raises(BadInput, match="'chat' exists already"):
            a_study(store)
        assert len(store.studies()) == 1

    @pytest.mark.parametrize("name", ["", " a", "a ", "a/b", "latest", "a\nb", "a\0b"])
    def test_name_that_could_not_be_referred_to_is_refused(self, store, name):
        with pytest.raises(BadInput, match="cannot be the name of a study"):
            a_study(store, name)

    def test_unknown_study_is_not_found(self, store):
        for use in (
            lambda: store.trials("nope"),
            lambda: store.begin_attempt("nope", a_trial(), "k"),
            lambda: store.decision("nope"),
            lambda: store.export(io.StringIO(), "nope"),
        ):
            with pytest.raises(NotFound, match="nope"):
                use()

    def test_summary_counts_trials_and_names_the_best(self, store):
        study = a_study(store)
        measure(store, study, a_trial(0), ok(goodput=2.0))
        measure(store, study, a_trial(1, 32), ok(goodput=3.0))
        measure(store, study, a_trial(2, 64), failed())
        measure(store, study, a_trial(3, 128), Measurement(status=Status.STOPPED))
        measure(store, study, a_trial(4, 256), Measurement(status=Status.INFEASIBLE))
        store.begin_attempt(study, a_trial(5, 512), "k")
        store.save_decision(study, a_decision())
        a_study(store, "empty", Goal(objective="throughput"))
        empty, summary = store.studies()
        assert summary.trials == {
            "ok": 2,
            "failed": 1,
            "stopped": 1,
            "infeasible": 1,
            "running": 1,
        }
        assert (summary.best_trial, summary.best_objective) == (1, 3.25)
        assert summary.objective_metric == "goodput_requests_per_s"
        assert (summary.outcome, summary.recommended) == (Outcome.WINNER, 3)
        assert summary.goal == GOAL
        assert (empty.name, empty.trials, empty.best_objective) == ("empty", {}, None)
        assert empty.objective_metric == "output_tokens_per_s"

    # --- attempts and measurements ---

    def test_measurement_is_read_back_with_every_raw_record(self, store, url):
        study = a_study(store)
        trial = a_trial(0)
        attempt = store.begin_attempt(study, trial, a_key(trial), optuna_number=4, rung=1)
        runs = [a_run(), a_run(requests=1, seed=1)]
        store.finish_attempt(attempt, ok(), runs, figures={"told": 2.25})
        with open_store(url) as again:
            row = again.trial("chat", 0)
            assert again.trials(study) == [row]
            assert row.measurement == ok()
            assert row.trial == trial
            assert row.key == a_key(trial)
            assert (row.optuna_number, row.rung) == (4, 1)
            assert row.figures == {"told": 2.25}
            assert again.records("chat", 0) == [run.records for run in runs]
            assert again.runs_of(row.key) == runs
        assert [a.id for a in row.attempts] == [attempt]
        assert row.attempts[0].status is AttemptStatus.FINISHED
        assert row.attempts[0].pid == os.getpid()

    def test_request_counts_can_be_queried_without_unpacking(self, store):
        measure(store, a_study(store), a_trial(), ok())
        with store.read() as connection:
            counts = connection.execute(
                select(schema.runs.c.requests, schema.runs.c.failed_requests)
            )
            assert list(counts) == [(3, 1), (3, 1)]

    def test_failure_is_stored_with_its_class_and_log(self, store):
        study = a_study(store)
        measure(store, study, a_trial(), failed())
        assert store.trial(study, 0).measurement == failed()
        with store.read() as connection:
            row = connection.execute(select(schema.failures)).one()
        assert (row.failure, row.log_excerpt) == (
            "crash-under-load",
            "CUDA error\nkilled by signal 9",
        )

    def test_nul_in_a_log_does_not_lose_the_failure(self, store):
        study = a_study(store)
        why = failed().failure.model_copy(update={"log_excerpt": "a\0b"})
        measure(store, study, a_trial(), failed().model_copy(update={"failure": why}))
        assert store.trial(study, 0).measurement.failure.log_excerpt == "a\ufffdb"

    def test_trial_without_a_measurement_has_none(self, store):
        study = a_study(store)
        store.begin_attempt(study, a_trial(), "k")
        row = store.trial(study, 0)
        assert row.measurement is None
        assert not row.measured
        assert row.attempts[0].status is AttemptStatus.RUNNING
        assert store.records(study, 0) == []

    def test_stopped_attempt_does_not_hide_a_measurement(self, store):
        study = a_study(store)
        measure(store, study, a_trial(), Measurement(status=Status.STOPPED))
        assert not store.trial(study, 0).measured
        measure(store, study, a_trial(), ok())
        measure(store, study, a_trial(), Measurement(status=Status.STOPPED))
        row = store.trial(study, 0)
        assert row.measurement == ok()
        assert [a.status.value for a in row.attempts] == ["stopped", "finished", "stopped"]

    def test_retried_trial_reports_its_newest_measurement(self, store):
        study = a_study(store)
        measure(store, study, a_trial(), failed())
        measure(store, study, a_trial(), ok(5.0))
        assert store.trial(study, 0).measurement == ok(5.0)

    def test_another_point_under_a_used_number_is_refused(self, store):
        study = a_study(store)
        measure(store, study, a_trial(0), ok())
        with pytest.raises(StoreError, match=r"trial 0 .* another point"):
            store.begin_attempt(study, a_trial(0, block_size=64), "k")
        with pytest.raises(StoreError, match=r"trial 0 .* another point"):
            store.begin_attempt(study, a_trial(0), "another key")

    def test_attempt_cannot_be_finished_twice(self, store):
        study = a_study(store)
        attempt = measure(store, study, a_trial(), ok())
        with pytest.raises(StoreError, match="finished before"):
            store.finish_attempt(attempt, ok(9.0), [])
        with pytest.raises(StoreError, match="no attempt 'nope'"):
            store.finish_attempt("nope", ok(9.0), [])
        assert store.trial(study, 0).measurement == ok()

    def test_missing_trial_is_not_found(self, store):
        with pytest.raises(NotFound, match="'chat' has no trial 7"):
            store.trial(a_study(store), 7)

    # --- what is known already ---

    def test_measured_point_is_known_in_every_study(self, store):
        trial = a_trial()
        assert store.known(a_key(trial)) is None
        assert store.runs_of(a_key(trial)) == []
        measure(store, a_study(store), trial, ok(1.0))
        measure(store, a_study(store, "other"), trial, ok(2.0))
        assert store.known(a_key(trial)) == ok(2.0)
        assert store.known(a_key(a_trial(block_size=999))) is None

    @pytest.mark.parametrize(
        ("measurement", "is_known"),
        [
            (failed(FailureClass.BAD_ARGUMENT), True),
            (failed(FailureClass.DOES_NOT_FIT), True),
            (failed(FailureClass.CRASH_UNDER_LOAD), False),
            (failed(FailureClass.OUT_OF_MEMORY), False),
            (Measurement(status=Status.STOPPED), False),
            (Measurement(status=Status.INFEASIBLE), False),
        ],
    )
    def test_only_failures_that_would_come_again_are_known(self, store, measurement, is_known):
        measure(store, a_study(store), a_trial(), measurement)
        assert store.known(a_key(a_trial())) == (measurement if is_known else None)

    def test_later_crash_does_not_hide_what_is_known(self, store):
        study = a_study(store)
        measure(store, study, a_trial(), ok())
        measure(store, study, a_trial(), failed())
        assert store.known(a_key(a_trial())) == ok()

    def test_known_point_is_reused_without_copying_its_records(self, store):
        trial = a_trial(5)
        measure(store, a_study(store), a_trial(0), ok())
        other = a_study(store, "other")
        assert store.reuse(other, trial, a_key(trial), optuna_number=5) == ok()
        row = store.trial(other, 5)
        assert row.measurement == ok()
        assert row.attempts[0].status is AttemptStatus.REUSED
        assert store.records(other, 5) == store.records("chat", 0)
        with store.read() as connection:
            assert len(connection.execute(select(schema.measurements.c.id)).all()) == 1

    def test_unknown_point_is_not_reused(self, store):
        study = a_study(store)
        assert store.reuse(study, a_trial(), "k") is None
        assert store.trials(study) == []

    # --- handover ---

    def test_newest_decision_counts(self, store):
        study = a_study(store)
        assert store.decision(study) is None
        store.save_decision(study, a_decision(Outcome.NO_CLEAR_WINNER))
        store.save_decision(study, a_decision())
        assert store.decision("chat") == a_decision()
        row = store.decision_row("chat")
        assert row.decision == a_decision()
        assert datetime.fromisoformat(row.created_at) > datetime.fromisoformat(study.created_at)

    def test_steps_are_kept_in_the_order_of_time(self, store, url):
        study = a_study(store)
        assert store.steps(study) == []
        store.save_step(study, "rung", "L1")
        store.save_step("chat", "unlock", "the goal\0 was missed", trial=3)
        store.save_step(a_study(store, "other"), "note", "about another study")
        with open_store(url) as again:
            first, second = again.steps("chat")
        assert (first.step, first.says, first.trial) == ("rung", "L1", None)
        assert (second.step, second.says, second.trial) == (
            "unlock",
            "the goal\ufffd was missed",
            3,
        )
        assert study.created_at < first.created_at < second.created_at

    def test_studies_beside_are_of_the_same_model_engine_and_device(self, store):
        study = a_study(store)
        about = (
            *("goal", "model", "engine", "device", "workload_name", "fingerprint"),
            *("base_arguments", "settings"),
        )
        engine = study.engine

        def another(name, **changes):
            return store.create_study(name, **{n: getattr(study, n) for n in about} | changes)

        newer = another("newer", engine=engine.model_copy(update={"version": "99"}))
        another("other model", model="some/other")
        another("other engine", engine=engine.model_copy(update={"name": "another"}))
        another("other device", device=study.device.model_copy(update={"count": 4}))
        same = another("same")
        assert store.studies_beside(study) == [same, newer]

    def test_profiles_are_kept_newest_first(self, store):
        first = store.save_profile(a_profile("one"))
        second = store.save_profile(a_profile("two"))
        assert [row.id for row in store.profiles()] == [second, first]
        assert store.profile(first[:12]).profile == a_profile("one")
        for start in ("zz", "", "%"):
            with pytest.raises(NotFound, match="an id that begins with"):
                store.profile(start)

    def test_emitted_config_is_kept_with_its_files(self, store):
        study = a_study(store)
        files = {"compose.yaml": "0" * 64}
        store.save_emitted(a_config(), "compose", "/somewhere/out", files)
        store.save_emitted(a_config("of another store"), "argv", "/elsewhere", {})
        assert len(store.emitted()) == 2
        (row,) = store.emitted(study)
        assert (row.config, row.files, row.format) == (a_config(), files, "compose")
        assert (row.directory, row.trial) == ("/somewhere/out", 3)

    # --- ceilings ---

    def test_newest_ceilings_of_a_device_count(self, store, url):
        other = DEVICE.model_copy(update={"count": 8})
        assert store.ceilings(DEVICE.key) is None
        store.save_ceilings(some_ceilings(read_bytes_per_s=1.0))
        store.save_ceilings(some_ceilings())
        store.save_ceilings(some_ceilings(other, read_bytes_per_s=2.0))
        with open_store(url) as again:
            assert again.ceilings(DEVICE.key) == some_ceilings()
            assert again.ceilings(other.key).read_bytes_per_s == 2.0
            assert again.ceilings("cpu:another:1") is None

    # --- forecasts ---

    def test_first_trial_at_the_point_of_a_forecast_measures_it(self, store, url):
        arguments = a_forecast().arguments
        store.save_forecasts("chat on this", [a_forecast(), a_forecast("itl_p50_s")])
        found = {"goodput_requests_per_s": (2.5, 2.0), "ttft_p50_s": (1.0, 1.0)}
        elsewhere = store.score_forecasts("other", arguments, found, study="a", trial=1)
        another = store.score_forecasts("chat on this", {}, found, study="a", trial=1)
        first = store.score_forecasts("chat on this", arguments, found, study="a", trial=2)
        later = store.score_forecasts("chat on this", arguments, found, study="b", trial=3)
        assert (elsewhere, another, first, later) == (0, 0, 1, 0)
        with open_store(url) as again:
            told = {one.metric: one for one in again.forecasts()}
        assert told["itl_p50_s"] == a_forecast("itl_p50_s")
        goodput = told["goodput_requests_per_s"]
        assert (goodput.study, goodput.measured, goodput.measured_ratio) == ("a", 2.5, 1.25)

    def test_forecast_that_no_trial_can_try_is_never_measured(self, store):
        unserved = a_forecast(served_by="reference", arguments={})
        unknown = a_forecast(predicted=None, arguments={})
        store.save_forecasts("s", [unserved, unknown])
        found = {"goodput_requests_per_s": (2.5, 2.0)}
        assert store.score_forecasts("s", {}, found, study="a", trial=0) == 0

    def test_forecasts_are_listed_newest_first(self, store):
        store.save_forecasts("s", [a_forecast(lever="first")])
        store.save_forecasts("s", [a_forecast(lever="second")])
        store.save_forecasts("s", [])
        assert [one.lever for one in store.forecasts()] == ["second", "first"]

    # --- references ---

    def test_reference_names_a_study_or_a_trial(self, store):
        first = a_study(store, "chat")
        second = a_study(store, "chat-long")
        third = a_study(store, "batch")
        measure(store, second, a_trial(4), ok())
        assert store.resolve("chat").study == first
        assert store.resolve("chat-l").study == second
        assert store.resolve("b").study == third
        assert store.resolve("latest").study == third
        assert store.resolve("chat").trial is None
        assert store.resolve("chat-long/4").trial == store.trial(second, 4)

    def test_reference_to_nothing_names_the_nearest(self, store):
        with pytest.raises(NotFound, match="no studies"):
            store.resolve("latest")
        for name in ("chat-short", "chat-long", "batch"):
            a_study(store, name)
        with pytest.raises(NotFound) as caught:
            store.resolve("chat-lnog")
        assert caught.value.fix.startswith("did you mean chat-long")
        with pytest.raises(NotFound, match="several studies begin with 'chat'") as caught:
            store.resolve("chat")
        assert "chat-short" in caught.value.fix
        assert "batch" not in caught.value.fix
        for reference in ("", "batch/7", "batch/x", "batch/", "batch/²", "batch/" + "9" * 30, "/1"):
            with pytest.raises(NotFound):
                store.resolve(reference)

    # --- quality ---

    def test_later_answers_of_a_key_replace_earlier_ones(self, store, url):
        store.save_quality_answers("this", "first")
        store.save_quality_answers("other", "elsewhere")
        store.save_quality_answers("this", '{"text": "\u00e9\u4e2d"}' * 1000)
        with open_store(url) as again:
            assert again.quality_answers("this") == '{"text": "\u00e9\u4e2d"}' * 1000
            assert again.quality_answers("other") == "elsewhere"
        assert store.quality_answers("that") is None

    def test_quality_reports_are_listed_newest_first_and_by_trial(self, store):
        study = a_study(store)
        a_study(store, "batch")
        for trial in (1, 2):
            store.save_quality_report(a_quality_report(size=str(trial)), study=study, trial=trial)
        store.save_quality_report(a_quality_report(size="alone"))
        assert [row.report.size for row in store.quality_reports()] == ["alone", "2", "1"]
        assert [row.report.size for row in store.quality_reports("chat")] == ["2", "1"]
        assert [row.report for row in store.quality_reports("chat", 1)] == [
            a_quality_report(size="1")
        ]
        assert store.quality_reports("batch") == []

    def test_report_of_a_study_that_is_not_here_is_refused(self, store):
        with pytest.raises(NotFound):
            store.save_quality_report(a_quality_report(), study="nowhere", trial=1)
