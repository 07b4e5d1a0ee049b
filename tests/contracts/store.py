"""What a store does on every database that it can be kept in."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import optuna
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from contracts.store_values import (
    GOAL,
    a_config,
    a_decision,
    a_full_history,
    a_key,
    a_profile,
    a_run,
    a_study,
    a_trial,
    failed,
    measure,
    ok,
)
from optuna.storages import RDBStorage
from sqlalchemy import inspect, select, text, update

from kvtune.errors import BadInput, NotFound, StoreError
from kvtune.store import AttemptStatus, Store, open_store, schema
from kvtune.store.migrations import HEAD, migration_options, upgrade
from kvtune.types import FailureClass, Goal, Measurement, Outcome, Status

OPTUNA_TABLES = {"studies", "trials", "trial_params", "trial_values", "alembic_version"}

# Run in another process: argv is the URL, the name of a study and a number.
BEGIN = """
import sys, os, time
from kvtune.store import open_store
from kvtune.types import *
url, study, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = open_store(url)
trial = Trial(number=number, stack=PolicyStack(), base_arguments={}, repeats=1, seed=number)
"""
BEGIN_AND_EXIT = BEGIN + "store.begin_attempt(study, trial, 'k')"
BEGIN_AND_WAIT = (
    BEGIN + "store.begin_attempt(study, trial, 'k'); print('begun', flush=True); input()"
)
FINISH_AND_DIE = (
    BEGIN
    + """
attempt = store.begin_attempt(study, trial, 'k')
store.finish_attempt(attempt, Measurement(status='ok', metrics={'x': (1.0,)}), [])
print('finished', flush=True)
os.kill(os.getpid(), 9)
"""
)
DIE_WHILE_WRITING = (
    BEGIN
    + """
attempt = store.begin_attempt(study, trial, 'k')
from kvtune.store import attempts
def die(*arguments): os.kill(os.getpid(), 9)
attempts.update = die
store.finish_attempt(attempt, Measurement(status='ok'), [])
"""
)
WRITE_MANY = (
    BEGIN
    + """
for i in range(15):
    one = trial.model_copy(update={'number': number + i})
    store.finish_attempt(store.begin_attempt(study, one, f'k{i}'), Measurement(status='ok'), [])
"""
)
OPEN = """
import sys
from kvtune.store import open_store
print('ready', flush=True); input()
open_store(sys.argv[1]).close()
"""


def process(code: str, url: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, url, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def exit_code(child: subprocess.Popen[str]) -> int:
    _, errors = child.communicate(timeout=60)
    assert child.returncode in (0, -signal.SIGKILL), errors
    return child.returncode


def lines(store: Store, study: str | None = None) -> list[str]:
    stream = io.StringIO()
    count = store.export(stream, study)
    header, *rows = stream.getvalue().splitlines()
    assert json.loads(header)["kind"] == "kvtune-export"
    assert count == len(rows)
    return rows


def exported(store: Store, study: str | None = None) -> io.StringIO:
    stream = io.StringIO()
    store.export(stream, study)
    stream.seek(0)
    return stream


class StoreContract:
    """Subclass it with the fixtures `url`, a fresh database, and `other_url`, another one."""

    @pytest.fixture
    def url(self):
        raise NotImplementedError

    @pytest.fixture
    def other_url(self):
        raise NotImplementedError

    @pytest.fixture
    def store(self, url):
        with open_store(url) as store:
            yield store

    @pytest.fixture
    def other_store(self, other_url):
        with open_store(other_url) as store:
            yield store

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

    # --- processes ---

    def test_attempt_of_a_dead_process_is_stopped_and_its_trial_returned(self, store, url):
        study = a_study(store)
        assert exit_code(process(BEGIN_AND_EXIT, url, "chat", 3)) == 0
        store.begin_attempt(study, a_trial(0), "own")
        assert [trial.number for trial in store.abandon_running(study)] == [3]
        assert store.trial(study, 3).attempts[0].status is AttemptStatus.STOPPED
        assert store.trial(study, 3).attempts[0].ended_at is not None
        assert store.trial(study, 0).attempts[0].status is AttemptStatus.RUNNING
        assert store.abandon_running(study) == []

    def test_attempt_of_a_live_process_is_left_alone(self, store, url):
        study = a_study(store)
        child = process(BEGIN_AND_WAIT, url, "chat", 3)
        assert child.stdout.readline() == "begun\n"
        assert store.abandon_running(study) == []
        child.kill()
        # Not waited for: it is a zombie now, whose process id still answers to signals.
        deadline = time.monotonic() + 10
        while not (abandoned := store.abandon_running(study)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [trial.number for trial in abandoned] == [3]
        child.communicate()

    def test_process_id_given_to_another_process_is_dead(self, store):
        study = a_study(store)
        store.begin_attempt(study, a_trial(), "k")
        with store.write() as connection:
            connection.execute(update(schema.attempts).values(process="another boot:1"))
        assert [trial.number for trial in store.abandon_running(study)] == [0]

    def test_attempt_of_another_host_is_stopped_only_when_asked(self, store):
        study = a_study(store)
        attempt = store.begin_attempt(study, a_trial(), "k")
        with store.write() as connection:
            connection.execute(update(schema.attempts).values(host="elsewhere"))
        assert store.abandon_running(study) == []
        assert [t.number for t in store.abandon_running(study, other_hosts=True)] == [0]
        store.finish_attempt(attempt, ok(), [])
        assert store.trial(study, 0).measurement == ok()

    def test_trial_measured_since_is_not_returned_for_a_retry(self, store):
        study = a_study(store)
        store.begin_attempt(study, a_trial(), a_key(a_trial()))
        with store.write() as connection:
            connection.execute(update(schema.attempts).values(process="another boot:1"))
        measure(store, study, a_trial(), ok())
        assert store.abandon_running(study) == []
        assert [a.status.value for a in store.trial(study, 0).attempts] == ["stopped", "finished"]

    def test_measurement_outlives_a_process_killed_right_after_it(self, store, url):
        a_study(store)
        assert exit_code(process(FINISH_AND_DIE, url, "chat", 0)) == -signal.SIGKILL
        assert store.trial("chat", 0).measurement.metrics == {"x": (1.0,)}

    def test_process_killed_while_writing_leaves_nothing_half_written(self, store, url):
        a_study(store)
        assert exit_code(process(DIE_WHILE_WRITING, url, "chat", 0)) == -signal.SIGKILL
        assert store.trial("chat", 0).measurement is None
        assert store.known("k") is None
        assert [trial.number for trial in store.abandon_running("chat")] == [0]

    def test_two_processes_write_at_once(self, store, url):
        study = a_study(store)
        children = [process(WRITE_MANY, url, "chat", first) for first in (0, 100)]
        for number in range(200, 215):
            measure(store, study, a_trial(number, number), ok())
        assert [exit_code(child) for child in children] == [0, 0]
        rows = store.trials(study)
        assert len(rows) == 45
        assert all(row.measured for row in rows)

    def test_many_processes_open_a_new_store_at_once(self, url):
        children = [process(OPEN, url) for _ in range(4)]
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        assert [exit_code(child) for child in children] == [0] * 4
        with open_store(url) as store:
            assert store.studies() == []

    # --- handover ---

    def test_newest_decision_counts(self, store):
        study = a_study(store)
        assert store.decision(study) is None
        store.save_decision(study, a_decision(Outcome.NO_CLEAR_WINNER))
        store.save_decision(study, a_decision())
        assert store.decision("chat") == a_decision()

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

    # --- export and import ---

    def test_export_into_an_empty_store_exports_the_same(self, store, other_store):
        a_full_history(store)
        kinds = {json.loads(line)["kind"] for line in lines(store)}
        assert len(kinds) == 9
        report = other_store.import_(exported(store))
        assert lines(other_store) == lines(store)
        assert sum(report.added.values()) == len(lines(store))
        assert other_store.records("chat", 0) == store.records("chat", 0)
        assert other_store.trials("chat") == store.trials("chat")
        assert other_store.studies() == store.studies()
        assert other_store.decision("chat") == store.decision("chat")

    def test_importing_twice_adds_nothing(self, store, other_store):
        a_full_history(store)
        first = other_store.import_(exported(store))
        second = other_store.import_(exported(store))
        own = store.import_(exported(store))
        assert second.added == own.added == {}
        assert second.skipped == own.skipped == first.added
        assert lines(other_store) == lines(store)

    def test_export_of_one_study_holds_what_it_refers_to(self, store, other_store):
        a_full_history(store)
        other_store.import_(exported(store, "batch"))
        assert [summary.name for summary in other_store.studies()] == ["batch"]
        assert other_store.trials("batch") == store.trials("batch")
        assert other_store.records("batch", 0) == store.records("chat", 0)
        assert other_store.profiles() == []

    def test_running_attempt_is_exported_once_it_has_ended(self, store, other_store):
        study = a_study(store)
        attempt = store.begin_attempt(study, a_trial(), a_key(a_trial()))
        other_store.import_(exported(store))
        assert other_store.trial("chat", 0).attempts == ()
        assert other_store.studies()[0].trials == {"stopped": 1}
        store.finish_attempt(attempt, ok(), [a_run()])
        other_store.import_(exported(store))
        assert other_store.trials("chat") == store.trials("chat")

    def test_imported_study_whose_name_is_taken_gets_another(self, store, other_store):
        study = a_study(store)
        measure(store, study, a_trial(), ok())
        own = a_study(other_store)
        report = other_store.import_(exported(store))
        name = f"chat-{study.id[:6]}"
        assert report.renamed == {"chat": name}
        assert other_store.study("chat") == own
        assert other_store.trial(name, 0).measurement == ok()
        assert other_store.import_(exported(store)).added == {}

    def test_study_that_went_on_in_two_stores_is_refused(self, store, other_store):
        study = a_study(store)
        other_store.import_(exported(store))
        measure(store, study, a_trial(0, 16), ok())
        measure(other_store, "chat", a_trial(0, 32), ok())
        before = lines(other_store)
        with pytest.raises(BadInput, match=r"line 3: .* another trial 0"):
            other_store.import_(exported(store))
        assert lines(other_store) == before

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("{", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ("[]", "not a JSON object"),
            ('{"kind": "surprise", "schema_version": 1}', "unknown kind 'surprise'"),
            ('{"kind": "study", "schema_version": 2}', "a newer kvtune"),
            ('{"kind": "study", "schema_version": 1, "name": "x"}', "study, id: Field required"),
            (
                '{"kind": "decision", "schema_version": 1, "id": "1", "study_id": "nope", '
                '"created_at": "", "decision": {"outcome": "winner", "recommended": 1, '
                '"baseline": null}}',
                "refers to a row that neither",
            ),
            (
                '{"kind": "attempt", "schema_version": 1, "id": "1", "study_id": "nope", '
                '"number": 99999999999999999999999999, "status": "stopped", "host": "", "pid": 1, '
                '"process": "", "started_at": ""}',
                "a value that the store cannot keep",
            ),
        ],
    )
    def test_bad_line_is_named_and_nothing_is_imported(self, store, other_store, line, says):
        a_study(store)
        text_ = exported(store).getvalue() + "\n" + line + "\n"
        with pytest.raises(BadInput, match=f"line 4: .*{says}"):
            other_store.import_(io.StringIO(text_))
        assert other_store.studies() == []

    def test_imported_study_with_an_impossible_name_is_refused(self, store, other_store):
        a_study(store)
        text_ = exported(store).getvalue().replace('"chat"', '"a/b"')
        with pytest.raises(BadInput, match="line 2: 'a/b' cannot be the name"):
            other_store.import_(io.StringIO(text_))

    @pytest.mark.parametrize("content", ["", "\n", "{}\n", "hello\n", '{"kind":"study"}\n'])
    def test_file_that_is_not_an_export_is_refused(self, store, content):
        with pytest.raises(BadInput, match="line 1: "):
            store.import_(io.StringIO(content))

    def test_header_of_a_newer_kvtune_is_refused(self, store):
        header = '{"kind":"kvtune-export","schema_version":2,"kvtune_version":"9.0"}\n'
        with pytest.raises(BadInput, match=r"line 1: .*newer kvtune") as caught:
            store.import_(io.StringIO(header))
        assert "pip install -U kvtune" in caught.value.fix

    # --- schema, and Optuna beside it ---

    def test_migrations_build_the_tables_that_the_code_expects(self, store):
        options = migration_options()
        tables = options.pop("target_metadata")
        with store.read() as connection:
            context = MigrationContext.configure(connection, opts=options)
            assert compare_metadata(context, tables) == []

    def test_store_of_the_first_version_opens(self, url):
        with open_store(url) as store, store.write() as connection:
            schema.metadata.drop_all(connection)
            connection.execute(text("DROP TABLE kvtune_alembic_version"))
            upgrade(connection, "0001")
        with open_store(url) as store:
            a_full_history(store)
            self.test_migrations_build_the_tables_that_the_code_expects(store)

    def test_store_of_a_newer_kvtune_is_refused(self, url):
        with open_store(url) as store, store.write() as connection:
            connection.execute(text("UPDATE kvtune_alembic_version SET version_num = '9999'"))
        with pytest.raises(StoreError, match="newer kvtune: its schema is 9999") as caught:
            open_store(url)
        assert HEAD in caught.value.message
        assert "pip install -U kvtune" in caught.value.fix

    @pytest.mark.parametrize("optuna_first", [True, False])
    def test_optuna_lives_in_the_same_database(self, url, optuna_first):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if optuna_first:
            self.tell_optuna(url, 1.0)
        with open_store(url) as store:
            a_full_history(store)
            before = lines(store)
            self.tell_optuna(store.url, 2.0)
            self.tell_optuna(store.url, 3.0)
        with open_store(url) as store:
            assert lines(store) == before
            with store.read() as connection:
                names = set(inspect(connection).get_table_names())
                assert {n for n in names if n.startswith("kvtune_")} == {
                    *schema.metadata.tables,
                    "kvtune_alembic_version",
                }
                assert names >= OPTUNA_TABLES
            self.test_migrations_build_the_tables_that_the_code_expects(store)
        assert self.tell_optuna(url, 4.0) == 4.0

    def tell_optuna(self, url: str, value: float) -> float:
        """Open Optuna's storage, add a trial to its study and return the best value."""
        storage = RDBStorage(open_url(url))
        study = optuna.create_study(
            storage=storage, study_name="chat", direction="maximize", load_if_exists=True
        )
        trial = study.ask()
        trial.suggest_int("block_size", 16, 128)
        study.tell(trial, value)
        best = study.best_value
        storage.remove_session()
        storage.engine.dispose()
        return best


def open_url(url: str) -> str:
    """The URL of a store as kvtune gives it to Optuna."""
    from kvtune.store.location import locate

    return locate(url).url.render_as_string(hide_password=False)
