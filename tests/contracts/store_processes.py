"""What a store does when processes die, or write at the same time."""

import signal
import subprocess
import sys
import time

from contracts.store_fixtures import StoreFixtures
from contracts.store_values import (
    a_key,
    a_study,
    a_trial,
    measure,
    ok,
)
from sqlalchemy import update

from kvtune.store import AttemptStatus, open_store, schema

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


class ProcessContract(StoreFixtures):
    """Processes that die, and processes that write at once."""

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
