"""A probe varies batches and contexts, and fits: into pool, context, sequence slots and time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.probe_plan import (
    FIRST_ROUND_SHARE,
    LONG_BATCH,
    OUTPUT_TOKENS,
    POOL_SHARE,
    SHORT_TOKENS,
    ProbeCell,
    Speed,
    plan_probe,
)
from kvtune.types import EffectiveConfig

ROOMY = EffectiveConfig(
    max_model_len_tokens=2048, kv_cache_size_tokens=20_000, block_size_tokens=32, max_num_seqs=64
)


def contexts(plan):
    return sorted({cell.input_tokens for cell in plan.cells if cell.sequences == LONG_BATCH})


def test_batches_vary_at_one_context_and_contexts_at_one_batch():
    plan = plan_probe(ROOMY, budget_s=30)
    short = [cell.sequences for cell in plan.cells if cell.input_tokens == SHORT_TOKENS]
    assert short == [1, 2, 4, 8, 16, 32]
    assert contexts(plan) == [64, 506, 1012, 2024]  # 2048 less 24 for the answer
    assert ProbeCell(1, 2024) in plan.cells


def test_the_cost_is_that_of_all_rounds_and_the_pilot():
    plan = plan_probe(ROOMY, budget_s=30)
    assert plan.rounds == 4
    assert plan.requests == 4 * (63 + 3 * 4 + 1) + 2
    assert plan.input_tokens == 4 * (63 * 64 + 4 * (506 + 1012 + 2024) + 2024) + 512
    assert plan.generated_tokens == 4 * 76 * 24 + 16
    assert "at most 30 s, 306 requests, 81,408 prompt tokens" in plan.cost()


@given(
    context=st.integers(16, 100_000),
    pool=st.integers(0, 200_000),
    block=st.sampled_from([8, 16, 32, 128, 256]),
    slots=st.integers(1, 300),
)
def test_nothing_that_is_planned_can_be_preempted(context, pool, block, slots):
    effective = EffectiveConfig(
        max_model_len_tokens=context,
        kv_cache_size_tokens=pool,
        block_size_tokens=block,
        max_num_seqs=slots,
    )
    plan = plan_probe(effective, budget_s=30)
    assert bool(plan.cells) != bool(plan.problem)
    for cell in plan.cells:
        tokens = cell.input_tokens + OUTPUT_TOKENS
        assert tokens <= context
        assert cell.sequences <= slots
        assert cell.sequences * -(-tokens // block) * block <= POOL_SHARE * pool


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"max_num_seqs": 1}, "only 1 sequences fit at once"),
        ({"max_num_active_seqs": 1}, "only 1 sequences fit at once"),
        ({"kv_cache_size_tokens": 100}, "only 0 sequences fit at once"),
        ({"max_model_len_tokens": 128}, "room for 104 tokens of context each"),
        ({"kv_cache_size_tokens": 1000}, "room for 168 tokens of context each"),
    ],
)
def test_a_server_too_small_to_vary_anything_is_not_probed(changed, problem):
    plan = plan_probe(ROOMY.model_copy(update=changed), budget_s=30)
    assert plan.cells == ()
    assert problem in plan.problem


def test_a_server_of_which_little_is_known_is_probed_with_care():
    plan = plan_probe(None, budget_s=30)
    assert contexts(plan)[-1] <= 8192 * POOL_SHARE / LONG_BATCH
    assert len(plan.notes) == 2


def test_a_slow_server_gets_shorter_contexts_and_smaller_batches():
    slow = plan_probe(ROOMY, budget_s=30, speed=Speed(200.0, 0.1))
    assert contexts(slow)[-1] < 1000
    assert max(cell.sequences for cell in slow.cells) < 32
    assert slow.rounds == 1
    slowest = plan_probe(ROOMY, budget_s=30, speed=Speed(1.0, 10.0))
    assert contexts(slowest)[-1] >= 4 * SHORT_TOKENS - 4
    assert max(cell.sequences for cell in slowest.cells) == LONG_BATCH


def test_a_fast_server_gets_all_of_it():
    fast = plan_probe(ROOMY, budget_s=30, speed=Speed(50_000.0, 0.005))
    assert fast == plan_probe(ROOMY, budget_s=30)


@given(rate=st.floats(100, 1e5), step_s=st.floats(0.001, 0.05))
def test_the_first_round_leaves_time_for_others_or_is_as_small_as_can_be(rate, step_s):
    plan = plan_probe(ROOMY, budget_s=30, speed=Speed(rate, step_s))
    widest = max(cell.sequences for cell in plan.cells)
    longest = contexts(plan)[-1]
    computed = LONG_BATCH * longest + (widest - LONG_BATCH) * SHORT_TOKENS
    steps_s = sum(OUTPUT_TOKENS * step_s * (1 + cell.sequences / 8) for cell in plan.cells)
    fits = computed / rate + steps_s <= FIRST_ROUND_SHARE * 30 * (1 + 1e-9)
    assert fits or (widest == LONG_BATCH and longest < 512)
