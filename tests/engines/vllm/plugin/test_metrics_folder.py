import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtune.engines.vllm.plugin import metrics_folder

pytest.importorskip("prometheus_client")

# A server: starts an engine, which starts a worker, each of which counts; then does what it is
# told on its input.
SERVER = """
import json, multiprocessing, os, pathlib, signal, sys
from kvtune.engines.vllm.plugin import metrics_folder
metrics_folder._MEMORY = pathlib.Path(sys.argv[1])
from kvtune.engines.vllm.plugin.collector import Figures
from kvtune.engines.vllm.plugin.counters import counters

def worker(pipe):
    counters().add("pages_read", 5)
    pipe.send(os.getpid())
    pipe.recv()

def engine(pipe):
    counters().add("pages_read", 40)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    started = multiprocessing.get_context("spawn").Process(
        target=worker, args=(theirs,), daemon=True
    )
    started.start()
    theirs.close()
    pipe.send(ours.recv())
    pipe.recv()
    started.kill()

if __name__ == "__main__":
    folder = metrics_folder.settle()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    started = multiprocessing.get_context("spawn").Process(
        target=engine, args=(theirs,), name="EngineCore_DP7"
    )
    started.start()
    theirs.close()
    pid = ours.recv()
    print(json.dumps([str(folder), started.pid, pid]), flush=True)
    for line in sys.stdin:
        if line.strip() == "read":
            figures = Figures()
            figures.folder = folder
            found = [s for family in figures.collect() for s in family.samples]
            print(json.dumps({s.labels["engine"]: s.value for s in found}), flush=True)
    ours.send("end")
    started.join()
"""


COUNTED = {"7": 45}
"""Of the seventh engine: 40 by itself and 5 by its worker."""


class Server:
    """A process that has started an engine, which has started a worker."""

    def __init__(self, base, script):
        self.process = subprocess.Popen(
            [sys.executable, script, base],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, metrics_folder.VARIABLE: f"{base}/of_another_server"},
        )
        folder, self.engine, self.worker = self._answer()
        self.folder = Path(folder)

    def _answer(self):
        return json.loads(self.process.stdout.readline())

    def read(self):
        self.process.stdin.write("read\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self):
        self.process.communicate(timeout=20)


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    base = tmp_path / "memory"
    base.mkdir()
    started = []

    def start():
        started.append(Server(str(base), str(script)))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.communicate()


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_folder, "_MEMORY", tmp_path)
    monkeypatch.setattr(metrics_folder, "_held", {})
    monkeypatch.delenv(metrics_folder.SHARED, raising=False)
    monkeypatch.setenv(metrics_folder.VARIABLE, "")
    return tmp_path


def test_a_server_reads_its_own_processes_and_no_other_server_s(start):
    first, second = start(), start()
    assert first.folder != second.folder
    assert (first.read(), second.read()) == (COUNTED, COUNTED)


def test_figures_of_a_killed_worker_stay(start):
    server = start()
    os.kill(server.worker, signal.SIGKILL)
    assert server.read() == COUNTED


def test_a_server_that_ends_leaves_nothing(start):
    server = start()
    assert server.folder.is_dir()
    server.end()
    assert [*server.folder.parent.iterdir()] == []


def test_what_a_killed_server_left_goes_with_the_next_start_and_a_living_one_stays(start, wait_for):
    killed, living = start(), start()
    for pid in (killed.worker, killed.engine, killed.process.pid):
        os.kill(pid, signal.SIGKILL)
    killed.process.wait()
    assert killed.folder.is_dir()
    next_one = start()
    assert {*next_one.folder.parent.iterdir()} == {living.folder, next_one.folder}
    assert living.read() == COUNTED


def test_only_folders_of_this_kind_and_user_are_swept(base):
    others = [base / "other", base / f"kvtune-metrics-{os.getuid() + 1}-abc"]
    left = base / f"kvtune-metrics-{os.getuid()}-left"
    target = base / "target"
    link = base / f"kvtune-metrics-{os.getuid()}-link"
    for folder in (*others, left, target):
        folder.mkdir()
    link.symlink_to(target)
    metrics_folder.settle()
    own = metrics_folder.writing()
    assert {*base.iterdir()} == {*others, target, link, own}


def test_naming_a_folder_makes_none(base):
    metrics_folder.settle()
    assert [*base.iterdir()] == []


def test_others_cannot_read_the_folder(base):
    metrics_folder.settle()
    assert metrics_folder.writing().stat().st_mode & 0o077 == 0


def test_without_a_page_there_is_no_folder(base):
    assert metrics_folder.writing() is None


def test_where_vllm_puts_files_together_ours_are_among_them(base, monkeypatch):
    metrics_folder.settle()
    monkeypatch.setenv(metrics_folder.SHARED, str(base / "of_vllm"))
    assert metrics_folder.writing() == base / "of_vllm"
    assert [*base.iterdir()] == []
