"""The probe on a real vLLM: what a step costs, within the stated cost, and an idle server after."""

import os
import signal
import time
import urllib.request
from types import SimpleNamespace

import pytest
from contracts.completions import complete, requested
from contracts.processor import KV_WIDTH, eager

from kvtune.engines.base import ServerSpec
from kvtune.profilers import probe as probing
from kvtune.profilers.load import client, runtime
from kvtune.profilers.probe import probe
from kvtune.profilers.probe_plan import plan_probe
from kvtune.profilers.scrape import parse_metrics
from kvtune.profilers.step_gaps import observations
from kvtune.profilers.step_time import fit_step_time

pytestmark = pytest.mark.integration

ARGUMENTS = eager(136)
KV_BYTES_PER_TOKEN = 6_144 * KV_WIDTH  # 8 layers x 3 KV heads x 64 x keys and values
VOCAB_SIZE = 49_152
BUDGET_S = 120.0


@pytest.fixture(scope="module")
def server(warm, shallow, tmp_path_factory):
    spec = ServerSpec(str(shallow), served_model_name="m", arguments=ARGUMENTS)
    log = tmp_path_factory.mktemp("probe") / "server.log"
    with warm.launch(spec, log_path=log, start_timeout_s=200) as running:
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
    return len(complete(server.endpoint.url, range(100, 400), 4))


def is_idle(server):
    gauges = page(server).gauges
    return not any(value for key, value in gauges.items() if "num_requests" in key)


@pytest.fixture
def within_the_second_cell(monkeypatch):
    """Has something done in the middle of a cell, after one was seen, however fast the machine."""
    seen = []

    def observed(records, **named):
        seen.append(records)
        return observations(records, **named)

    monkeypatch.setattr(probing, "observations", observed)
    monkeypatch.setattr(client, "TICK_S", 0.01)

    def on_progress(act):
        def watch(progress):
            if seen and progress.in_flight:
                act()

        return watch

    return on_progress


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


def test_an_interrupted_probe_leaves_the_server_idle_and_usable(server, within_the_second_cell):
    pressed = []

    def press():
        if not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    result = probed(server, salt=12, budget_s=600.0, on_progress=within_the_second_cell(press))
    assert result.notes == ("the probe was interrupted after 1 cells",)
    assert len(result.observations) > 0
    assert is_idle(server)
    assert answer(server) == 4


def test_a_probe_out_of_time_leaves_the_server_idle_and_usable(
    server, within_the_second_cell, monkeypatch
):
    late_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late_s[0])
    monkeypatch.setattr(probing, "time", clock)

    def end():
        late_s[0] = 600.0

    result = probed(server, salt=13, budget_s=600.0, on_progress=within_the_second_cell(end))
    (note,) = result.notes
    assert note.startswith("the probe saw 1 of ")
    assert "its 600 s are over" in note
    assert len(result.observations) > 0
    assert is_idle(server)
    assert answer(server) == 4


def test_a_server_in_use_is_not_probed(server):
    with requested(server.endpoint.url, [5, 6, 7], 1900, stream=True) as answer:
        answer.readline()
        result = probed(server, salt=14)
    assert result.requests == 0
    assert "others use the server" in result.notes[0]
