import json
import subprocess
import sys

import pytest
from contracts.model_samples import LLAMA_8B, QWEN3_NEXT
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.policies.model_cache import ModelCache, read_model_cache
from kvtune.policies.model_layers import Kind, Rows, State

LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80}
LLAMA_2_7B = {**LLAMA_8B, "num_key_value_heads": 32}
DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 2304,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
YOCO = {
    "architectures": ["YOCOForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "n_self_heads": 8,
    "num_attention_heads": 8,
    "num_cross_decoder_layers": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_kv_cache_layers": 1,
    "num_self_decoder_layers": 16,
    "sliding_window": 1024,
}
ALL = (LLAMA_8B, DEEPSEEK_V2, GEMMA_2_2B, YOCO, QWEN3_NEXT)


# methods.md 0, 7: 2 x 32 x 8 x 128 x 2 and so on; DeepSeek-V2 is 60 x (512 + 64) x 2.
@pytest.mark.parametrize(
    ("config", "expected_bytes"),
    [
        (LLAMA_8B, 131_072),
        (LLAMA_70B, 327_680),
        (LLAMA_2_7B, 524_288),
        (DEEPSEEK_V2, 69_120),
    ],
)
def test_a_token_costs_what_the_papers_say(config, expected_bytes):
    cache = read_model_cache(config)
    assert cache.bytes_per_token() == expected_bytes
    assert cache.bytes_at(1000) == 1000 * expected_bytes
    assert cache.bytes_at(1000, element_bytes=1) == 500 * expected_bytes
    assert cache.read_bytes_per_step(1000) == 1000 * expected_bytes


def test_eight_of_32_heads_cost_a_quarter():
    grouped, full = read_model_cache(LLAMA_8B), read_model_cache(LLAMA_2_7B)
    assert grouped.bytes_at(777) / full.bytes_at(777) == 0.25


def test_latent_rows_are_held_whole_by_every_rank():
    cache = read_model_cache(DEEPSEEK_V2)
    assert cache.bytes_at(4096, tensor_parallel=8) == cache.bytes_at(4096, tensor_parallel=1)


def test_yoco_keeps_one_cache_for_its_upper_half():
    cache = read_model_cache(YOCO)
    window, whole, shared = cache.breakdown(1 << 20)
    assert whole.resident_bytes == 4 << 30
    assert window.resident_bytes == 64 << 20
    assert cache.bytes_at(1 << 20) == (4 << 30) + (64 << 20)
    assert (shared.group.kind, shared.group.layers) == (Kind.SHARED, 15)
    assert shared.resident_bytes == 0
    # The upper layers all read the one cache.
    assert shared.read_bytes_per_step == 15 * whole.read_bytes_per_step


def test_windowed_layers_stop_growing():
    cache = read_model_cache(GEMMA_2_2B)
    # A layer takes 2 x 4 heads x 256 x 2 bytes for each token; 13 of the 26 are windowed.
    layer_bytes = 4096
    assert cache.bytes_per_token(4095) == 26 * layer_bytes
    assert cache.bytes_per_token(4096) == 13 * layer_bytes
    assert cache.bytes_at(8192) == 13 * layer_bytes * (8192 + 4096)
    assert cache.read_bytes_per_step(8192) == cache.bytes_at(8192)


def test_kinds_are_named_for_every_layer():
    assert read_model_cache(GEMMA_2_2B).layer_kinds == ((Kind.WINDOW,), (Kind.FULL,)) * 13
    assert read_model_cache(YOCO).layer_kinds == (
        *[(Kind.WINDOW,)] * 16,
        (Kind.FULL,),
        *[(Kind.SHARED,)] * 15,
    )


def test_groups_count_layers_that_keep_the_same():
    cache = read_model_cache(QWEN3_NEXT)
    assert [(group.kind, group.layers) for group in cache.groups] == [
        (Kind.STATE, 36),
        (Kind.FULL, 12),
    ]


@given(
    config=st.sampled_from(ALL),
    tokens=st.integers(0, 300_000),
    element_bytes=st.sampled_from((1, 2, 4)),
    ranks=st.sampled_from((1, 2, 4, 8)),
)
def test_bytes_never_shrink_and_the_parts_make_the_whole(config, tokens, element_bytes, ranks):
    cache = read_model_cache(config)
    held = cache.bytes_at(tokens, element_bytes, ranks)
    added = cache.bytes_per_token(tokens, element_bytes, ranks)
    assert added >= 0
    assert cache.bytes_at(tokens + 1, element_bytes, ranks) == held + added
    parts = cache.breakdown(tokens, element_bytes, ranks)
    assert sum(part.resident_bytes for part in parts) == held
    assert held <= cache.bytes_at(tokens, element_bytes, 1)
    assert held * ranks >= cache.bytes_at(tokens, element_bytes, 1)


@pytest.mark.parametrize(("ranks", "heads_here"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_kv_heads_are_split_and_then_replicated(ranks, heads_here):
    cache = read_model_cache(LLAMA_8B)
    assert cache.bytes_at(10, tensor_parallel=ranks) == 10 * 131_072 * heads_here // 8


@pytest.mark.parametrize(
    ("config", "ranks", "reason"),
    [
        (LLAMA_8B, 3, "32 query heads do not divide over 3 ranks"),
        ({**LLAMA_8B, "num_attention_heads": 64, "num_key_value_heads": 6}, 4, "6 KV heads"),
        ({**LLAMA_8B, "num_attention_heads": 64, "num_key_value_heads": 6}, 8, "6 KV heads"),
        ({**QWEN3_NEXT, "linear_num_value_heads": 6}, 4, "6 heads of a recurrent state"),
    ],
)
def test_a_split_that_vllm_refuses_is_refused(config, ranks, reason):
    with pytest.raises(BadInput, match=reason) as refusal:
        read_model_cache(config).bytes_at(10, tensor_parallel=ranks)
    assert "tensor-parallel" in refusal.value.fix


@pytest.mark.parametrize("wrong", [(-1, 2, 1), (1, 0, 1), (1, 2, 0)])
def test_counts_that_make_no_sense_are_refused(wrong):
    with pytest.raises(BadInput, match="no cache has"):
        read_model_cache(LLAMA_8B).bytes_at(*wrong)


def test_the_config_is_read_from_a_directory_a_file_and_a_mapping(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    cache = read_model_cache(LLAMA_8B)
    assert read_model_cache(tmp_path) == cache
    assert read_model_cache(str(tmp_path / "config.json")) == cache
    assert (cache.query_heads, cache.max_tokens, cache.vocab_size) == (32, 131072, 128256)


def test_messages_name_the_source():
    with pytest.raises(BadInput, match="in my/model: it is not among"):
        read_model_cache({"architectures": ["Other"]}, "my/model")


def test_a_layer_can_keep_nothing():
    rows, state = Rows(Kind.FULL, 2, 8, 8), State(4, 16, 4)
    cache = ModelCache("Any", ((state, rows), (), (rows,)), 4, None, None)
    assert cache.layer_kinds == ((Kind.STATE, Kind.FULL), (), (Kind.FULL,))
    assert cache.bytes_at(10) == 4 * 16 * 4 + 2 * 10 * 2 * 16 * 2


def test_reading_needs_no_torch():
    code = "import sys, kvtune.policies.model_cache; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
