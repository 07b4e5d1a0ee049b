"""What the simulated server counts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from raw_client import (
    COMPLETIONS,
    ask,
    ask_json,
    completion,
    connect,
    delta,
    message,
    metrics,
    streamed,
)

from kvtune.engines.base import RunningServer, ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.profilers.load.client import ClosedLoop, replay
from kvtune.profilers.load.request import prepare
from kvtune.profilers.scrape import Samples
from kvtune.types import Request


def test_counters_add_up(server: RunningServer) -> None:
    ask_json(server, "/reset_prefix_cache", {})
    before = metrics(server)
    prompt = list(range(1000, 1300))
    for _ in range(3):
        ask(server, "POST", COMPLETIONS, streamed(prompt, 10))
    after = metrics(server)
    assert delta(before, after, "prompt_tokens_total") == 900
    assert delta(before, after, "generation_tokens_total") == 30
    assert delta(before, after, "prefix_cache_queries_total") == 900
    assert delta(before, after, "prefix_cache_hits_total") == 2 * 256
    assert delta(before, after, "prompt_tokens_cached_total") == 2 * 256
    source = 'prompt_tokens_by_source_total{source="local_compute"}'
    assert delta(before, after, source) == 900 - 2 * 256
    assert delta(before, after, 'request_success_total{finished_reason="length"}') == 3
    assert delta(before, after, "iteration_tokens_total_count") == 30
    # As in vLLM: tokens that came from the cache are not computed.
    assert delta(before, after, "iteration_tokens_total_sum") == 900 - 2 * 256 + 30
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert delta(before, after, f"{name}_count") == 3
    assert delta(before, after, "inter_token_latency_seconds_count") == 27
    inference_s = delta(before, after, "request_inference_time_seconds_sum")
    parts_s = delta(before, after, "request_prefill_time_seconds_sum") + delta(
        before, after, "request_decode_time_seconds_sum"
    )
    assert inference_s == pytest.approx(parts_s)
    # Ten steps of 20 ms, and the rest of a step's costs, at a fiftieth.
    assert 3 * 0.004 < inference_s < 3 * 0.1
    for name in ("estimated_flops_per_gpu_total", "num_preemptions_total"):
        assert delta(before, after, name) == 0


def test_a_cache_that_is_too_small_shows_as_waiting_and_preemption(server: RunningServer) -> None:
    async def load() -> tuple[Samples, Samples, Samples]:
        requests = [
            prepare(
                Request(token_ids=tuple(range(number * 500, number * 500 + 380))),
                model="tiny",
                index=number,
                fixed_length=True,
                output_tokens=200,
                cache_salt=None,
            )
            for number in range(12)
        ]
        before = await asyncio.to_thread(metrics, server)
        running = asyncio.create_task(replay(server.endpoint, requests, ClosedLoop(12)))
        during = before
        while (
            during.gauges["vllm:num_requests_waiting"] == 0
            or during.gauges["vllm:kv_cache_usage_perc"] <= 0.5
        ):
            assert not running.done()
            during = await asyncio.to_thread(metrics, server)
        assert all(record.ok for record in (await running).records)
        return before, during, await asyncio.to_thread(metrics, server)

    before, during, after = asyncio.run(load())
    assert delta(before, after, "num_preemptions_total") > 0
    assert delta(before, after, "request_num_preemptions_sum") > 0
    assert during.gauges["vllm:num_requests_running"] > 0
    waiting = during.gauges["vllm:num_requests_waiting"]
    assert during.gauges['vllm:num_requests_waiting_by_reason{reason="capacity"}'] == waiting
    assert after.gauges["vllm:kv_cache_usage_perc"] == 0
    assert after.gauges["vllm:num_requests_running"] == 0


def test_a_client_that_goes_away_frees_its_blocks(server: RunningServer) -> None:
    before = metrics(server)

    async def leave() -> None:
        reader, writer = await connect(server)
        writer.write(message("POST", COMPLETIONS, streamed(list(range(400)), 1500)))
        await reader.readuntil(b"data: ")
        assert (await asyncio.to_thread(metrics, server)).gauges["vllm:num_requests_running"] == 1
        writer.transport.abort()

    asyncio.run(leave())
    deadline_s = time.monotonic() + 60
    aborted = 'request_success_total{finished_reason="abort"}'
    while delta(before, (after := metrics(server)), aborted) != 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert after.gauges["vllm:num_requests_running"] == 0
    assert after.gauges["vllm:kv_cache_usage_perc"] == 0


def test_statistics_can_be_switched_off_and_estimates_on(tmp_path: Path) -> None:
    engine = SimulatedEngine({"simulate-time-scale": 0.01})
    quiet = ServerSpec("tiny", arguments={"disable-log-stats": True})
    with engine.launch(quiet, log_path=tmp_path / "quiet.log") as server:
        assert b"vllm:" not in ask(server, "GET", "/metrics")[2]
    spec = ServerSpec("tiny", arguments={"enable-mfu-metrics": True})
    with engine.launch(spec, log_path=tmp_path / "log") as server:
        ask_json(server, COMPLETIONS, completion(list(range(100)), 3))
        counters = metrics(server).counters
    # Weights once a step, and the contexts of 100, 101 and 102 tokens.
    read_bytes = 3 * 269_000_000 + (100 + 101 + 102) * 23_040
    assert counters["vllm:estimated_read_bytes_per_gpu_total"] == read_bytes
    assert counters["vllm:estimated_flops_per_gpu_total"] == 269_000_000 * 102
    assert counters["vllm:estimated_write_bytes_per_gpu_total"] == 102 * 23_040
