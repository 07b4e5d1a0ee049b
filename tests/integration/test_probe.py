"""The probe on a real vLLM: what a step costs, within the stated cost, and an idle server after."""

import asyncio
import json
import os
import signal
import threading
import urllib.request

import pytest
from contracts.processor import KV_WIDTH, eager

from kvtune.engines.base import ServerSpec
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.profilers.load import runtime
from kvtune.profilers.probe import probe
from kvtune.profilers.probe_plan import plan_probe
from kvtune.profilers.scrape import parse_metrics
from kvtune.profilers.step_time import fit_step_time

pytestmark = pytest.mark.integration

ARGUMENTS = eager(512)
KV_BYTES_PER_TOKEN = 23_040 * KV_WIDTH  # 30 layers x 3 KV heads x 64 x keys and values
VOCAB_SIZE = 49_152
BUDGET_S = 40.0


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    spec = ServerSpec(model, served_model_name="m", arguments=ARGUMENTS)
    log = tmp_path_factory.mktemp("probe") / "server.log"
    with VllmEngine() as engine, engine.launch(spec, log_path=log, start_timeout_s=200) as running:
        yield running


def page(server):
    with urllib.request.urlopen(f"{server.endpoint.url}/metrics", timeout=30) as answer:
        return parse_metrics(answer.read().decode())


def probed(server, **changed):
    options = {
        "budget_s": BUDGET_S,
        "salt": 11,
        "vocab_size": VOCAB_SIZE,
        "resets_cache": True,
        "should_stop": server.failure,
        **changed,
    }
    return runtime.run(probe(server.endpoint, server.effective, **options))


def answer(server):
    body = {"model": "m", "prompt": list(range(100, 400)), "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.endpoint.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["usage"]["completion_tokens"]


def is_idle(server):
    gauges = page(server).gauges
    return not any(value for key, value in gauges.items() if "num_requests" in key)


def test_a_probe_finds_what_a_step_costs_and_leaves_nothing(server):
    plan = plan_probe(server.effective, budget_s=BUDGET_S)
    answer(server)
    before = page(server).counters
    result = probed(server)
    after = page(server).counters
    assert result.notes == ()
    assert result.wall_s < BUDGET_S + 1
    assert result.requests <= plan.requests
    assert result.input_tokens <= plan.input_tokens
    assert result.generated_tokens <= plan.generated_tokens
    received = after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"]
    longest = max(cell.sequences * cell.input_tokens for cell in plan.cells)
    # Its time ends within a cell, whose prompts the server may not have come to.
    assert result.input_tokens - longest <= received <= result.input_tokens
    assert after["vllm:num_preemptions_total"] == before["vllm:num_preemptions_total"]
    model = fit_step_time(
        result.observations, source="probe", kv_bytes_per_token=KV_BYTES_PER_TOKEN
    )
    assert model.fixed_s.estimate > 0
    assert model.per_kv_token_s.low >= 0
    assert model.per_kv_token_s.high > 0
    if model.per_kv_token_s.low > 0:
        assert model.kv_bytes_per_s.low > 1e7
    assert is_idle(server)
    assert answer(server) == 4
    hits = page(server).counters["vllm:prefix_cache_hits_total"]
    assert hits == after["vllm:prefix_cache_hits_total"], "its cached prefixes are gone"
    assert result.observations.resident_tokens.max() > 4 * result.observations.resident_tokens.min()


def test_an_interrupted_probe_leaves_the_server_idle_and_usable(server):
    timer = threading.Timer(6.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    result = probed(server, salt=12)
    timer.join()
    assert "interrupted" in result.notes[0]
    assert result.notes[1:] == ()
    assert is_idle(server)
    assert answer(server) == 4


def test_a_probe_out_of_time_leaves_the_server_idle_and_usable(server):
    result = probed(server, salt=13, budget_s=5.0)
    assert "its 5 s are over" in result.notes[0]
    assert result.notes[1:] == ()
    assert len(result.observations) > 0
    assert is_idle(server)


def test_a_server_in_use_is_not_probed(server):
    async def use_and_probe():
        using = asyncio.get_running_loop().run_in_executor(None, long_answer, server)
        await asyncio.sleep(1.0)
        result = await probe(
            server.endpoint,
            server.effective,
            budget_s=20.0,
            salt=14,
            vocab_size=VOCAB_SIZE,
            resets_cache=False,
        )
        await using
        return result

    result = asyncio.run(use_and_probe())
    assert result.requests == 0
    assert "others use the server" in result.notes[0]


def long_answer(server):
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.endpoint.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()
