"""The simulation in virtual time, against small cases computed by hand and the running server."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.autotune.forecast.replay import TURNAROUND_S, System, simulate
from kvtune.autotune.forecast.requests import SimulatedRequest
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.engines.simulated import loop as engine_loop
from kvtune.engines.simulated.costs import StepClock, limits_of, plan_capacity
from kvtune.engines.simulated.options import Settings
from kvtune.engines.simulated.scheduler import Limits
from kvtune.errors import BadInput
from kvtune.profilers.load.arrivals import ClosedLoop, OpenLoop

LIMITS = Limits(token_budget=64, max_active=8, prefix_caching=False)
CACHING = Limits(token_budget=64, max_active=8)
COST = StepCost(fixed_s=1.0, per_prefill_token_s=0.1)


def unlike(prompt_tokens: int, output_tokens: int, due_s: float = 0.0, seed: int = 0):
    numbers = random.Random(f"{seed} {prompt_tokens} {output_tokens} {due_s}")
    content = [numbers.randrange(1 << 40) for _ in range(prompt_tokens)]
    return SimulatedRequest(prompt_tokens, output_tokens, content, due_s)


def test_lone_request_waits_for_its_prefill_and_then_a_step_a_token():
    cost = StepCost(1.0, per_sequence_s=0.5, per_kv_token_s=0.01, per_prefill_token_s=0.1)
    done = simulate([unlike(10, 3)], ClosedLoop(1), System(9, 4, LIMITS), cost)
    (record,) = done.run.records
    # 1 + 10 x 0.1 + 10 x 0.01, then 1 + 0.5 + 0.01 x the tokens held.
    assert record.first_token_s == pytest.approx(TURNAROUND_S + 2.1)
    assert record.gaps_s == pytest.approx((1.61, 1.62))
    assert record.end_s == done.run.duration_s == pytest.approx(TURNAROUND_S + 5.33)
    assert (done.steps, done.mean_sequences, done.mean_resident_tokens) == (3, 1.0, 11.5)
    assert done.prefill_s == pytest.approx(2.1)


def test_second_request_waits_where_the_pool_holds_one():
    system = System(3, 4, LIMITS)
    done = simulate([unlike(8, 1), unlike(8, 1)], ClosedLoop(2), system, COST)
    first_s = [record.first_token_s for record in done.run.records]
    assert first_s == pytest.approx([TURNAROUND_S + 1.8, TURNAROUND_S + 3.6])
    assert (done.peak_usage, done.peak_running, done.preemptions) == (1.0, 1, 0)


def test_last_to_run_is_thrown_out_and_computes_its_tokens_again():
    done = simulate([unlike(4, 4), unlike(4, 4)], ClosedLoop(2), System(4, 4, LIMITS), COST)
    # A prompt each, two steps of the first, five tokens of the second again, two more steps.
    assert done.preemptions == 1
    assert done.steps == 7
    assert done.run.duration_s == pytest.approx(TURNAROUND_S + 1.4 + 1.4 + 2 + 1.5 + 2)
    assert done.run.records[1].gaps_s == pytest.approx((3.5, 1.0, 1.0))


def test_of_requests_sent_at_once_the_first_is_computed_before_the_others():
    done = simulate([unlike(4, 1)] * 4, ClosedLoop(4), System(9, 4, LIMITS), COST)
    first_s = [record.first_token_s for record in done.run.records]
    # 1 + 4 x 0.1, then 1 + 12 x 0.1.
    assert first_s == pytest.approx([TURNAROUND_S + 1.4] + [TURNAROUND_S + 1.4 + 2.2] * 3)


def test_shared_prefix_is_not_computed_again():
    prompt = tuple(range(9))
    requests = [SimulatedRequest(9, 1, prompt), SimulatedRequest(9, 1, prompt)]
    done = simulate(requests, ClosedLoop(1), System(9, 4, CACHING), COST)
    first, second = done.run.records
    assert first.first_token_s - first.sent_s == pytest.approx(TURNAROUND_S + 1.9)
    assert second.first_token_s - second.sent_s == pytest.approx(TURNAROUND_S + 1.1)
    assert (second.cached_tokens, done.prefix_hits_tokens, done.prefix_queries_tokens) == (8, 8, 18)


def test_closed_loop_sends_the_next_request_when_one_ends():
    done = simulate([unlike(8, 1)] * 3, ClosedLoop(1), System(9, 4, LIMITS), COST)
    sent_s = [record.sent_s for record in done.run.records]
    assert sent_s == pytest.approx([0.0, TURNAROUND_S + 1.8, 2 * (TURNAROUND_S + 1.8)])


def test_open_loop_sends_at_the_times_of_the_trace_as_far_as_it_may():
    requests = [unlike(8, 1), unlike(8, 1, 1.0), unlike(8, 1, 10.0)]
    free = simulate(requests, OpenLoop(), System(9, 4, LIMITS), COST)
    assert [record.sent_s for record in free.run.records] == [0.0, 1.0, 10.0]
    limited = simulate(requests, OpenLoop(max_concurrency=1), System(9, 4, LIMITS), COST)
    sent_s = [record.sent_s for record in limited.run.records]
    assert sent_s == pytest.approx([0.0, TURNAROUND_S + 1.8, 10.0])


def test_answer_to_an_end_misses_the_step_that_starts_then():
    requests = [unlike(4, 1), unlike(4, 9), unlike(4, 1)]
    done = simulate(requests, ClosedLoop(2), System(19, 4, LIMITS), COST)
    third = next(record for record in done.run.records if record.index == 2)
    # One whole step of the other request, its prompt, then the step with its own prompt.
    assert third.first_token_s - third.sent_s == pytest.approx(1.4 + 1.4)


def test_run_may_end_before_all_requests_do():
    done = simulate([unlike(8, 1)] * 5, ClosedLoop(1), System(9, 4, LIMITS), COST, until_ended=2)
    assert len(done.run.records) == 2
    assert done.run.duration_s == pytest.approx(2 * (TURNAROUND_S + 1.8))


def test_request_that_can_never_run_is_refused():
    with pytest.raises(BadInput, match="9 tokens does not fit into 8"):
        simulate([unlike(8, 2)], ClosedLoop(1), System(3, 4, LIMITS), COST)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 30), st.floats(0, 20)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    sizes=REQUESTS,
    width=st.integers(1, 6),
    spare=st.integers(0, 30),
    budget=st.integers(1, 80),
    caching=st.booleans(),
    is_open=st.booleans(),
)
def test_every_request_ends_with_its_tokens(sizes, width, spare, budget, caching, is_open):
    requests = sorted((unlike(*size) for size in sizes), key=lambda request: request.due_s)
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    system = System(-(-longest // 4) + 1 + spare, 4, Limits(budget, 4, prefix_caching=caching))
    arrivals = OpenLoop(max_concurrency=width) if is_open else ClosedLoop(width)
    if not is_open:
        for request in requests:
            request.due_s = 0.0
    done = simulate(requests, arrivals, system, COST)
    assert sorted(record.index for record in done.run.records) == list(range(len(requests)))
    for record in done.run.records:
        request = requests[record.index]
        assert record.output_tokens == request.output_tokens == len(record.gaps_s) + 1
        assert request.due_s <= record.sent_s < record.first_token_s <= record.end_s
        assert record.first_token_s + sum(record.gaps_s) == pytest.approx(record.end_s)
    assert done.peak_running <= 4
    assert done.peak_usage <= 1.0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), blocks=st.integers(12, 40), more=st.integers(1, 40))
def test_more_blocks_do_not_lower_the_throughput_of_a_closed_loop(seed, blocks, more):
    numbers = random.Random(seed)
    requests = [unlike(numbers.randint(4, 24), numbers.randint(1, 20), seed=at) for at in range(24)]
    few, many = (
        simulate(requests, ClosedLoop(8), System(count, 4, LIMITS), COST).run.duration_s
        for count in (blocks, blocks + more)
    )
    assert many <= few * 1.15


def test_counts_are_those_of_the_running_simulated_server(monkeypatch):
    options = Settings(
        block_size=32,
        max_model_len=512,
        num_gpu_blocks_override=24,
        max_num_batched_tokens=256,
        max_num_seqs=8,
    )
    numbers = random.Random(3)
    shared = [numbers.randrange(1 << 40) for _ in range(96)]
    requests = []
    for at in range(40):
        own = unlike(numbers.randint(10, 150), numbers.randint(5, 60), seed=at)
        content = [*shared[: numbers.choice([0, 64, 96])], *own.content]
        requests.append(SimulatedRequest(len(content), own.output_tokens, content))
    recorded: list[float] = []

    class Recording(StepClock):
        def duration_s(self, step):
            recorded.append(super().duration_s(step))
            return 0.0

    monkeypatch.setattr(engine_loop, "StepClock", Recording)
    counters = asyncio.run(served(options, requests, width=8))
    capacity = plan_capacity(options)
    cost = StepCost(
        fixed_s=options.simulate_step_s,
        per_sequence_s=options.simulate_token_s,
        per_kv_token_s=options.simulate_kv_bytes_per_token / options.simulate_kv_bytes_per_s,
        per_prefill_token_s=options.simulate_token_s,
    )
    system = System(capacity.blocks, capacity.block_tokens, limits_of(options))
    done = simulate(requests, ClosedLoop(8), system, cost)
    assert done.preemptions == counters["num_preemptions"] > 0
    assert done.prefix_queries_tokens == counters["prefix_cache_queries"]
    assert done.prefix_hits_tokens == counters["prefix_cache_hits"] > 0
    assert done.steps == len(recorded)
    assert done.run.duration_s == pytest.approx(sum(recorded), rel=0.01)


async def served(options, requests, width):
    """Counters of the server's engine after a closed loop of `width`."""
    engine = engine_loop.EngineLoop(options, plan_capacity(options))
    running = asyncio.create_task(engine.run())
    loop = asyncio.get_running_loop()
    left = iter(requests)
    ended = asyncio.Event()
    in_flight = 0

    def send():
        nonlocal in_flight
        request = next(left, None)
        if request is None:
            if in_flight == 0:
                ended.set()
            return
        in_flight += 1
        engine.submit(
            request.prompt_tokens,
            request.hashes(options.block_size),
            request.output_tokens,
            on_token,
            finish_reason="length",
            max_tokens=request.output_tokens,
        )

    def on_token(sequence):
        nonlocal in_flight
        if sequence.done:
            in_flight -= 1
            loop.call_soon(send)  # A client: too late for the step that starts now.

    for _ in range(width):
        send()
    await ended.wait()
    running.cancel()
    return engine.metrics.counters
