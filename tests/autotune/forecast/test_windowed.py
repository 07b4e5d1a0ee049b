"""Sequences that keep their first and latest tokens, and free the pages between."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from contracts.scheduling import used_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.autotune.forecast.replay import System, simulate
from kvtune.autotune.forecast.requests import SimulatedRequest
from kvtune.autotune.forecast.sparse_reads import SparseReads
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.autotune.forecast.windowed import WindowedScheduler
from kvtune.engines.simulated.blocks import BlockPool, prefix_hashes
from kvtune.engines.simulated.scheduler import Limits, Scheduler, Sequence
from kvtune.errors import BadInput
from kvtune.policies.sink_window import SinkWindow
from kvtune.profilers.load.arrivals import ClosedLoop

KEPT = SinkWindow(sink_tokens=2, window_tokens=8, block_tokens=4)
LIMITS = Limits(token_budget=8, max_active=8, prefix_caching=False)
COST = StepCost(fixed_s=1.0)


def scheduler_of(pool, limits=LIMITS, kept=KEPT):
    return WindowedScheduler(pool, 4, limits, kept, limits.token_budget)


def used_by_one(prompt_tokens, output_tokens):
    """Blocks of 4 tokens that a lone sequence holds in each step."""
    pool = BlockPool(99, caching=False)
    scheduler = scheduler_of(pool)
    return used_blocks(pool, scheduler, prompt_tokens, output_tokens)


def test_a_prompt_frees_its_middle_while_it_is_computed():
    # Chunks of 8. At 16 computed tokens the window begins with page 2, so page 1 goes; at 24 and 32
    # two more each. Then 40 tokens are there: a page of sinks, two of the window, the one written.
    assert used_by_one(40, 4) == [2, 4, 5, 5, 5, 4, 4, 4]


def test_a_short_sequence_is_served_as_without_a_window():
    assert used_by_one(9, 4) == [2, 3, 3, 3, 3]


def test_a_prompt_longer_than_the_pool_is_served_if_what_it_keeps_fits():
    requests = [SimulatedRequest(100, 20, range(100))]
    # A page of sinks, two of the window, two of a step, and one more.
    system = System(1 + 6, 4, LIMITS, reads=SparseReads(4, KEPT), in_flight_tokens=8)
    assert len(simulate(requests, ClosedLoop(1), system, COST).run.records) == 1
    with pytest.raises(BadInput, match="does not fit"):
        simulate(requests, ClosedLoop(1), replace(system, blocks=6), COST)


def test_more_sequences_run_at_once():
    requests = [SimulatedRequest(40, 20, range(at * 100, at * 100 + 40)) for at in range(4)]
    system = System(1 + 16, 4, LIMITS)
    assert simulate(requests, ClosedLoop(4), system, COST).peak_running == 1
    windowed = replace(system, reads=SparseReads(4, KEPT), in_flight_tokens=8)
    assert simulate(requests, ClosedLoop(4), windowed, COST).peak_running >= 3


def test_capacity_is_what_the_engine_reports():
    system = System(
        91, 128, LIMITS, reads=SparseReads(128, SinkWindow(4, 1024, 128)), in_flight_tokens=256
    )
    # 12 blocks a request, 7.58 requests of 8,192 tokens.
    assert replace(system, longest_tokens=8192).capacity_tokens == 62_122
    assert replace(system, longest_tokens=8192, reads=None).capacity_tokens == 91 * 128


def hits_of_a_second_prompt(kept):
    """Tokens of the cache that a prompt of 60 tokens finds after an equal one."""
    limits = replace(LIMITS, prefix_caching=True)
    pool = BlockPool(99, caching=True)
    scheduler = scheduler_of(pool, limits, kept)
    hashes = prefix_hashes(range(60), 4)
    second = Sequence(1, 60, 2, list(hashes))
    for sequence in (Sequence(0, 60, 2, list(hashes)), second):
        scheduler.add(sequence)
        while not scheduler.is_idle:
            scheduler.complete(scheduler.schedule(), 0.0)
    return second.cached_tokens


def test_only_what_was_computed_with_all_before_it_is_shared():
    # A page of sinks, two of the window, and the page after them.
    assert hits_of_a_second_prompt(KEPT) == 16
    assert hits_of_a_second_prompt(replace(KEPT, window_tokens=400)) == 56


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    window=st.integers(1, 40),
    sinks=st.integers(0, 9),
    spare=st.integers(0, 20),
    caching=st.booleans(),
)
def test_every_request_ends_and_all_blocks_come_back(seed, window, sinks, spare, caching):
    numbers = random.Random(seed)
    limits = replace(LIMITS, prefix_caching=caching)
    kept = SinkWindow(sinks, window, 4)
    most = kept.blocks_per_request(limits.token_budget)
    pool = BlockPool(1 + most + spare, caching=caching)
    scheduler = scheduler_of(pool, limits, kept)
    waiting = [
        Sequence(
            number,
            tokens := numbers.randint(1, 120),
            numbers.randint(1, 30),
            prefix_hashes(range(tokens), 4),
        )
        for number in range(12)
    ]
    for sequence in waiting:
        scheduler.add(sequence)
    for _ in range(20_000):
        if scheduler.is_idle:
            break
        step = scheduler.schedule()
        assert all(len(sequence.blocks) <= most for sequence in scheduler.running)
        scheduler.complete(step, 0.0)
    assert scheduler.is_idle
    assert pool.used == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), blocks=st.integers(31, 60), caching=st.booleans())
def test_a_window_that_nothing_leaves_plans_as_an_engine_without_one(seed, blocks, caching):
    limits = replace(LIMITS, prefix_caching=caching)
    told = []
    for windowed in (False, True):
        numbers = random.Random(seed)
        pool = BlockPool(blocks, caching=caching)
        scheduler = (
            scheduler_of(pool, limits, SinkWindow(0, 1000, 4))
            if windowed
            else Scheduler(pool, 4, limits)
        )
        for number in range(6):
            tokens = numbers.randint(1, 90)
            scheduler.add(
                Sequence(number, tokens, numbers.randint(1, 20), prefix_hashes(range(tokens), 4))
            )
        plans = []
        while not scheduler.is_idle:
            step = scheduler.schedule()
            plans.append(([(one.number, tokens) for one, tokens in step.chunks], pool.used))
            scheduler.complete(step, 0.0)
        told.append(plans)
    assert told[0] == told[1]
