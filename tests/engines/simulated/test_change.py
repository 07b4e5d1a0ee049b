"""A simulated server that is changed while it runs behaves as one that was started so."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_client import COMPLETIONS, ask, ask_json, completion, delta, metrics

from kvtune.engines.base import CannotChange, RunningServer, ServerSpec
from kvtune.engines.simulated.blocks import BlockPool
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.engines.simulated.scheduler import Limits, Scheduler, Sequence
from kvtune.errors import EngineError

BASE: dict[str, Any] = {
    "simulate-time-scale": 0.05,
    "kv-cache-memory-bytes": "64M",
    "max-model-len": 2048,
}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[RunningServer]:
    spec = ServerSpec("tiny", arguments=BASE)
    with (
        SimulatedEngine() as engine,
        engine.launch(spec, log_path=tmp_path / "server.log") as server,
    ):
        yield server


def prompt(number: int, words: int = 40) -> str:
    return " ".join(f"n{number}w{word}" for word in range(words))


def most_running(server: RunningServer, requests: int) -> float:
    """The most requests that were seen to run while so many were sent at once."""
    with concurrent.futures.ThreadPoolExecutor(requests) as pool:
        asked = [
            pool.submit(ask, server, "POST", COMPLETIONS, completion(prompt(number), 200))
            for number in range(requests)
        ]
        most = 0.0
        while not all(one.done() for one in asked):
            most = max(most, metrics(server).gauges["vllm:num_requests_running"])
    assert all(one.result()[0] == 200 for one in asked)
    return most


def test_as_many_run_as_the_change_says(started: RunningServer) -> None:
    assert most_running(started, 6) > 2
    effective = started.change({**BASE, "max-num-seqs": 2})
    assert (effective.max_num_seqs, effective.start_kind) == (2, "live")
    assert most_running(started, 6) == 2
    started.change(BASE)
    assert started.effective.max_num_seqs == 128
    assert most_running(started, 6) > 2


def test_a_change_forgets_the_prefix_cache(started: RunningServer) -> None:
    body = completion(prompt(1, 400), 2)

    def hits() -> float:
        before = metrics(started)
        assert ask(started, "POST", COMPLETIONS, body)[0] == 200
        return delta(before, metrics(started), "prefix_cache_hits_total")

    assert hits() == 0
    assert hits() > 0
    started.change({**BASE, "watermark": 0.1})
    assert hits() == 0


def test_a_server_cannot_be_made_wider_than_it_was_started(started: RunningServer) -> None:
    with pytest.raises(CannotChange, match="smaller buffers"):
        started.change({**BASE, "max-num-seqs": 256})
    with pytest.raises(CannotChange, match="--block-size is set when"):
        started.change({**BASE, "block-size": 64})
    with pytest.raises(CannotChange, match=r"max_num_batched_tokens \(64\) must be"):
        started.change({**BASE, "max-num-batched-tokens": 64, "max-num-seqs": 65})


def test_a_server_at_work_is_not_changed(
    started: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtune.engines.vllm.live._IDLE_LIMIT_S", 0.1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, started, "POST", COMPLETIONS, completion(prompt(1), 1000))
        while not metrics(started).gauges["vllm:num_requests_running"]:
            pass
        with pytest.raises(CannotChange, match="still at work"):
            started.change({**BASE, "max-num-seqs": 2})
        assert long.result()[0] == 200
    assert started.effective.max_num_seqs == 128


def test_a_server_that_is_dead_cannot_be_changed_and_says_of_what(started: RunningServer) -> None:
    import psutil

    assert started.endpoint.pid is not None
    for process in psutil.Process(started.endpoint.pid).children(recursive=True):
        process.kill()
    psutil.Process(started.endpoint.pid).kill()
    with pytest.raises(EngineError):
        started.change({**BASE, "max-num-seqs": 2})


def test_a_method_that_is_not_there_is_an_error_as_with_vllm(started: RunningServer) -> None:
    assert ask(started, "POST", "/collective_rpc", {"method": "what"})[0] == 500
    assert ask_json(started, "/version")


limits = st.builds(
    Limits,
    token_budget=st.sampled_from([32, 64, 256]),
    max_active=st.integers(1, 6),
    long_prefill_tokens=st.sampled_from([0, 16]),
    reserve_full_prompt=st.booleans(),
    watermark_ratio=st.sampled_from([0.0, 0.2]),
)
loads = st.lists(st.tuples(st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=8)


def steps(scheduler: Scheduler, load: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Who computes how much in each step until all of a load is done."""
    for number, (prompt_tokens, output_tokens) in enumerate(load):
        hashes = [hash((number, block)) for block in range(prompt_tokens // 16)]
        scheduler.add(Sequence(number, prompt_tokens, output_tokens, hashes))
    found = []
    while not scheduler.is_idle:
        step = scheduler.schedule()
        found.append([(sequence.number, tokens) for sequence, tokens in step.chunks])
        scheduler.complete(step, 0.0)
    return found


@settings(max_examples=50)
@given(limits, loads, limits, loads)
def test_the_steps_after_a_change_are_those_of_a_fresh_start(
    before: Limits, earlier: list[tuple[int, int]], after: Limits, load: list[tuple[int, int]]
) -> None:
    pool = BlockPool(20, caching=True)
    changed = Scheduler(pool, 16, before)
    steps(changed, earlier)
    assert pool.reset_cache()
    changed.set_limits(after)
    assert steps(changed, load) == steps(Scheduler(BlockPool(20, caching=True), 16, after), load)
