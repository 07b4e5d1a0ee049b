"""The main job on a real server: search, emit, serve the winner, and see the same again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from contracts.processes import is_alive
from contracts.processor import DTYPE, kv_mib

pytestmark = pytest.mark.integration

KVTUNE = [str(Path(sys.executable).with_name("kvtune"))]
GOALS = ("--goal", "p95 ttft <= 8s", "--goal", "p95 itl <= 600ms")
LOAD = ("--concurrency", "20")
SERVER = (
    *("--kv-memory", f"{kv_mib(17)}iB"),
    *("--engine-args", f"--enforce-eager --max-model-len 2048 --dtype {DTYPE}"),
)


def kvtune(home, *words, code=0):
    done = subprocess.run(
        [*KVTUNE, *map(str, words)],
        env={**os.environ, "KVTUNE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == code, done.stderr[-4000:]
    return done.stdout


def trials_of(home):
    return json.loads(kvtune(home, "show", "latest", "--json"))["trials"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def workload(home):
    path = home / "workload.jsonl"
    lengths = ("--input-tokens", "uniform:16-32", "--output-tokens", "uniform:32-48")
    shared = ("--shared-prefixes", 2, "--prefix-tokens", 608)
    kvtune(home, "workload", "make", "--requests", 60, *shared, *lengths, "-o", path)
    return path


@pytest.fixture(scope="module")
def search_words(shallow, workload):
    budget = ("--budget", 3, "--finalists", 1, "--heldout-share", 0.5)
    return ("search", "--model", shallow, "--workload", workload, *LOAD, *SERVER, *GOALS, *budget)


@pytest.fixture(scope="module")
def decision(home, search_words):
    return json.loads(kvtune(home, *search_words, "--json"))


def test_the_winner_beats_the_stock_defaults_with_separated_intervals(decision):
    assert decision["outcome"] == "winner"
    ours = decision["figures"]["goodput_requests_per_s"]
    stock = decision["baseline_figures"]["goodput_requests_per_s"]
    assert ours["repeats"] == stock["repeats"] == 3
    assert ours["low"] > stock["high"]


def test_the_same_command_again_measures_nothing_and_decides_the_same(home, search_words, decision):
    before = trials_of(home)
    again = json.loads(kvtune(home, *search_words, "--json"))
    assert again["recommended"] == decision["recommended"]
    assert again["figures"] == decision["figures"]
    assert trials_of(home) == before


def test_every_trial_was_bound_to_what_the_engine_said_it_ran(home, decision):
    measured = [row for row in trials_of(home) if row["measurement"]["status"] == "ok"]
    assert len(measured) >= 8, "three trials, and two of them confirmed three times"
    for row in measured:
        effective = row["measurement"]["effective"]
        tuned = {
            name: value
            for choice in row["trial"]["stack"]["choices"]
            for name, value in choice["arguments"].items()
        }
        assert effective["block_size_tokens"] == tuned.get("block-size", 128)
        assert "server_info" in effective["source"]


def test_the_emitted_file_serves_what_was_measured(home, workload, decision):
    out = home / "deploy"
    kvtune(home, "emit", "--format", "all", "-o", out)
    assert (out / "vllm.yaml").read_text().startswith("# A serving config found by kvtune.")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = home / "serve.log"
    log_file = log.open("w")
    server = subprocess.Popen(
        [*KVTUNE, "serve", "--port", str(port)],
        env={**os.environ, "KVTUNE_HOME": str(home)},
        stdout=log_file,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until_healthy(port, server, log)
        tree = psutil.Process(server.pid).children(recursive=True)
        url = f"http://127.0.0.1:{port}"
        words = ("--url", url, "--workload", workload, *LOAD, *GOALS)
        profile = json.loads(kvtune(home, "profile", *words, "--json"))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        log_file.close()
    goodput = profile["metrics"]["goodput_requests_per_s"][0]
    assert goodput > decision["baseline_figures"]["goodput_requests_per_s"]["high"]
    measured = trials_of(home)[decision["recommended"]]["measurement"]["effective"]
    for name in ("block_size_tokens", "kv_cache_size_tokens"):
        assert profile["effective"][name] == measured[name]
    assert [process for process in tree if is_alive(process)] == [], "the server is gone"


def wait_until_healthy(port, server, log):
    deadline_s = time.monotonic() + 240
    while time.monotonic() < deadline_s:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail("kvtune serve did not get ready within four minutes")
