"""What the plugin refuses to serve, and that each refusal says what would help."""

from dataclasses import replace

import pytest

from kvtune.engines.vllm.plugin.refusals import Facts, is_tested, refusals
from kvtune.policies.plugin_config import (
    PageEvictionConfig,
    PluginConfig,
    QuestConfig,
    StoreConfig,
    StreamingLlmConfig,
    TiersConfig,
)

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
        ({"splits_batches": True}, "one batch only"),
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


def test_kv_heads_choose_apart_on_cpus_only():
    asked = PluginConfig(quest=QuestConfig(pages=8, per_kv_head=True))
    assert refusals(PLAIN, asked) == []
    (refusal,) = refusals(replace(PLAIN, platform="cuda"), asked)
    assert "one KV head" in refusal.why
    together = PluginConfig(quest=QuestConfig(pages=8))
    assert refusals(replace(PLAIN, platform="cuda"), together) == []


TIERS = TiersConfig(host_bytes=1 << 30, disk_bytes=1 << 30, disk_path="/pages")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"platform": "cuda"}, "tried on CPU only"),
        ({"has_connector": True}, "connector"),
        ({"has_prefix_cache": False}, "it is off"),
        ({"prefix_hash": "xxhash"}, "no other tokens have"),
        ({"has_lora": True}, "adapter"),
        ({"data_parallel": 2}, "data parallelism"),
        ({"knows_weights": False}, "no weights to know its model by"),
    ],
)
def test_where_tiers_could_load_what_is_another_thing_they_are_refused(changed, why):
    asked = PluginConfig(tiers=TIERS)
    assert refusals(PLAIN, asked) == []
    (refusal,) = refusals(replace(PLAIN, **changed), asked)
    assert why in refusal.why
    assert refusal.fix


def test_host_memory_alone_ends_with_the_server_and_needs_no_known_weights():
    asked = PluginConfig(tiers=TiersConfig(host_bytes=1 << 30))
    assert refusals(replace(PLAIN, knows_weights=False), asked) == []


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"quest": QuestConfig(pages=8)}, "summaries"),
        ({"page_eviction": PageEvictionConfig(budget_tokens=256)}, "page_eviction"),
        ({"store": StoreConfig(format="int8")}, "store"),
    ],
)
def test_tiers_are_refused_beside_what_they_were_never_tried_with(part, why):
    (refusal,) = refusals(PLAIN, PluginConfig(tiers=TIERS, **part))
    assert why in refusal.why


def test_tiers_go_with_streaming_llm():
    both = ASKED.model_copy(update={"tiers": TIERS})
    assert refusals(PLAIN, both) == []


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
