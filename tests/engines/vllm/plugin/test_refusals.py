"""What the plugin refuses to serve, and that each refusal says what would help."""

from dataclasses import replace

import pytest

from kvtune.engines.vllm.plugin.refusals import Facts, is_tested, refusals
from kvtune.policies.plugin_config import PageEvictionConfig, PluginConfig, StreamingLlmConfig

PLAIN = Facts(vllm_version="0.32.0", platform="cpu")
ASKED = PluginConfig(streaming_llm=StreamingLlmConfig(window_tokens=256))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_plain_decoder_on_one_device_is_served(platform):
    assert refusals(replace(PLAIN, platform=platform), ASKED) == []


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"platform": "rocm"}, "CPU and CUDA only"),
        ({"backend_is_ours": False}, "another plugin"),
        ({"platform": "cuda", "backend_is_ours": False}, "not chosen"),
        ({"tensor_parallel": 2}, "tensor parallelism"),
        ({"pipeline_parallel": 2}, "pipeline parallelism"),
        ({"context_parallel": 2}, "context parallelism"),
        ({"is_speculative": True}, "speculative"),
        ({"has_connector": True}, "connector"),
        ({"matches_part_blocks": True}, "prefix-match-unit"),
        ({"is_generative": False}, "generates text"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"is_multimodal": True}, "images"),
        ({"uses_mla": True}, "MLA"),
        ({"has_state": True}, "state"),
        ({"has_window": True}, "window of their own"),
        ({"shares_layers": True}, "cache of others"),
        ({"kv_dtype": "int8_per_token_head"}, "wrong"),
        ({"skips_kv_layers": True}, "formats of their own"),
    ],
)
def test_what_would_be_served_wrong_is_refused_with_what_helps(changed, why):
    (refusal,) = refusals(replace(PLAIN, **changed), ASKED)
    assert why in refusal.why
    assert refusal.fix


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"platform": "cuda"}, "never tried on this platform"),
        ({"uses_v2_runner": True}, "V2"),
        ({"kv_dtype": "fp8"}, "reads keys back"),
        ({"has_connector": True}, "connector"),
    ],
)
def test_where_page_eviction_would_go_wrong_it_is_refused(changed, why):
    asked = PluginConfig(page_eviction=PageEvictionConfig(budget_tokens=256))
    assert refusals(PLAIN, asked) == []
    (refusal,) = refusals(replace(PLAIN, **changed), asked)
    assert why in refusal.why
    assert refusal.fix


def test_every_reason_is_told_at_once():
    both = replace(PLAIN, tensor_parallel=2, is_speculative=True)
    assert len(refusals(both, ASKED)) == 2


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "fp8", "fp8_e5m2"])
def test_the_formats_that_the_cpu_stores_right_are_served(dtype):
    assert refusals(replace(PLAIN, kv_dtype=dtype), ASKED) == []


def test_other_formats_are_the_gpu_backends_to_judge():
    assert refusals(replace(PLAIN, platform="cuda", kv_dtype="nvfp4"), ASKED) == []


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.32.0", True),
        ("0.32.1rc1", True),
        ("0.33.0", False),
        ("0.3.2", False),
        ("0.320.0", False),
    ],
)
def test_only_versions_that_tests_ran_on_count_as_tested(version, tested):
    assert is_tested(version) is tested
