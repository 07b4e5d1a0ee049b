"""Which levers there are, and what they do to pools, limits and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.forecast_baseline import CONFIG, CPU, GPU, TOKEN_BYTES, context, found_on
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.forecast.experience import Experience, MeasuredRead
from kvtune.autotune.forecast.levers import lever_of, levers, stack_lever
from kvtune.autotune.forecast.system import as_reported, system_of
from kvtune.policies.kv_memory import KvMemory
from kvtune.policies.method import History
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.model_cache import read_model_cache

TURBOQUANT = (
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
)


def replace_memory(memory_bytes):
    return GPU.model_copy(update={"memory_bytes": memory_bytes})


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


def sized(**changes):
    """A baseline whose pool was given to it in bytes."""
    ctx = context(**changes)
    return replace(
        ctx, base_arguments={"kv-cache-memory-bytes": ctx.baseline.kv_cache_memory_bytes}
    )


def test_memory_of_a_gpu_is_told_by_the_share_that_a_search_would_set():
    ctx = context()
    doubled = found_on(ctx)["kv memory x2"]
    assert set(doubled.arguments) == {"gpu-memory-utilization"}
    # 16,000 tokens of 23,040 bytes in 141 GB, on top of vLLM's own 0.92.
    share = doubled.arguments["gpu-memory-utilization"]
    assert share == pytest.approx(0.92 + 16_000 * 23_040 / 141e9, abs=2e-6)
    on_cpu = found_on(context(CPU, block_tokens=32))["kv memory x2"]
    assert set(on_cpu.arguments) == {"kv-cache-memory-bytes"}


def test_memory_that_a_gpu_has_not_is_cut_to_what_a_search_tries():
    ctx = context(blocks=300_000, kv_cache_memory_bytes=None)
    found = found_on(ctx)
    assert "kv memory x2" not in found
    # 110.592 GB, and 3% of 141 GB more.
    most = found["kv memory x1.04"]
    assert most.arguments == {"gpu-memory-utilization": 0.95}
    # The arguments are those of a trial, so that it measures what was told.
    tried = KvMemory().choice({"gpu_memory_utilization": 0.95}, as_reported(ctx))
    assert most.arguments == tried.arguments
    assert system_with(ctx, most).blocks == (110_592_000_000 + 4_230_000_000) // (16 * 23_040)
    assert "the most that a search tries" in most.says
    assert system_with(ctx, found["kv memory x0.5"]).blocks == 150_000


def test_memory_beyond_a_share_that_the_user_raised_is_refused():
    ctx = context(blocks=300_000)
    ctx = replace(ctx, base_arguments={"gpu-memory-utilization": 0.95})
    # 0.95 of 141 GB and 110.6 GB more are 227.7 GiB.
    problem = found_on(ctx)["kv memory x2"].problem
    assert problem == "needs 227.7 GiB, the device has 131.3"


def test_pool_in_bytes_that_a_device_cannot_hold_twice_beside_the_weights_is_said():
    ctx = as_reported(sized(blocks=150_000))

    def problems(weight_bytes):
        found = levers(ctx, None, History(600, 200), weight_bytes=weight_bytes)
        by_name = {lever.name: lever for lever in found}
        assert set(by_name["kv memory x2"].arguments) == {"kv-cache-memory-bytes"}
        return by_name["kv memory x2"].problem, by_name["kv memory x0.5"].problem

    # Twice 55.296 GB in 141 GB, with weights of 30 and of 40 GB.
    assert problems(30 * 10**9) == ("", "")
    assert problems(40 * 10**9) == ("needs 140.2 GiB, the device has 131.3", "")


def test_memory_of_the_host_bounds_a_pool_on_a_cpu():
    assert found_on(context(CPU, 1000, 32))["kv memory x2"].problem == ""
    # 6,000 blocks of 32 tokens are 4.12 GiB, on a host with 8.
    larger = found_on(context(CPU, 6000, 32))["kv memory x2"]
    assert larger.problem == "needs 8.2 GiB, the device has 8.0"
    # What holds more than there is here runs elsewhere.
    assert found_on(context(CPU, 20_000, 32))["kv memory x2"].problem == ""


def test_memory_of_blocks_that_the_user_fixed_is_told_in_blocks():
    ctx = replace(context(), base_arguments={"num-gpu-blocks-override": 1000})
    assert found_on(ctx)["kv memory x2"].arguments == {"num-gpu-blocks-override": 2000}


def test_share_of_a_server_that_nobody_started_here_is_not_guessed():
    ctx = context(start_kind="attached")
    assert set(found_on(ctx)["kv memory x2"].arguments) == {"kv-cache-memory-bytes"}
    lever = lever_of({"gpu-memory-utilization": 0.95}, ctx, name="", says="")
    assert "where the server's own share is not known" in lever.problem
    named = replace(ctx, base_arguments={"gpu-memory-utilization": 0.8})
    assert lever_of({"gpu-memory-utilization": 0.95}, named, name="", says="").problem == ""


@pytest.mark.parametrize(
    ("ctx", "problem"),
    [
        (context(CPU, block_tokens=32), "gpu-memory-utilization is not part of the simulation"),
        (
            context(replace_memory(None)),
            "gpu-memory-utilization is not part of the simulation where the memory of the device "
            "is not known",
        ),
        (
            context(model=False, kv_cache_memory_bytes=None),
            "gpu-memory-utilization is not part of the simulation where the pool in bytes is not "
            "known",
        ),
        # A hundredth of 141 GB is more than the pool of 0.37 GB.
        (context(), "gpu-memory-utilization 0.91 leaves the pool no memory"),
    ],
)
def test_share_of_which_too_little_is_known_is_not_forecast(ctx, problem):
    lever = lever_of({"gpu-memory-utilization": 0.91}, ctx, name="", says="")
    assert lever.problem == problem


def test_share_beside_a_pool_in_bytes_does_nothing():
    ctx = sized()
    lever = lever_of({"gpu-memory-utilization": 0.5}, ctx, name="", says="")
    assert lever.problem == ""
    assert system_with(ctx, lever).blocks == 1000


@given(
    share=st.floats(0.925, 1.0),
    blocks=st.integers(100, 300_000),
    model=st.booleans(),
)
def test_what_a_share_adds_goes_to_the_pool(share, blocks, model):
    ctx = context(blocks=blocks, model=model)
    lever = lever_of({"gpu-memory-utilization": share}, ctx, name="", says="")
    added = (share - 0.92) * 141e9 / (16 * 23_040)
    assert system_with(ctx, lever).blocks == pytest.approx(blocks + added, rel=0.01, abs=2)


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


@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head", "int8_per_token_head"])
def test_reads_in_8_bits_may_gain_nothing_on_a_gpu_until_a_trial_measured_them(name):
    lever = found_on(context())[name]
    low, middle, high = lever.read_ratio
    assert 0.5 <= low < middle < 1 < high
    assert "guess" in lever.read_source


@pytest.mark.parametrize(
    "name", ["int4_per_token_head", "turboquant_k8v4", "turboquant_3bit_nc", "turboquant"]
)
def test_reads_of_packed_numbers_may_be_much_slower_on_a_gpu(name):
    lever = found_on(context())[name]
    low, middle, high = lever.read_ratio
    assert low < middle < high
    assert high >= 2
    assert "guess" in lever.read_source


def test_a_trial_that_measured_reads_on_a_gpu_goes_before_the_guess():
    reads = {"fp8": MeasuredRead((0.6, 0.7, 0.8), 2)}
    known = Experience(reads=reads)
    lever = lever_of({"kv-cache-dtype": "fp8"}, context(), name="", says="", experience=known)
    assert lever.read_ratio == (0.6, 0.7, 0.8)
    assert lever.read_source == "as 2 trials here found"


def test_numbers_that_an_eviction_leaves_are_read_in_the_time_of_their_format():
    cache = read_model_cache(CONFIG, "config.json")
    stack = parse_stack("snapkv:budget_tokens=400 + vllm-int8-per-token-head")
    lever = stack_lever(stack, as_reported(context()), cache, History(600, 200))
    alone = found_on(context())["int8_per_token_head"]
    # 400 of 600 tokens of the prompt, and the 200 generated.
    expected = [600 / 800 * part for part in alone.read_ratio]
    assert lever.read_ratio == pytest.approx(expected, rel=0.05)
    assert "guess" in lever.read_source


def test_fp8_is_not_told_to_change_reads_on_a_cpu():
    fp8 = found_on(context(CPU, block_tokens=32))["fp8"]
    assert fp8.read_ratio == (0.8, 1.0, 1.25)
    assert fp8.arguments == {"kv-cache-dtype": "fp8"}


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (20, 20), (50, 60), (600, 200)])
def test_no_lever_is_told_twice_however_short_requests_are(prompt, output):
    cache = read_model_cache(CONFIG, "config.json")
    names = [lever.name for lever in levers(as_reported(context()), cache, History(prompt, output))]
    assert len(set(names)) == len(names)


def test_formats_that_the_engine_gets_wrong_are_reference_only():
    found = found_on(context(CPU, block_tokens=32))
    assert "garbage" in found["int8_per_token_head"].not_served
    assert found["int8_per_token_head"].arguments == {}


def test_bytes_of_formats_are_those_of_the_plan():
    # A slot of 64 channels: 68 of 128 bytes in 8 bits, 36 in 4, with a float32 scale each.
    on_cpu = found_on(context(CPU, block_tokens=32))
    assert on_cpu["int8_per_token_head"].resident_ratio == pytest.approx(68 / 128)
    assert on_cpu["int4_per_token_head"].resident_ratio == pytest.approx(36 / 128)
    assert on_cpu["int4_per_token_head"].read_ratio[1] == pytest.approx(36 / 128)
    ctx = context()
    found = found_on(ctx)
    assert system_with(ctx, found["int8_per_token_head"]).blocks == int(1000.5 * 128 / 68)
    assert system_with(ctx, found["int4_per_token_head"]).blocks == int(1000.5 * 128 / 36)


def test_layers_that_are_skipped_are_held_and_read_in_full():
    ctx = context()
    skipping = {"kv-cache-dtype": "fp8", "kv-cache-dtype-skip-layers": ["0", "1", "28", "29"]}
    lever = lever_of(skipping, ctx, name="", says="")
    assert lever.problem == ""
    # 26 of 30 layers take half of what they took.
    assert system_with(ctx, lever).blocks == pytest.approx(1000 / (17 / 30), abs=1)
    fp8 = found_on(ctx)["fp8"].read_ratio
    assert lever.read_ratio == pytest.approx([(4 + 26 * part) / 30 for part in fp8])


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
    there = found_on(context())["fp8"].read_ratio
    assert found["auto"].read_ratio == pytest.approx(tuple(1 / part for part in reversed(there)))


@pytest.mark.parametrize(
    ("held", "smaller"),
    [
        # Bytes of a key and a value of 64 channels: 128 in fp8, 136 in int8, 72 in int4. The four
        # outer of 30 layers in full precision, 256, make TurboQuant 121, 95, 88 and 81.
        ("fp8", {"int4_per_token_head", *TURBOQUANT}),
        ("fp8_e5m2", {"int4_per_token_head", *TURBOQUANT}),
        ("int8_per_token_head", {"fp8", "int4_per_token_head", *TURBOQUANT}),
        ("turboquant_4bit_nc", {"int4_per_token_head", *TURBOQUANT[2:]}),
        ("int4_per_token_head", set()),
    ],
)
def test_cache_that_is_small_already_is_offered_only_what_is_smaller(held, smaller):
    found = found_on(context(kv_cache_dtype=held))
    formats = {"fp8", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"}
    assert set(found) & (formats | set(TURBOQUANT)) == smaller
    # Formulas of other methods start from full precision.
    assert not any(":budget" in name for name in found)


def test_small_formats_are_compared_in_bytes_with_their_scales():
    ctx = context(kv_cache_dtype="int8_per_token_head")
    found = found_on(ctx)
    # 1,000 blocks and half of one of 68 bytes a key: in 64 or 128 bytes each.
    assert system_with(ctx, found["fp8"]).blocks == int(1000.5 * 68 / 64)
    assert system_with(ctx, found["auto"]).blocks == int(1000.5 * 68 / 128)
    assert system_with(ctx, found["int4_per_token_head"]).blocks == int(1000.5 * 68 / 36)


def test_engine_can_be_told_a_format_with_scales_from_full_precision():
    ctx = as_reported(context())
    system = system_of({"kv-cache-dtype": "int8_per_token_head"}, ctx)
    assert system.blocks == int(1000.5 * 128 / 68)


def test_format_that_nothing_accounts_for_is_said():
    found = found_on(context(kv_cache_dtype="nvfp4"))
    problem = "what a token takes in nvfp4 is not known"
    assert found["auto"].problem == found["int4_per_token_head"].problem == problem
    assert found["kv memory x2"].problem == ""


def test_levers_that_need_the_checkpoint_say_so():
    found = found_on(context(model=False))
    for name in ("turboquant_3bit_nc", "turboquant", "quest:budget_tokens=400"):
        assert found[name].problem == "name the checkpoint with --model"
        assert found[name].not_served
    assert "name the checkpoint with --model" in found["int8_per_token_head"].problem
    assert found["fp8"].problem == ""
    back = found_on(context(model=False, kv_cache_dtype="int8_per_token_head"))["auto"]
    assert back.problem == (
        "what a token takes in int8_per_token_head is not known: name the checkpoint with --model"
    )


def test_pool_of_unknown_size_is_said():
    ctx = replace(context(model=False), baseline=None)
    assert system_of({}, ctx) is None
