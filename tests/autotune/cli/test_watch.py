"""`kvtune profile --url` without a workload: it reads, and leaves no trace in the server."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from kvtune.autotune.cli.console import TerminalReporter
from kvtune.engines.base import ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.profilers.scrape import parse_metrics
from kvtune.store.database import open_store
from kvtune.types import Bottleneck, Profile

KVTUNE = str(Path(sys.executable).with_name("kvtune"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    spec = ServerSpec("org/tiny", arguments={"simulate-time-scale": 0.01, "max-model-len": 2048})
    with SimulatedEngine().launch(spec, log_path=log) as running:
        yield running.endpoint.url


@pytest.fixture
def worked(server):
    """What the server has been asked to generate so far."""

    def read():
        with urllib.request.urlopen(f"{server}/metrics") as answer:
            samples = parse_metrics(answer.read().decode())
        return {
            name: value
            for name, value in samples.counters.items()
            if "success" in name or "tokens" in name
        }

    return read


def test_watching_sends_nothing_and_finds_an_idle_server(server, worked, kvtune, tmp_path):
    before = worked()
    said = kvtune("profile", "--url", server, "--duration", "2.2s", "--json")
    profile = Profile.model_validate_json(said.out)
    assert worked() == before
    assert profile.verdict.bottleneck in (Bottleneck.IDLE, Bottleneck.ABSTAIN)
    assert profile.model == "org/tiny"
    assert profile.metrics == {}
    assert profile.effective.start_kind == "attached"
    assert profile.effective.max_model_len_tokens == 2048
    assert profile.window_s == pytest.approx(2.2, abs=0.5)
    with open_store(tmp_path / "home" / "kvtune.db") as history:
        kept = profile.model_copy(update={"forecasts": ()})
        assert [row.profile for row in history.profiles()] == [kept]


def test_a_replay_is_seen_in_metrics_and_counters(server, worked, kvtune, tmp_path):
    workload = tmp_path / "w.jsonl"
    kvtune("workload", "make", "--requests", 12, "--output-tokens", 8, "-o", workload)
    words = ("profile", "--url", server, "--workload", workload, "--concurrency", 4)
    profile = Profile.model_validate_json(kvtune(*words, "--json").out)
    assert profile.metrics["failed_requests"] == (0.0,)
    assert profile.counters["vllm:generation_tokens_total"] == 12 * 8
    assert profile.fingerprint.requests == 12
    said = kvtune(*words, "--goal", "p95 ttft <= 1s")
    assert "12 requests of w" in said.err


def test_the_evidence_is_a_table_that_fits_80_columns(server, kvtune):
    said = kvtune("profile", "--url", server, "--duration", "500ms").out
    table = said[said.index("metric") :].split("\n\n")[0].splitlines()
    assert any(line.startswith("no   window") for line in table)
    assert any("0.5" in line and "(threshold 2 s)" in line for line in table)
    assert any(line.rstrip().endswith(" clock") for line in table), "where the window is from"
    assert all(len(line.rstrip()) <= 80 for line in table)
    assert "Engine: " in said
    assert "max_model_len_tokens=2048" in said


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("localhost:8000", 2, "is no address"),
        ("http://127.0.0.1:9", 3, "cannot be read: [Errno 111] Connection refused"),
    ],
)
def test_an_address_that_serves_nothing_is_refused(url, code, message, kvtune):
    said = kvtune("profile", "--url", url, code=code)
    assert message in said.err
    assert "fix: " in said.err


def test_an_address_that_accepts_and_never_answers_is_given_up(kvtune, monkeypatch):
    monkeypatch.setattr("kvtune.engines.vllm.attach.TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "cannot be read: timed out" in kvtune("profile", "--url", url, code=3).err


@pytest.mark.parametrize(("number", "loads"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_an_interrupt_leaves_the_watched_server_as_it_was(number, loads, tmp_path):
    arguments = {"simulate-time-scale": 20}
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"input_tokens": 40, "output_tokens": 400}\n' * 8)
    with SimulatedEngine().launch(
        ServerSpec("m", arguments=arguments), log_path=tmp_path / "server.log"
    ) as server:
        url = server.endpoint.url
        words = ("--workload", str(workload)) if loads else ("--duration", "60s")
        attached = subprocess.Popen(
            [KVTUNE, "profile", "--url", url, *words],
            env={**os.environ, "KVTUNE_HOME": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with attached:
            for line in attached.stderr:
                if "replaying" in line or "watching" in line:
                    break
            time.sleep(0.5)
            os.killpg(attached.pid, number)
            attached.communicate(timeout=20)
        assert attached.returncode == 130
        assert server.failure() is None
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            assert answer.status == 200


def test_a_duration_needs_a_unit(server, kvtune):
    assert "'5' is not a time" in kvtune("profile", "--url", server, "--duration", 5, code=2).err


def test_a_server_that_stops_while_it_is_watched_is_exit_code_3(kvtune, tmp_path, monkeypatch):
    """Stopped in the event loop, so that a kept connection is found closed but not yet lost."""
    running = SimulatedEngine().launch(ServerSpec("m"), log_path=tmp_path / "server.log")
    monkeypatch.setattr(TerminalReporter, "watched", lambda reporter, elapsed_s: running.stop())
    said = kvtune("profile", "--url", running.endpoint.url, "--duration", "500ms", code=3)
    assert "could not be read any more after 0." in said.out
