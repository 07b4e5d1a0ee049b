"""What the plugin counts is on a real server's own /metrics, whoever answers for that page."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from contracts.completions import complete
from contracts.processor import KV_WIDTH, eager

from kvtune.engines.base import ServerSpec
from kvtune.engines.vllm.attach import attach
from kvtune.profilers.scrape import parse_metrics
from kvtune.types import Endpoint

pytestmark = pytest.mark.integration

QUEST = {"quest": {"pages": 2, "dense_layers": 2}}
ARGUMENTS = eager(48, **{"block-size": 32, "max-model-len": 1024, "max-num-seqs": 4})
PROMPT = [(position * 7919) % 40_000 + 100 for position in range(300)]

# The first of 5 tokens comes from the prompt. Four decode steps each see ten pages of 32 tokens in
# 8 layers; two of the layers read all, the others two.
SEEN, READ = 4 * 10 * 8, 4 * (10 * 2 + 2 * 6)

SERVE = """
import sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    ServeSubcommand.cmd(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
"""

SCRIPT = """
import json, os, sys
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
import prometheus_client
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine = LLM(**json.loads(sys.argv[1]))
    sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], sampling, use_tqdm=False)
    print(prometheus_client.generate_latest().decode())
"""


def answer(url):
    complete(url, PROMPT, 5)


def page(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return answer.read().decode()


def answered_page(server, url):
    """The page, and the number of the process that holds the other end of the connection."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        port = connection.sock.getsockname()[1]
        (pid,) = {
            process.pid
            for process in psutil.Process(server.pid).children(recursive=True)
            for other in process.net_connections("tcp")
            if other.raddr and other.raddr.port == port
        }
    return text, pid


def pages_of(text):
    counted = parse_metrics(text).counters
    return counted.get("kvtune:pages_seen_total"), counted.get("kvtune:pages_read_total")


def folders(pid):
    """Where the processes of a server leave their figures; they hold it open."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    opened = set()
    for process in tree:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                opened.add(entry.readlink())
    return [folder for folder in opened if folder.name.startswith("kvtune-metrics-")]


def options(**more):
    given = {**ARGUMENTS, "additional-config": {"kvtune": QUEST}, **more}
    words = []
    for name, value in given.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words += [f"--{name}"] if value is True else [f"--{name}", text]
    return words


@pytest.fixture
def serve(shallow, tmp_path):
    """Start servers as a user does."""
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    started = []

    def serve(**more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        where = ["--model", str(shallow), "--served-model-name", "m", "--port", str(port)]
        log_path = tmp_path / f"log{len(started)}"
        with log_path.open("w") as log:
            server = subprocess.Popen(
                [sys.executable, script, *where, *options(**more)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"},
                start_new_session=True,
            )
        started.append(server)
        url = f"http://127.0.0.1:{port}"
        while not is_healthy(url):
            assert server.poll() is None, log_path.read_text()
            time.sleep(0.5)
        return server, url

    yield serve
    for server in started:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def is_healthy(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@pytest.fixture
def fork(warm, shallow, tmp_path):
    """Start servers as a search does."""

    def fork(name="log", **more):
        arguments = {**ARGUMENTS, "additional-config": {"kvtune": QUEST}, **more}
        spec = ServerSpec(str(shallow), served_model_name="m", arguments=arguments)
        return warm.launch(spec, log_path=tmp_path / name, start_timeout_s=300)

    return fork


def test_a_forked_server_shows_what_decoding_read_and_leaves_nothing(fork):
    used = set()
    for name in ("first", "second"):
        with fork(name) as server:
            url = server.endpoint.url
            assert not any(pages_of(page(url))), "a start counts from 0"
            answer(url)
            text = page(url)
            assert pages_of(text) == (SEEN, READ)
            assert 'kvtune:pages_read_total{engine="0",model_name="m"}' in text
            assert parse_metrics(text).gauges["kvtune:summary_bytes"] > 0
            (folder,) = folders(server.endpoint.pid)
            used.add(folder)
    assert len(used) == 2
    assert not any(folder.exists() for folder in used)


def test_what_a_killed_server_leaves_goes_with_the_next_one(fork, serve):
    with fork() as killed:
        (left,) = folders(killed.endpoint.pid)
        server = psutil.Process(killed.endpoint.pid)
        for process in [*server.children(recursive=True), server]:
            process.kill()
    assert left.exists()
    following, url = serve()
    assert not left.exists()
    answer(url)
    assert pages_of(page(url)) == (SEEN, READ)
    _, effective = attach(Endpoint(url, "m"))
    assert effective.plugin["quest"] == QUEST["quest"] | {"per_kv_head": False}
    (folder,) = folders(following.pid)
    following.terminate()
    following.wait(60)
    assert not folder.exists()


def test_several_processes_that_answer_tell_the_same(serve):
    server, url = serve(**{"api-server-count": 2})
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        [*threads.map(answer, [url] * 4)]
    found, answered = set(), set()
    deadline_s = time.monotonic() + 60
    while len(answered) < 2 and time.monotonic() < deadline_s:
        text, answering = answered_page(server, url)
        assert 'policies="quest"' in text
        found.add(pages_of(text))
        answered.add(answering)
    assert len(answered) == 2
    assert found == {(4 * SEEN, 4 * READ)}
    assert folders(server.pid) == []


def test_a_script_finds_its_figures_where_those_of_vllm_are(shallow, tmp_path):
    arguments = {name.replace("-", "_"): value for name, value in ARGUMENTS.items()}
    arguments |= {"model": str(shallow), "kv_cache_memory_bytes": 48 * KV_WIDTH << 20}
    arguments["additional_config"] = {"kvtune": QUEST}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, json.dumps(arguments), json.dumps(PROMPT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert pages_of(done.stdout) == (SEEN, READ), done.stderr


def test_a_server_that_asks_for_nothing_has_no_figures_of_ours(fork):
    with fork(**{"additional-config": {}}) as server:
        assert "kvtune" not in page(server.endpoint.url)
        assert folders(server.endpoint.pid) == []
