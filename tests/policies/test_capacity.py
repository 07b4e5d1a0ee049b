from dataclasses import replace

import pytest
from contracts.policy_samples import GIB, LLAMA_8B, MIB, SMOLLM2, on_cpu, on_gpu, workload
from hypothesis import given
from hypothesis import strategies as st

from kvtune.policies.capacity import (
    SKIP,
    Pool,
    effective_kv_bytes,
    kv_bytes_per_token,
    pool_of,
    reported_kv_bytes,
    resident_requests,
    shortfall,
)
from kvtune.policies.plugin_arguments import STORE_FORMAT, WINDOW_TOKENS
from kvtune.policies.plugin_config import PluginConfig, StoreConfig
from kvtune.types import EffectiveConfig

FP8_OF_256M = {"kv-cache-memory-bytes": "256M", "kv-cache-dtype": "fp8"}


# Measured with vLLM 0.32 and SmolLM2 on a CPU.
@pytest.mark.parametrize(
    ("arguments", "blocks", "tokens"),
    [
        ({"kv-cache-memory-bytes": 64 * MIB}, 22, 2_816),
        ({"kv-cache-memory-bytes": "256M"}, 91, 11_648),
        ({"kv-cache-memory-bytes": "256M", "kv-cache-dtype": "fp8"}, 182, 23_296),
        ({"kv-cache-memory-bytes": "256M", "kv-cache-dtype": "fp8_e5m2"}, 182, 23_296),
        ({"kv-cache-memory-bytes": "256M", "dtype": "float32"}, 45, 5_760),
        ({"kv-cache-memory-bytes": "256M", "dtype": "float32", "kv-cache-dtype": "fp8"}, 182, None),
        ({"kv-cache-memory-bytes": "512M"}, 182, 23_296),
        ({"kv-cache-memory-bytes": "512M", "kv-cache-dtype": "fp8"}, 364, 46_592),
        ({"num-gpu-blocks-override": 96, "block-size": 32}, 96, 3_072),
        ({**FP8_OF_256M, SKIP: ["0", "1", "28", "29"]}, 160, 20_480),
        ({**FP8_OF_256M, SKIP: [0, 29]}, 170, 21_760),
        ({**FP8_OF_256M, SKIP: ["0", "1", "29"]}, 165, None),
        ({"kv-cache-memory-bytes": "256M", SKIP: ["0", "29"]}, 91, 11_648),
    ],
)
def test_blocks_and_tokens_are_those_that_vllm_reported(arguments, blocks, tokens):
    pool = pool_of(arguments, on_cpu())
    assert pool.blocks == blocks
    assert tokens in (None, pool.tokens)


def test_one_block_never_holds_a_token():
    # vLLM itself gave 384 as the longest sequence of 4 blocks of 128.
    assert Pool(4, 128).usable_tokens == 384
    assert Pool(0, 128).usable_tokens == 0


def test_a_pool_that_is_too_small_is_explained_in_tokens():
    arguments = {"kv-cache-memory-bytes": 64 * MIB, "max-model-len": 2689}
    assert shortfall({**arguments, "max-model-len": 2688}, on_cpu()) is None
    assert shortfall(arguments, on_cpu()) == (
        "a KV pool of 22 blocks of 128 tokens holds 2,688 tokens (one block is reserved), less "
        "than one request of max-model-len 2,689"
    )


def test_smaller_blocks_can_make_a_request_fit():
    arguments = {"kv-cache-memory-bytes": 64 * MIB, "max-model-len": 2800}
    assert shortfall(arguments, on_cpu()) is not None
    assert shortfall({**arguments, "block-size": 32}, on_cpu()) is None


def test_the_heads_are_split_between_devices_and_copied_when_too_few():
    ctx = on_gpu()
    assert kv_bytes_per_token({}, ctx) == 131_072
    assert kv_bytes_per_token({"tensor-parallel-size": 4}, ctx) == 32_768
    assert kv_bytes_per_token({"tensor-parallel-size": 16}, ctx) == 16_384


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor-parallel-size": 3},
        {"pipeline-parallel-size": 2},
        {"decode-context-parallel-size": 2},
        {"kv-cache-dtype": "turboquant_4bit_nc"},
        {"dtype": "float8"},
    ],
)
def test_bytes_that_are_not_known_exactly_are_not_guessed(arguments):
    assert kv_bytes_per_token(arguments, on_gpu()) is None
    assert pool_of({**arguments, "kv-cache-memory-bytes": GIB}, on_gpu()) is None
    assert shortfall({**arguments, "kv-cache-memory-bytes": 1}, on_gpu()) is None


def test_without_a_model_only_a_number_of_blocks_says_anything():
    ctx = on_cpu(model=None)
    assert pool_of({"kv-cache-memory-bytes": GIB}, ctx) is None
    assert pool_of({"num-gpu-blocks-override": 10}, ctx) == Pool(10, 128)
    assert shortfall({"num-gpu-blocks-override": 10, "max-model-len": 2000}, ctx) is not None
    assert shortfall({"num-gpu-blocks-override": 10}, ctx) is None


def test_the_baseline_says_how_large_the_pool_is():
    seen = EffectiveConfig(num_gpu_blocks=1000, block_size_tokens=16)
    ctx = on_gpu(baseline=seen)
    assert pool_of({}, ctx) == Pool(1000, 16)
    assert pool_of({"block-size": 64}, ctx) == Pool(250, 64)
    assert pool_of({"kv-cache-dtype": "fp8"}, ctx) == Pool(2000, 16)
    assert pool_of({"gpu-memory-utilization": 0.95}, ctx) is None
    in_bytes = EffectiveConfig(kv_cache_memory_bytes=131_072 * 16 * 7, block_size_tokens=16)
    assert pool_of({}, on_gpu(baseline=in_bytes)) == Pool(7, 16)


def test_residents_are_typical_requests_or_else_the_longest():
    ctx = on_cpu(base_arguments={"kv-cache-memory-bytes": 64 * MIB, "max-model-len": 1000})
    assert resident_requests(ctx) == 2
    assert resident_requests(replace(ctx, fingerprint=workload(300.0, 500.0, 60.0))) == 7
    assert resident_requests(on_cpu()) is None


@given(st.integers(0, 1 << 36), st.sampled_from([16, 32, 64, 128, 256]), st.integers(1, 200_000))
def test_a_request_fits_exactly_when_its_blocks_and_the_reserved_one_do(memory, block, length):
    ctx = on_cpu(model=LLAMA_8B)
    arguments = {
        "kv-cache-memory-bytes": memory,
        "block-size": block,
        "max-model-len": length,
    }
    blocks_needed = -(-length // block) + 1
    fits = blocks_needed * block * 131_072 <= memory
    assert (shortfall(arguments, ctx) is None) == fits


@pytest.mark.parametrize(
    ("effective", "arguments", "each"),
    [
        (None, {}, 2),
        (EffectiveConfig(kv_cache_dtype="auto", model_dtype="bfloat16"), {}, 2),
        (EffectiveConfig(kv_cache_dtype="auto", model_dtype="float32"), {}, 4),
        (EffectiveConfig(kv_cache_dtype="fp8_e4m3", model_dtype="bfloat16"), {}, 1),
        (EffectiveConfig(kv_cache_dtype="auto"), {"kv-cache-dtype": "fp8"}, 2),
        (EffectiveConfig(), {"kv-cache-dtype": "fp8"}, 1),
    ],
)
def test_a_running_server_has_the_last_word_on_its_number_formats(effective, arguments, each):
    bytes_a_token = effective_kv_bytes(LLAMA_8B, arguments, effective)
    assert bytes_a_token == 2 * 32 * 8 * 128 * each
    parallel = {**arguments, "tensor-parallel-size": 4}
    assert effective_kv_bytes(LLAMA_8B, parallel, effective) == bytes_a_token // 4


def test_reported_bytes_of_a_token_are_the_pools_over_its_blocks():
    # vLLM 0.32 and SmolLM2 on a CPU: 22 blocks of 128 in 64 MiB; a token takes 23,040 bytes.
    seen = EffectiveConfig(kv_cache_memory_bytes=64 * MIB, num_gpu_blocks=22, block_size_tokens=128)
    assert reported_kv_bytes({}, seen) == pytest.approx(23_831, abs=1)
    assert reported_kv_bytes({"num-gpu-blocks-override": 22}, seen) is None, "not its blocks"
    for missing in ("kv_cache_memory_bytes", "num_gpu_blocks", "block_size_tokens"):
        assert reported_kv_bytes({}, seen.model_copy(update={missing: None})) is None


@pytest.mark.parametrize(
    ("window_tokens", "fits"),
    # 21 usable blocks: one of sinks, one to spare, and 19 for the window and a step of 256.
    [(1024, True), (19 * 128 - 256, True), (19 * 128 - 255, False)],
)
def test_a_prompt_may_outgrow_the_pool_when_its_middle_is_freed(window_tokens, fits):
    arguments = {
        "kv-cache-memory-bytes": 64 * MIB,
        "max-model-len": 8192,
        "max-num-batched-tokens": 256,
    }
    assert "than one request of" in shortfall(arguments, on_cpu())
    reason = shortfall({**arguments, WINDOW_TOKENS: window_tokens}, on_cpu())
    assert (reason is None) is fits
    assert fits or "less than what StreamingLLM keeps of one request of" in reason


def test_more_requests_are_resident_when_each_keeps_a_window():
    base = {"kv-cache-memory-bytes": "512M", "max-model-len": 8192, "max-num-batched-tokens": 256}
    lengths = workload(input_p50=6000.0, output_p50=144.0)
    assert resident_requests(on_cpu(base_arguments=base, fingerprint=lengths)) == 3
    # 181 usable blocks, 12 for each.
    windowed = on_cpu(base_arguments={**base, WINDOW_TOKENS: 1024}, fingerprint=lengths)
    assert resident_requests(windowed) == 15


@pytest.mark.parametrize(
    ("name", "cell_bytes"), [("int8", 136), ("int4", 72), ("turboquant", 68), ("kivi", 80)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_store_of_the_plugin_has_pages_of_its_own_size(name, cell_bytes, dtype):
    arguments = {"kv-cache-memory-bytes": "256M", "block-size": 32, "dtype": dtype}
    stored = {**arguments, STORE_FORMAT: name}
    # 30 layers of 3 KV heads.
    assert kv_bytes_per_token(stored, on_cpu()) == 90 * cell_bytes
    assert pool_of(stored, on_cpu()) == Pool((256 << 20) // (32 * 90 * cell_bytes), 32)
    told = EffectiveConfig(kv_cache_dtype="auto", model_dtype=dtype)
    assert effective_kv_bytes(SMOLLM2, stored, told) == 90 * cell_bytes


def test_a_server_that_nobody_here_started_tells_what_its_store_takes():
    stored = PluginConfig(store=StoreConfig(format="int8")).model_dump(mode="json")
    told = EffectiveConfig(kv_cache_dtype="auto", model_dtype="float32", plugin=stored)
    assert effective_kv_bytes(SMOLLM2, {}, told) == 90 * 136
    nothing = PluginConfig().model_dump(mode="json")
    plain = told.model_copy(update={"plugin": nothing})
    assert effective_kv_bytes(SMOLLM2, {}, plain) == 90 * 512
    newer = told.model_copy(update={"plugin": {"store": {"format": "int1"}}})
    assert effective_kv_bytes(SMOLLM2, {}, newer) is None


def test_a_request_that_full_precision_has_no_room_for_fits_into_a_store():
    arguments = {"kv-cache-memory-bytes": "64M", "max-model-len": 8192}
    assert "than one request of" in shortfall(arguments, on_cpu())
    # 42 blocks of 128 tokens in 8 bits, 85 in turboquant's 4.
    assert "holds 5,248 tokens" in shortfall({**arguments, STORE_FORMAT: "int8"}, on_cpu())
    assert shortfall({**arguments, STORE_FORMAT: "turboquant"}, on_cpu()) is None
