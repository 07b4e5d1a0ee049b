"""`kvtune serve`: what is started is what was found, until Ctrl-C."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from contracts.processes import is_alive


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def serving(after_search, port):
    """`kvtune serve` as a process, and the first line that it prints."""
    words = ["serve", "--study", after_search.study, "--port", str(port)]
    server = subprocess.Popen(
        [Path(sys.executable).with_name("kvtune"), *words],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield server, server.stdout.readline()
    server.kill()
    server.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_winner_serves_until_it_is_stopped_and_leaves_nothing(serving, port, number):
    server, first_line = serving
    assert first_line.startswith(f"http://127.0.0.1:{port} serves org/tiny; log: ")
    url = f"http://127.0.0.1:{port}/server_info?config_format=json"
    with urllib.request.urlopen(url) as answer:
        config = json.load(answer)["vllm_config"]
    assert config["cache_config"]["block_size"] == 32
    assert config["model_config"]["max_model_len"] == 2048
    tree = psutil.Process(server.pid).children(recursive=True)
    server.send_signal(number)
    assert server.wait(30) == 130
    assert [one for one in tree if is_alive(one)] == []


def test_a_port_that_is_taken_is_exit_code_3(after_search, kvtune):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        said = kvtune("serve", "--study", after_search.study, "--port", number, code=3)
    assert f"something listens on port {number} already" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--port", 80_000), "equal to 65535"),
        (("--host", "192.0.2.1"), "a server cannot listen on 192.0.2.1, port 8000"),
    ],
)
def test_an_address_that_cannot_be_is_bad_input(words, message, after_search, kvtune):
    said = kvtune("serve", "--study", after_search.study, *words, code=2)
    assert message in said.err


def test_a_server_that_dies_is_exit_code_3_with_its_last_words(
    after_search, kvtune, port, monkeypatch
):
    from kvtune.engines.simulated.engine import SimulatedEngine

    launch = SimulatedEngine.launch

    def launch_and_kill(self, spec, **options):
        server = launch(self, spec, **options)
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # another test's, that just ended
                words = one.cmdline()
                if "kvtune.engines.simulated.server" in words and str(port) in words:
                    one.kill()
        return server

    monkeypatch.setattr(SimulatedEngine, "launch", launch_and_kill)
    said = kvtune("serve", "--study", after_search.study, "--port", port, code=3)
    assert "error: " in said.err


def test_a_study_that_is_not_there_is_bad_input(kvtune):
    assert "there are no studies" in kvtune("serve", code=2).err
