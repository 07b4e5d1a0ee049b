"""Real faults under a real search: what is stored, what goes on, and that nothing is left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from contracts.processes import is_alive
from contracts.processor import DTYPE, HAS_AVX512, kv_mib

pytestmark = pytest.mark.integration

KVTUNE = str(Path(sys.executable).with_name("kvtune"))
SERVER = ("--engine-args", f"--enforce-eager --max-model-len 2048 --dtype {DTYPE}")
UNDER_LOAD = r"[1-9]\d*/\d+ requests|[1-9]\d* in flight"


class Search:
    """A `kvtune search` in a session of its own, whose progress and processes are followed."""

    def __init__(self, home, words):
        self._out, self._err = home / f"{time.time_ns()}.out", home / f"{time.time_ns()}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [KVTUNE, *map(str, words)],
                env={**os.environ, "KVTUNE_HOME": str(home)},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def said(self):
        return self._err.read_text()

    def wait_for(self, pattern, *, after=0, limit_s=300):
        """Wait for a line of progress after so many characters; returns how many there are then."""
        deadline_s = time.monotonic() + limit_s
        while not re.search(pattern, self.said[after:]):
            assert time.monotonic() < deadline_s, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.05)
        return len(self.said)

    def tree(self):
        """All processes that it caused and that run now."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def one(self, name):
        """The process of the server with this name."""
        return next(child for child in self.tree() if name in child.name())

    def end(self, limit_s=480):
        """Wait for its end; returns its exit code and what it printed."""
        return self.process.wait(limit_s), self._out.read_text()


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    path = tmp_path_factory.mktemp("workload") / "w.jsonl"
    shape = ("--shared-prefixes", "2", "--prefix-tokens", "608", "--input-tokens", "uniform:16-32")
    make = ("workload", "make", "--requests", "24", *shape, "--output-tokens", "uniform:32-48")
    subprocess.run([KVTUNE, *make, "-o", str(path)], check=True, timeout=60)
    return path


@pytest.fixture
def search(shallow, workload, tmp_path):
    """Starts a search of two trials in the home of the test; all that it caused ends with it."""
    begun = []

    def begin(*words):
        load = ("--workload", workload, "--concurrency", 8, "--goal", "p95 ttft <= 30s")
        limits = ("--budget", 2, "--finalists", 1, "--confirm-rounds", 2)
        server = ("--model", shallow, "--kv-memory", f"{kv_mib(17)}iB", *SERVER)
        begun.append(Search(tmp_path, ("search", *server, *load, *limits, *words)))
        return begun[-1]

    yield begin
    for one in begun:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(10)


@pytest.fixture
def trials(tmp_path):
    """Reads the trials of the study in the home of the test."""

    def read():
        shown = subprocess.run(
            [KVTUNE, "show", "latest", "--json"],
            env={**os.environ, "KVTUNE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return json.loads(shown.stdout)["trials"]

    return read


def all_gone(tree, limit_s=15):
    deadline_s = time.monotonic() + limit_s
    while left := [one for one in tree if is_alive(one)]:
        if time.monotonic() > deadline_s:
            return [one.cmdline() for one in left]
        time.sleep(0.1)
    return []


def test_a_killed_worker_costs_a_trial_and_a_killed_search_nothing(search, trials):
    first = search("--budget", 3)
    seen = first.wait_for("Measuring 2 of 3")
    first.wait_for(UNDER_LOAD, after=seen)
    first.one("VLLM::Worker").kill()
    seen = first.wait_for("trial 1: crash-under-load: .*died unexpectedly", after=seen)
    first.wait_for(UNDER_LOAD, after=seen)
    tree = first.tree()
    assert any("VLLM::Worker" in one.name() for one in tree), "the search went on"
    first.process.kill()
    assert all_gone(tree) == []

    stock, crashed, killed = trials()
    assert stock["measurement"]["status"] == "ok"
    assert crashed["measurement"]["failure"]["failure"] == "crash-under-load"
    assert "died unexpectedly" in crashed["measurement"]["failure"]["log_excerpt"]
    assert killed["measurement"] is None

    code, _ = search("--budget", 3).end()
    assert code in (0, 1)
    *points, again = trials()[:3]
    assert points == [stock, crashed], "what had an outcome is not measured again"
    assert again["trial"] == killed["trial"], "what the kill met is tried again"
    assert again["measurement"]["failure"] is None
    assert len(again["attempts"]) == 2
    assert [row["trial"]["parent"] for row in trials()[3:]] == [0, 2, 2, 0]


def test_a_hung_worker_is_a_hang_that_is_tried_again_and_ctrl_c_keeps_it(search, trials):
    limit_s = 5 if HAS_AVX512 else 30  # A step of a full budget takes longer than 5 s without.
    begun = search("--stall-timeout", limit_s)
    seen = begun.wait_for(UNDER_LOAD)
    hung = begun.one("VLLM::Worker")
    hung.send_signal(signal.SIGSTOP)
    seen = begun.wait_for(f"trial 0: hang-under-load: .*sent nothing for {limit_s} s", after=seen)
    assert not is_alive(hung), "a stopped process is ended too"

    begun.wait_for(UNDER_LOAD, after=seen)
    tree = begun.tree()
    pressed_s = time.monotonic()
    os.killpg(begun.process.pid, signal.SIGINT)
    code, out = begun.end()
    assert code == 130
    assert time.monotonic() - pressed_s < 10
    assert "Interrupted" in begun.said
    assert "Nothing was measured" in out
    assert all_gone(tree) == []
    [stock] = trials()
    assert stock["measurement"]["failure"]["failure"] == "hang-under-load"
    assert len(stock["attempts"]) == 2


def test_kv_memory_that_is_too_small_names_the_length_that_fits(shallow, workload, tmp_path):
    words = ("--model", shallow, "--workload", workload, "--kv-memory", f"{kv_mib(2)}iB", *SERVER)
    profiled = subprocess.run(
        [KVTUNE, "profile", *map(str, words)],
        env={**os.environ, "KVTUNE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert profiled.returncode == 3
    assert "the estimated maximum model length is 128" in profiled.stderr
    assert "fix: Pass --max-model-len 128 or less" in profiled.stderr
