from dataclasses import replace

import pytest
from contracts.policy_samples import LLAMA_8B, SMOLLM2, engine, on_cpu, on_gpu

from kvtune.engines.vllm.arguments import to_argv
from kvtune.kernels.device import DeviceDetail
from kvtune.policies.kv_skip_layers import KNOB, KvSkipLayers
from kvtune.types import Harm


def arguments(ctx, ends=2):
    return KvSkipLayers().choice({KNOB: ends}, ctx).arguments


def test_the_first_and_last_two_layers_are_named_as_the_engine_wants_them():
    assert to_argv(arguments(on_cpu())) == [
        "--kv-cache-dtype-skip-layers",
        *("0", "1", "28", "29"),
    ]
    assert arguments(on_gpu()) == {"kv-cache-dtype-skip-layers": ["0", "1", "30", "31"]}


def test_it_harms_no_more_than_the_mildest_format_that_it_goes_with():
    assert KvSkipLayers().choice({KNOB: 2}, on_cpu()).harm is Harm.NEAR_LOSSLESS


def test_it_matters_only_beside_a_format_that_leaves_the_layers_to_us():
    (knob,) = KvSkipLayers().knobs(on_gpu())
    formats = knob.active_when["kv_cache_dtype"]
    assert "fp8" in formats
    assert "int4_per_token_head" in formats
    assert not {"auto", "turboquant_k8v4"} & set(formats)


@pytest.mark.parametrize(
    ("ctx", "why"),
    [
        (on_cpu(model=None), "not known how many layers"),
        (on_cpu(engine=engine("simulated")), "simulated engine"),
        (on_cpu(model=replace(SMOLLM2, layers=4)), "4 layers"),
        (on_cpu(detail=DeviceDetail(None, frozenset({"avx2"}))), "AVX-512"),
        (on_cpu(base_arguments={"kv-cache-dtype": "auto"}), "auto is fixed"),
        (on_gpu(base_arguments={"kv-cache-dtype": "turboquant_k8v4"}), "turboquant_k8v4 is fixed"),
    ],
)
def test_it_is_refused_where_no_layer_would_differ(ctx, why):
    assert why in KvSkipLayers().supports(ctx).reason


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_it_mends_a_format_that_the_user_fixed(dtype):
    assert KvSkipLayers().supports(on_cpu(base_arguments={"kv-cache-dtype": dtype})).ok


def test_the_smallest_model_that_has_layers_between_its_ends():
    ctx = on_gpu(model=replace(LLAMA_8B, layers=5))
    assert KvSkipLayers().supports(ctx).ok
    assert arguments(ctx) == {"kv-cache-dtype-skip-layers": ["0", "1", "3", "4"]}
