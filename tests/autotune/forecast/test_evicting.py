"""Prompts take their full size until they are computed, and a part of it after."""

from __future__ import annotations

import random

from contracts.scheduling import outputs_by_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.autotune.forecast.evicting import EvictingScheduler
from kvtune.autotune.forecast.replay import System, simulate
from kvtune.autotune.forecast.requests import SimulatedRequest
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.engines.simulated.blocks import BlockPool
from kvtune.engines.simulated.scheduler import Limits, Sequence
from kvtune.profilers.load.arrivals import ClosedLoop

LIMITS = Limits(token_budget=64, max_active=8, prefix_caching=False)
COST = StepCost(fixed_s=1.0)


def used_blocks(prompt_tokens, output_tokens, kept_ratio, limits=LIMITS):
    """Blocks of 4 tokens that a lone sequence holds after each step."""
    pool = BlockPool(99, caching=limits.prefix_caching)
    scheduler = EvictingScheduler(pool, 4, limits, kept_ratio)
    scheduler.add(Sequence(0, prompt_tokens, output_tokens, []))
    seen = []
    while not scheduler.is_idle:
        step = scheduler.schedule()
        planned = pool.used
        scheduler.complete(step, 0.0)
        seen.append((planned, pool.used))
    return seen


def test_sequence_holds_its_whole_prompt_and_then_half_of_its_tokens():
    # 16 tokens: 4 blocks, then 8 of 16 tokens. Later 9 of 17 need a third block.
    assert used_blocks(16, 4, 0.5) == [(4, 2), (3, 3), (3, 3), (3, 0)]


def test_prompt_in_chunks_is_cut_at_its_end():
    chunks = Limits(token_budget=8, max_active=8, prefix_caching=False)
    assert used_blocks(16, 2, 0.25, chunks) == [(2, 2), (4, 1), (2, 0)]


def test_prompt_that_does_not_fit_waits_however_little_it_will_keep():
    requests = [SimulatedRequest(16, 4, range(first, first + 16)) for first in (0, 100)]
    # Room for one prompt beside what is kept of another, or not.
    for blocks, running in ((1 + 4 + 3, 2), (1 + 5, 1)):
        done = simulate(requests, ClosedLoop(2), System(blocks, 4, LIMITS, 0.5), COST)
        assert done.peak_running == running


def test_preempted_sequence_computes_and_holds_all_of_its_tokens_again():
    pool = BlockPool(1 + 5, caching=False)
    scheduler = EvictingScheduler(pool, 4, LIMITS, 0.5)
    first, second = Sequence(0, 8, 12, []), Sequence(1, 8, 12, [])
    scheduler.add(first)
    scheduler.complete(scheduler.schedule(), 0.0)
    scheduler.add(second)
    while not scheduler.preemptions:
        scheduler.complete(scheduler.schedule(), 0.0)
    assert second.blocks == []
    assert second.computed_tokens == 0
    while second in scheduler.waiting:
        scheduler.complete(step := scheduler.schedule(), 0.0)
    assert (second, second.known_tokens - 1) in step.chunks


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    kept_ratio=st.floats(0.05, 1.0),
    spare=st.integers(0, 20),
    caching=st.booleans(),
)
def test_every_request_ends_and_all_blocks_come_back(seed, kept_ratio, spare, caching):
    numbers = random.Random(seed)
    shared = range(40)
    pool = BlockPool(20 + spare, caching=caching)
    limits = Limits(numbers.randint(8, 64), numbers.randint(1, 6), prefix_caching=caching)
    scheduler = EvictingScheduler(pool, 4, limits, kept_ratio)
    wanted = {}
    for number in range(12):
        prompt, output = numbers.randint(1, 40), numbers.randint(1, 30)
        request = SimulatedRequest(prompt, output, shared[:prompt])
        scheduler.add(Sequence(number, prompt, output, request.hashes(4)))
        wanted[number] = output
    assert outputs_by_sequence(scheduler) == wanted
    assert pool.used == 0
