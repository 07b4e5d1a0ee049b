"""The load client against a real vLLM server; KVTUNE_TEST_MODEL names a small chat model."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from contracts.processor import as_words, eager

from kvtune.profilers.load.client import ClosedLoop, KeptText, OpenLoop, replay
from kvtune.profilers.load.request import prepare
from kvtune.types import Endpoint, Request

pytestmark = pytest.mark.integration
START_TIMEOUT_S = 300
PROMPT = "Count the lamps on the road, one by one, and say where each of them stands. " * 30


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    model = os.environ.get("KVTUNE_TEST_MODEL")
    if not model:
        pytest.skip("KVTUNE_TEST_MODEL is not set")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    command += as_words(eager(256)).split()
    command += ["--enable-prompt-tokens-details"]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log)
        yield Endpoint(f"http://127.0.0.1:{port}", "m", server.pid)
    finally:
        server.terminate()
        server.wait(60)


def wait_until_healthy(url, server, log):
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(url).close()
            return
        except urllib.error.URLError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-2000:]}")


def prepared(request, index=0, fixed_length=True, output_tokens=12, cache_salt=None):
    return prepare(
        request,
        model="m",
        index=index,
        fixed_length=fixed_length,
        output_tokens=output_tokens,
        cache_salt=cache_salt,
    )


def test_text_chat_and_token_ids_give_every_token_asked_for(endpoint):
    messages = ({"role": "user", "content": "Say hello."},)
    requests = [
        prepared(Request(prompt="Once upon a time")),
        prepared(Request(messages=messages)),
        prepared(Request(token_ids=tuple(range(100, 140)))),
    ]
    run = asyncio.run(replay(endpoint, requests, ClosedLoop(2), keep_text=KeptText()))
    assert run.warnings == ()
    assert [record.output_tokens for record in run.records] == [12] * 3
    assert [len(record.gaps_s) for record in run.records] == [11] * 3
    assert [record.finish_reason for record in run.records] == ["length"] * 3
    assert run.records[2].input_tokens == 40
    assert all(record.text for record in run.records[:2])
    assert run.counters["vllm:generation_tokens_total"] == 36
    assert run.counters['vllm:request_success_total{finished_reason="length"}'] == 3


def test_natural_stop_ends_before_the_limit(endpoint):
    messages = ({"role": "user", "content": "Answer with one word: what is the capital of Italy?"},)
    request = prepared(Request(messages=messages), fixed_length=False, output_tokens=200)
    run = asyncio.run(replay(endpoint, [request], ClosedLoop(1)))
    (record,) = run.records
    assert run.warnings == ()
    assert record.finish_reason == "stop"
    assert record.output_tokens == len(record.gaps_s) + 1 < 200


def test_a_salt_shares_prefixes_within_a_run_and_not_with_the_last_one(endpoint):
    def cached(salt):
        requests = [prepared(Request(prompt=PROMPT), i, cache_salt=salt) for i in range(2)]
        run = asyncio.run(replay(endpoint, requests, ClosedLoop(1)))
        return [record.cached_tokens for record in run.records]

    first, second = cached("run-1"), cached("run-2")
    assert first[1] > 100
    assert second == first
    assert not first[0]


def test_open_loop_on_a_real_server_is_sent_in_time(endpoint):
    requests = [
        prepared(Request(prompt=f"Story {i}", arrival_s=0.2 * i), i, output_tokens=4)
        for i in range(10)
    ]
    run = asyncio.run(replay(endpoint, requests, OpenLoop(), scrape_interval_s=0.1))
    assert all(record.ok for record in run.records)
    assert max(value for _, value in run.gauges["vllm:num_requests_running"]) >= 1


def test_a_prompt_that_is_too_long_is_told_as_the_server_says_it(endpoint):
    request = prepared(Request(token_ids=(100,) * 3000))
    run = asyncio.run(replay(endpoint, [request], ClosedLoop(1)))
    assert run.records[0].error.startswith("HTTP 400: ")
    assert "2048" in run.records[0].error
