"""A probe of real (simulated) servers, and of a pretended engine whose costs are known."""

import asyncio
import os
import signal
import threading
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest
from contracts.decoding import Sequence, decode

from kvtune.engines.base import ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.profilers import probe as module
from kvtune.profilers.load import runtime
from kvtune.profilers.load.client import ClosedLoop, replay
from kvtune.profilers.load.request import prepare
from kvtune.profilers.probe import probe
from kvtune.profilers.scrape import ENGINES, Samples, parse_metrics
from kvtune.profilers.step_time import fit_step_time
from kvtune.types import EffectiveConfig, Endpoint, Failure, FailureClass, LoadRun, Request

SMALL = {"max-model-len": 1024, "kv-cache-memory-bytes": "256M", "block-size": 32}


@pytest.fixture
def serve(tmp_path):
    running = []

    def start(**options):
        arguments = {name.replace("_", "-"): value for name, value in options.items()}
        spec = ServerSpec("m", arguments={"simulate-time-scale": 0.02, **SMALL, **arguments})
        running.append(SimulatedEngine().launch(spec, log_path=tmp_path / "server.log"))
        return running[-1]

    yield start
    for server in running:
        server.stop()


def probed(server, **changed):
    options = {"budget_s": 20.0, "salt": 5, "vocab_size": 30_000, "resets_cache": True, **changed}
    return runtime.run(probe(server.endpoint, server.effective, **options))


def page(server):
    with urllib.request.urlopen(f"{server.endpoint.url}/metrics") as answer:
        return parse_metrics(answer.read().decode())


def generate(server, tokens=8, prompt=(1, 2, 3) * 40):
    request = prepare(
        Request(token_ids=prompt),
        model="m",
        index=0,
        fixed_length=True,
        output_tokens=tokens,
        cache_salt=None,
    )
    return replay(server.endpoint, [request], ClosedLoop(1))


def hits(server):
    return page(server).counters["vllm:prefix_cache_hits_total"]


def test_a_probe_sends_what_it_says_and_leaves_an_idle_server(serve):
    server = serve()
    asyncio.run(generate(server))
    before = page(server).counters
    result = probed(server)
    after = page(server)
    assert result.notes == ()
    assert result.cells > 9
    finished = 'vllm:request_success_total{finished_reason="length"}'
    assert after.counters[finished] - before[finished] == result.requests
    for series, spent in (
        ("vllm:prompt_tokens_total", result.input_tokens),
        ("vllm:generation_tokens_total", result.generated_tokens),
    ):
        assert after.counters[series] - before[series] == spent
    assert after.counters["vllm:num_preemptions_total"] == 0
    assert after.gauges["vllm:num_requests_running"] == 0
    found = after.counters["vllm:prefix_cache_hits_total"]
    # On a busy machine the time ends before the cells that find the most.
    assert found > result.input_tokens / 4, "later cells find their prompts"
    asyncio.run(generate(server))
    assert hits(server) == found, "the cache is empty"
    assert result.observations.sequences.max() > 4
    assert result.observations.resident_tokens.max() > 3000


def test_the_cache_of_a_server_of_others_is_not_emptied(serve):
    server = serve()
    asyncio.run(generate(server))
    result = probed(server, budget_s=3.0, resets_cache=False)
    assert any("age out" in note for note in result.notes)
    before = hits(server)
    asyncio.run(generate(server))
    assert hits(server) > before


def test_a_server_without_prefix_caching_has_nothing_to_be_left_in(serve):
    result = probed(serve(enable_prefix_caching=False), budget_s=1.0, resets_cache=False)
    assert not any("age out" in note for note in result.notes)


def test_a_busy_server_is_left_alone(serve, monkeypatch):
    monkeypatch.setattr(module, "IDLE_WAIT_S", 0.3)
    server = serve(simulate_time_scale=1.0)

    async def run():
        other = asyncio.create_task(generate(server, tokens=200))
        while not page(server).gauges["vllm:num_requests_running"]:
            await asyncio.sleep(0.05)
        before = page(server).counters["vllm:prompt_tokens_total"]
        result = await probe(
            server.endpoint,
            server.effective,
            budget_s=5.0,
            salt=1,
            vocab_size=30_000,
            resets_cache=True,
        )
        sent = page(server).counters["vllm:prompt_tokens_total"] - before
        other.cancel()
        return result, sent

    result, sent = asyncio.run(run())
    assert sent == result.requests == 0
    assert "others use the server" in result.notes[0]


def test_a_server_of_several_engines_is_left_alone(serve, monkeypatch):
    async def read(self, only=None):
        return Samples({}, {"vllm:num_requests_running": 0.0, ENGINES: 2.0})

    monkeypatch.setattr(module.Scraper, "read", read)
    result = probed(serve())
    assert result.requests == 0
    assert "spread over several engines" in result.notes[0]


def test_others_who_come_in_between_end_the_probe(serve, monkeypatch):
    server = serve()
    calls = []

    async def replay_beside_others(*arguments, **options):
        calls.append(arguments)
        run = await replay(*arguments, **options)
        if len(calls) < 5:
            return run
        counters = {**run.counters, 'vllm:request_success_total{finished_reason="stop"}': 1.0}
        return LoadRun(run.records, run.duration_s, run.client_cpu_s, counters, run.gauges)

    monkeypatch.setattr(module, "replay", replay_beside_others)
    result = probed(server)
    assert result.cells == 2, "of five replays two were the pilot's"
    assert "others used the server meanwhile" in result.notes[0]


def test_the_time_ends_a_probe_with_what_it_has(serve):
    server = serve(simulate_time_scale=1.0)
    result = probed(server, budget_s=2.5)
    # How many cells fit depends on how busy this machine is.
    assert result.cells == 0 or len(result.observations) > 0
    assert "its 2.5 s are over" in result.notes[0]
    assert page(server).gauges["vllm:num_requests_running"] == 0


def test_a_server_that_dies_ends_a_probe_with_what_it_has(serve):
    server = serve(simulate_crash_after_requests=9)
    result = probed(server, should_stop=server.failure)
    assert result.cells > 0
    assert "the probe ended after" in result.notes[0]
    assert len(result.notes) == 1, "nobody is there to be left idle"


def test_requests_that_fail_end_a_probe(serve):
    result = probed(serve(simulate_error_rate=1.0))
    assert result.cells == 0
    assert "1 of 1 requests failed" in result.notes[0]
    assert len(result.observations) == 0


def test_a_failure_that_its_owner_knows_of_ends_a_probe(serve):
    server = serve()
    gone = Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="it is gone")
    result = probed(server, should_stop=lambda: gone)
    assert "it is gone" in result.notes[0]


def test_ctrl_c_ends_the_probe_and_not_the_program(serve):
    server = serve(simulate_time_scale=1.0)
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    result = probed(server, budget_s=60.0)
    timer.join()
    assert "interrupted" in result.notes[0]
    assert result.wall_s < 30
    assert page(server).gauges["vllm:num_requests_running"] == 0


def test_an_answer_without_a_token_says_nothing_of_the_speed(serve, monkeypatch):
    server = serve()

    async def replay_without_tokens(*arguments, **options):
        run = await replay(*arguments, **options)
        records = tuple(replace(record, first_token_s=None, gaps_s=()) for record in run.records)
        return replace(run, records=records)

    monkeypatch.setattr(module, "replay", replay_without_tokens)
    result = probed(server)
    assert (result.cells, result.requests) == (0, 2), "both are the pilot's"
    assert result.notes == (
        "the probe ended after 0 cells: the request that was to show its speed brought no token",
    )


def test_a_server_too_small_is_not_sent_anything(serve):
    server = serve(max_num_seqs=1)
    result = probed(server)
    assert result.requests == 0
    assert "batches cannot vary" in result.notes[0]
    assert page(server).counters["vllm:prompt_tokens_total"] == 0


TRUE = {"fixed_s": 0.05, "per_sequence_s": 0.002, "per_kv_token_s": 4e-6}


@pytest.fixture
def pretended(monkeypatch):
    """A probe of a pretended engine, in a time of its own: not that of the testing machine."""
    clock = SimpleNamespace(now_s=0.0, hours_at=None, sent=0)

    async def replay(endpoint, requests, arrivals, **options):
        records = decode(
            [Sequence(0, item.input_tokens, item.output_tokens) for item in requests],
            prefill_s=1e-4,
            **TRUE,
        )
        clock.sent += 1
        clock.now_s += max(record.end_s for record in records)
        clock.now_s += 3600.0 if clock.sent == clock.hours_at else 0.0
        return LoadRun(tuple(records), 1.0, 0.0, {}, {})

    monkeypatch.setattr(module, "replay", replay)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    effective = EffectiveConfig(
        max_model_len_tokens=2048, kv_cache_size_tokens=20_000, block_size_tokens=32
    )
    endpoint = Endpoint("http://h:1", "m", is_vllm=False)

    def run(budget_s, hours_at=None):
        clock.hours_at = hours_at
        options = {"salt": 3, "vocab_size": 30_000, "resets_cache": False}
        return asyncio.run(probe(endpoint, effective, budget_s=budget_s, **options))

    return run


def test_the_costs_of_an_engine_are_found(pretended):
    model = fit_step_time(pretended(60.0).observations, source="probe")
    assert model.fixed_s.estimate == pytest.approx(0.05, rel=1e-4)
    assert model.per_sequence_s.estimate == pytest.approx(0.002, rel=1e-3)
    assert model.per_kv_token_s.estimate == pytest.approx(4e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("cells", "notes"), [(4, ["the probe saw 4 of 10 cells: its 60 s are over"]), (13, [])]
)
def test_time_that_ends_is_said_unless_a_whole_round_was_seen(pretended, cells, notes):
    """The cell after these takes hours, after two requests of the pilot."""
    result = pretended(60.0, hours_at=2 + cells + 1)
    assert result.cells == cells
    assert [note for note in result.notes if "cells" in note] == notes
