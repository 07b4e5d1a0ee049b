"""Prompts are computed with all of their pages, of which some are free once they are answered."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from contracts.scheduling import outputs_by_sequence, used_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.autotune.forecast.page_evicting import PageEvictingScheduler, lost_pages
from kvtune.autotune.forecast.replay import System, simulate
from kvtune.autotune.forecast.requests import SimulatedRequest
from kvtune.autotune.forecast.sparse_reads import SparseReads
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.engines.simulated.blocks import BlockPool, prefix_hashes
from kvtune.engines.simulated.scheduler import Limits, Scheduler, Sequence
from kvtune.policies.method import History
from kvtune.policies.plugin_config import PageEvictionConfig, PluginConfig
from kvtune.profilers.load.arrivals import ClosedLoop


def budget_of(share, window=4, sinks=4):
    """What stays in pages of 4 tokens."""
    asked = PageEvictionConfig(share=share, window_tokens=window, sink_tokens=sinks)
    return PluginConfig(page_eviction=asked).page_budget(4)


HALF = budget_of(0.5)
LIMITS = Limits(token_budget=16, max_active=8, prefix_caching=False)
COST = StepCost(fixed_s=1.0)


def used_by_one(prompt_tokens, output_tokens):
    """Blocks of 4 tokens that a lone sequence holds in each step."""
    pool = BlockPool(99, caching=False)
    scheduler = PageEvictingScheduler(pool, 4, LIMITS, HALF)
    return used_blocks(pool, scheduler, prompt_tokens, output_tokens)


def test_pages_are_free_when_the_first_answered_token_is_scheduled():
    # 40 tokens in chunks of 16: ten pages. Five stay, and one more for every four tokens.
    assert used_by_one(40, 6) == [4, 8, 10, 6, 6, 6, 6, 7]


def test_a_prompt_of_pages_that_must_stay_is_served_as_without():
    assert used_by_one(8, 3) == [2, 3, 3]


@pytest.mark.parametrize(
    ("prompt", "tokens", "lost"),
    [(40, 39, 0), (40, 40, 5), (40, 400, 5), (8, 9, 0), (12, 12, 1), (41, 41, 5)],
)
def test_what_is_lost_is_decided_by_the_prompt(prompt, tokens, lost):
    assert lost_pages(HALF, prompt, tokens) == lost


def test_more_sequences_run_at_once():
    requests = [SimulatedRequest(40, 20, range(at * 100, at * 100 + 40)) for at in range(4)]
    # Room for one prompt and its answer; or for one that is answered beside one that is computed.
    system = System(1 + 18, 4, LIMITS)
    assert simulate(requests, ClosedLoop(4), system, COST).peak_running == 1
    evicting = replace(system, reads=SparseReads(4, page_budget=HALF))
    assert simulate(requests, ClosedLoop(4), evicting, COST).peak_running == 2


def test_capacity_is_what_the_engine_reports_and_sequences_are_those_that_decode():
    system = System(91, 4, LIMITS, reads=SparseReads(4, page_budget=HALF))
    assert system.capacity_tokens == 91 * 4
    # 60 tokens are 15 pages, of which five are gone.
    assert system.blocks_at_end(History(40, 20)) == 10
    assert replace(system, reads=None).blocks_at_end(History(40, 20)) == 15


def hits_of_a_second_prompt(budget, prompt_tokens=40):
    """Tokens of the cache that a prompt finds after an equal one was answered."""
    limits = replace(LIMITS, prefix_caching=True)
    pool = BlockPool(99, caching=True)
    scheduler = PageEvictingScheduler(pool, 4, limits, budget)
    hashes = prefix_hashes(range(prompt_tokens), 4)
    second = Sequence(1, prompt_tokens, 9, list(hashes))
    for sequence in (Sequence(0, prompt_tokens, 9, list(hashes)), second):
        scheduler.add(sequence)
        while not scheduler.is_idle:
            scheduler.complete(scheduler.schedule(), 0.0)
    return second.cached_tokens


def test_what_is_free_is_found_until_it_is_taken_but_for_the_end_whose_queries_are_needed():
    assert hits_of_a_second_prompt(HALF) == 36
    assert hits_of_a_second_prompt(budget_of(0.5, window=9)) == 28
    # Of two pages none leave, so that all but the last token may come from the cache.
    assert hits_of_a_second_prompt(budget_of(0.5, window=8), prompt_tokens=8) == 4


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    share=st.floats(0.05, 1.0),
    sinks=st.integers(0, 9),
    spare=st.integers(0, 20),
    caching=st.booleans(),
)
def test_every_request_ends_and_all_blocks_come_back(seed, share, sinks, spare, caching):
    numbers = random.Random(seed)
    budget = budget_of(share, window=6, sinks=sinks)
    limits = replace(LIMITS, prefix_caching=caching)
    pool = BlockPool(1 + 19 + spare, caching=caching)
    scheduler = PageEvictingScheduler(pool, 4, limits, budget)
    wanted = {}
    for number in range(12):
        prompt, output = numbers.randint(1, 45), numbers.randint(1, 30)
        scheduler.add(Sequence(number, prompt, output, prefix_hashes(range(prompt), 4)))
        wanted[number] = output
    assert outputs_by_sequence(scheduler) == wanted
    assert pool.used == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), blocks=st.integers(31, 60), caching=st.booleans())
def test_a_budget_of_the_whole_prompt_plans_as_an_engine_without_one(seed, blocks, caching):
    limits = replace(LIMITS, prefix_caching=caching)
    whole = budget_of(1.0, sinks=0)
    told = []
    for evicts in (False, True):
        numbers = random.Random(seed)
        pool = BlockPool(blocks, caching=caching)
        scheduler = (
            PageEvictingScheduler(pool, 4, limits, whole) if evicts else Scheduler(pool, 4, limits)
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
