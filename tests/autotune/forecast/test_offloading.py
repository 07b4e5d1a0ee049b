"""What the pool lost comes back from the second tier, for what copying it takes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from contracts.scheduling import outputs_by_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.autotune.forecast.offloading import OffloadingScheduler
from kvtune.autotune.forecast.replay import TURNAROUND_S, System, simulate
from kvtune.autotune.forecast.requests import SimulatedRequest
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.engines.simulated.blocks import BlockPool
from kvtune.engines.simulated.scheduler import Limits, Sequence
from kvtune.profilers.load.arrivals import ClosedLoop

LIMITS = Limits(token_budget=64, max_active=8)
COST = StepCost(fixed_s=1.0, per_prefill_token_s=0.1)
SMALL = System(1 + 3, 4, LIMITS)


def prompt(first):
    return SimulatedRequest(9, 1, range(first, first + 9))


def test_prompt_that_the_pool_lost_is_loaded_in_the_place_of_being_computed():
    requests = [prompt(0), prompt(100), prompt(0)]
    lost = simulate(requests, ClosedLoop(1), SMALL, COST)
    assert lost.prefix_hits_tokens == 0
    tier = replace(SMALL, tier_blocks=9, load_token_s=0.05)
    done = simulate(requests, ClosedLoop(1), tier, COST)
    last = done.run.records[2]
    assert last.cached_tokens == 8
    # 8 tokens loaded, and the last one computed.
    assert last.first_token_s - last.sent_s == pytest.approx(TURNAROUND_S + 8 * 0.05 + 1 + 0.1)


def test_tier_that_is_too_small_forgets_what_was_used_longest_ago():
    requests = [prompt(0), prompt(100), prompt(200), prompt(0)]
    for tier_blocks, hits_tokens in ((4, 0), (6, 8)):
        done = simulate(requests, ClosedLoop(1), replace(SMALL, tier_blocks=tier_blocks), COST)
        assert done.prefix_hits_tokens == hits_tokens


def test_without_prefix_caching_nothing_comes_back():
    off = replace(SMALL, tier_blocks=9, limits=replace(LIMITS, prefix_caching=False))
    done = simulate([prompt(0), prompt(100), prompt(0)], ClosedLoop(1), off, COST)
    assert done.prefix_hits_tokens == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), tier_blocks=st.integers(1, 60), spare=st.integers(0, 20))
def test_every_request_ends_and_all_blocks_come_back(seed, tier_blocks, spare):
    numbers = random.Random(seed)
    pool = BlockPool(20 + spare, caching=True)
    limits = Limits(numbers.randint(8, 64), numbers.randint(1, 6))
    scheduler = OffloadingScheduler(pool, 4, limits, tier_blocks)
    wanted = {}
    for number in range(16):
        length, output = numbers.randint(1, 40), numbers.randint(1, 30)
        first = numbers.choice([0, 0, 100, 1000 * number])
        request = SimulatedRequest(length, output, range(first, first + length))
        scheduler.add(Sequence(number, length, output, request.hashes(4)))
        wanted[number] = output
    assert outputs_by_sequence(scheduler) == wanted
    assert pool.used == 0
