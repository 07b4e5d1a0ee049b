from dataclasses import replace

import pytest
from contracts.policy_samples import LLAMA_8B, SMOLLM2, engine, on_cpu, on_gpu

from kvtune.kernels.device import DeviceDetail
from kvtune.policies.kv_dtype import FP8, OFFERED_LOSSY, REFUSED, KvDtype, kv_dtype_support
from kvtune.types import Harm

ALL_OF_VLLM = {
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "nvfp4_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "ultraquant_4bit",
    "int4_per_token_head",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
}


def support(dtype, ctx):
    return kv_dtype_support(dtype, ctx.engine, ctx.device, ctx.model, ctx.detail)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_every_format_of_vllm_has_its_verdict(platform):
    assert {"auto", *FP8, *OFFERED_LOSSY, *REFUSED[platform]} == ALL_OF_VLLM
    assert not set(FP8) & set(REFUSED[platform])
    assert not set(OFFERED_LOSSY) & set(REFUSED["cuda"])
    assert set(OFFERED_LOSSY) < set(REFUSED["cpu"])


@pytest.mark.parametrize("dtype", sorted(ALL_OF_VLLM))
def test_on_a_cpu_only_what_answers_right_is_allowed(dtype):
    allowed = support(dtype, on_cpu())
    assert allowed.ok == (dtype in {"auto", *FP8})
    if not allowed.ok:
        assert allowed.reason.startswith(dtype)


# The formats that were run on a CPU with long prompts, and what came out.
@pytest.mark.parametrize(
    "dtype",
    [
        "int8_per_token_head",
        "int4_per_token_head",
        "fp8_per_token_head",
        "turboquant_4bit_nc",
        "nvfp4",
        "fp8_inc",
    ],
)
def test_what_was_seen_to_corrupt_prompts_says_so(dtype):
    assert "garbage" in support(dtype, on_cpu()).reason


def test_bfloat16_would_corrupt_a_float32_model():
    assert "float32" in support("bfloat16", on_cpu()).reason


def test_a_cpu_without_wide_vectors_has_no_fp8():
    assert (
        "AVX-512" in support("fp8", on_cpu(detail=DeviceDetail(None, frozenset({"avx2"})))).reason
    )
    for flags in ({"avx512f"}, {"amx_tile"}, set()):
        assert support("fp8", on_cpu(detail=DeviceDetail(None, frozenset(flags)))).ok
    assert support("fp8", on_cpu(detail=None)).ok


def test_head_sizes_that_the_cpu_kernel_refuses_are_refused():
    assert support("fp8", on_cpu(model=replace(SMOLLM2, head_dim=96))).ok
    refused = support("fp8", on_cpu(model=replace(SMOLLM2, head_dim=80)))
    assert "multiple of 32, not 80" in refused.reason
    assert support("fp8", on_gpu(model=replace(LLAMA_8B, head_dim=80))).ok


@pytest.mark.parametrize(
    ("dtype", "capability", "ok"),
    [
        ("fp8", (7, 5), False),
        ("fp8", (8, 0), True),
        ("fp8", (9, 0), True),
        ("fp8_per_token_head", (8, 6), False),
        ("fp8_per_token_head", (8, 9), True),
        ("int8_per_token_head", (7, 5), True),
        ("int4_per_token_head", (7, 5), True),
        ("turboquant_k8v4", (7, 5), True),
    ],
)
def test_what_a_gpu_takes_depends_on_its_capability(dtype, capability, ok):
    found = support(dtype, on_gpu(detail=DeviceDetail(capability)))
    assert found.ok == ok
    assert ok or f"this GPU has {capability[0]}.{capability[1]}" in found.reason


def test_formats_that_no_limit_on_answers_allows_are_not_offered_on_a_gpu():
    for dtype, loss in (("turboquant_k3v4_nc", "11%"), ("turboquant_3bit_nc", "21%")):
        assert loss in support(dtype, on_gpu()).reason


def test_the_engines_build_decides_not_the_device_it_stands_beside():
    assert "CPU" in support("nvfp4", on_gpu(engine=engine("cpu"))).reason
    assert "CPU" not in support("nvfp4", on_gpu(engine=engine("simulated"))).reason


def test_a_format_nobody_knows_is_refused():
    assert "kvtune knows" in support("int3", on_cpu()).reason


def test_on_a_gpu_the_lever_offers_formats_of_fewer_bits_as_lossy():
    (knob,) = KvDtype().knobs(on_gpu())
    assert knob.choices[:3] == ("auto", "fp8", "fp8_e5m2")
    assert knob.choices[3:] == OFFERED_LOSSY
    for dtype in OFFERED_LOSSY:
        choice = KvDtype().choice({"kv_cache_dtype": dtype}, on_gpu())
        assert choice.harm is Harm.LOSSY
        assert choice.arguments == {"kv-cache-dtype": dtype}
    old = on_gpu(detail=DeviceDetail((7, 5)))
    assert "fp8" not in KvDtype().knobs(old)[0].choices
    assert "int8_per_token_head" in KvDtype().knobs(old)[0].choices


def test_the_lever_is_near_lossless_and_offers_two_formats_on_a_cpu():
    (knob,) = KvDtype().knobs(on_cpu())
    assert knob.choices == ("auto", "fp8", "fp8_e5m2")
    choice = KvDtype().choice({"kv_cache_dtype": "fp8"}, on_cpu())
    assert choice.harm is Harm.NEAR_LOSSLESS
    assert choice.arguments == {"kv-cache-dtype": "fp8"}


def test_every_refused_format_reaches_the_user():
    refused = KvDtype().refused_values(on_cpu())
    assert set(refused) == {f"kv_cache_dtype={dtype}" for dtype in REFUSED["cpu"]}
    old = on_gpu(detail=DeviceDetail((7, 5)))
    assert "7.5" in KvDtype().refused_values(old)["kv_cache_dtype=fp8"]
    narrow = on_cpu(detail=DeviceDetail(None, frozenset({"avx2"})))
    assert "AVX-512" in KvDtype().supports(narrow).reason


def test_a_connector_on_a_cpu_excludes_fp8():
    base = {"kv-transfer-config": {"kv_connector": "ExampleConnector"}}
    assert "connector" in KvDtype().supports(on_cpu(base_arguments=base)).reason
    assert KvDtype().supports(on_gpu(base_arguments=base)).ok
