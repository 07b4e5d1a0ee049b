"""Which levers there are, and what they do to pools, limits and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.forecast_baseline import CPU, TOKEN_BYTES, context, found_on

from kvtune.autotune.forecast.experience import Experience
from kvtune.autotune.forecast.levers import lever_of
from kvtune.autotune.forecast.system import as_reported, system_of


def system_with(ctx, lever):
    reported = as_reported(ctx)
    return system_of({**reported.base_arguments, **lever.arguments}, reported)


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize(
    ("name", "blocks", "block_tokens"),
    [
        ("kv memory x2", 2000, 16),
        ("kv memory x0.5", 500, 16),
        ("blocks of 64", 250, 64),
        ("fp8", 2000, 16),
    ],
)
def test_pool_follows_memory_block_and_format(model, name, blocks, block_tokens):
    ctx = context(model=model)
    system = system_with(ctx, found_on(ctx)[name])
    # Where the model is not known, the pool may be a block off.
    assert system.blocks == pytest.approx(blocks, abs=0 if model else 1)
    assert system.block_tokens == block_tokens


def test_engine_that_holds_more_than_the_model_says_is_scaled_not_guessed():
    # Half of the blocks that the model's bytes give: something else takes memory too.
    ctx = context(kv_cache_memory_bytes=2000 * 16 * TOKEN_BYTES)
    assert system_with(ctx, found_on(ctx)["kv memory x2"]).blocks in (2000, 2001)


def test_limits_of_the_baseline_are_those_that_it_reported():
    ctx = as_reported(
        context(
            max_num_active_seqs=20,
            long_prefill_token_threshold_tokens=512,
            watermark_ratio=0.1,
            scheduler_reserve_full_isl=False,
        )
    )
    limits = system_of(ctx.base_arguments, ctx).limits
    assert (limits.max_active, limits.token_budget, limits.long_prefill_tokens) == (20, 2048, 512)
    assert (limits.watermark_ratio, limits.reserve_full_prompt) == (0.1, False)
    assert limits.prefix_caching


def test_width_and_budget_move_the_limits():
    ctx = context()
    found = found_on(ctx)
    assert system_with(ctx, found["max-num-seqs 128"]).limits.max_active == 128
    assert system_with(ctx, found["max-num-batched-tokens 1024"]).limits.token_budget == 1024
    assert not system_with(ctx, found["prefix caching off"]).limits.prefix_caching


def test_settings_that_the_engine_refuses_are_not_forecast():
    ctx = context(max_num_batched_tokens=64)
    found = found_on(ctx)
    assert "below max-num-seqs" in found["max-num-seqs 128"].problem
    # A width that nobody asked for follows the budget.
    assert system_with(ctx, found["max-num-batched-tokens 32"]).limits.max_active == 32


def test_arguments_that_the_simulation_does_not_know_are_said():
    lever = lever_of({"enforce-eager": True}, context(), name="eager", says="")
    assert lever.problem == "enforce-eager is not part of the simulation"


def test_fp8_halves_reads_on_a_gpu_and_is_not_told_to_change_them_on_a_cpu():
    assert found_on(context())["fp8"].read_ratio == (0.5, 0.5, 0.75)
    fp8 = found_on(context(CPU, block_tokens=32))["fp8"]
    assert fp8.read_ratio == (0.8, 1.0, 1.25)
    assert fp8.arguments == {"kv-cache-dtype": "fp8"}


def test_formats_that_the_engine_gets_wrong_are_reference_only():
    found = found_on(context(CPU, block_tokens=32))
    assert "garbage" in found["int8_per_token_head"].not_served
    assert found["int8_per_token_head"].arguments == {}


def test_bytes_of_formats_are_those_of_the_plan():
    found = found_on(context())
    # A slot of 64 channels: 68 of 128 bytes in 8 bits, 36 in 4, with a float32 scale each.
    assert found["int8_per_token_head"].resident_ratio == pytest.approx(68 / 128)
    assert found["int4_per_token_head"].read_ratio[1] == pytest.approx(36 / 128)


def test_eviction_holds_less_and_quest_only_reads_less():
    found = found_on(context())
    # Half of 800 tokens of a prompt of 600, and the 200 generated; a position of 4 bytes a head.
    snapkv = found["snapkv:budget_tokens=400"]
    assert snapkv.resident_ratio == pytest.approx(600 / 800, rel=0.02)
    assert not snapkv.reuses_prefixes
    quest = found["quest:budget_tokens=400"]
    assert quest.resident_ratio > 1
    assert quest.read_ratio[1] < 0.7


def test_offload_is_a_second_tier_of_four_pools_on_a_gpu():
    ctx = context(blocks=20_000)
    lever = found_on(ctx)["kv offload"]
    assert lever.problem == ""
    system = system_with(ctx, lever)
    assert system.blocks == 20_000
    assert system.tier_blocks == pytest.approx(80_000, rel=0.01)
    assert lever.load_bytes_per_s == (10e9, 20e9, 50e9)
    slow = lever_of(lever.arguments, ctx, name="", says="", experience=Experience({}, {}, 30e9))
    assert slow.load_bytes_per_s == (10e9, 15e9, 15e9)


def test_offload_on_a_cpu_is_refused_with_the_reason():
    assert (
        "no KV offload where a CPU" in found_on(context(CPU, block_tokens=32))["kv offload"].problem
    )


def test_baseline_in_8_bits_may_go_back_to_full_precision():
    ctx = context(kv_cache_dtype="fp8", num_gpu_blocks=2000)
    found = found_on(ctx)
    assert system_with(ctx, found["auto"]).blocks == 1000
    assert found["auto"].read_ratio == pytest.approx((4 / 3, 2.0, 2.0))
    assert not any(lever.stack for lever in found.values())


def test_pool_of_unknown_size_is_said():
    ctx = replace(context(model=False), baseline=None)
    assert system_of({}, ctx) is None
