import json

import pytest
from contracts.model_samples import GPT2, LLAMA_8B

from kvtune.errors import BadInput
from kvtune.policies.model_config import TRAPS
from kvtune.policies.model_shape import read_model_shape, shape_of

LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80}
SMOLLM2 = {
    **LLAMA_8B,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
QWEN2_3B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 2048,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN3 = {**QWEN2_3B, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
OLMO2 = {
    **LLAMA_8B,
    "architectures": ["Olmo2ForCausalLM"],
    "num_key_value_heads": None,
    "torch_dtype": "float32",
}
GEMMA_2B = {
    **LLAMA_8B,
    "architectures": ["GemmaForCausalLM"],
    "head_dim": 256,
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
}


# The bytes are worked out by hand: 2 (key and value) x layers x KV heads x head size x 2 bytes.
@pytest.mark.parametrize(
    ("config", "expected_bytes"),
    [
        (LLAMA_8B, 131_072),
        (LLAMA_70B, 327_680),
        (SMOLLM2, 23_040),
        (QWEN2_3B, 36_864),
        (QWEN3, 36_864),
        (OLMO2, 524_288),
        (GEMMA_2B, 18_432),
        (GPT2, 36_864),
    ],
)
def test_bytes_of_a_token(config, expected_bytes):
    shape = shape_of(config, "config.json")
    assert shape.kv_bytes_per_token() == expected_bytes
    assert shape.kv_bytes_per_token(1) == expected_bytes // 2
    assert shape.kv_bytes_per_token(4) == expected_bytes * 2


def test_the_shape_is_read_from_a_directory_and_from_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    shape = read_model_shape(tmp_path)
    assert shape == read_model_shape(tmp_path / "config.json")
    assert (shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim) == (30, 9, 3, 64)
    assert (shape.max_tokens, shape.vocab_size) == (8192, 49152)
    assert shape.architecture == "LlamaForCausalLM"


def test_a_float32_checkpoint_is_served_in_16_bits():
    assert shape_of(OLMO2, "config.json").dtype_bytes == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["OtherForCausalLM"]}, "not among the known"),
        ({"architectures": []}, "not among the known"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "not among the known"),
        ({"architectures": "LlamaForCausalLM"}, "not among the known"),
        ({"architectures": [["LlamaForCausalLM"]]}, "not among the known"),
        ({"sliding_window": 4096}, "sliding window of 4096"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding window of 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "not all full_attention"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_kv_shared_layers": 15}, "shared between layers"),
        ({"mamba_d_state": 64}, "state-space"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "KV cache format"),
        ({"torch_dtype": "float64"}, "dtype is float64"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ({"num_attention_heads": 9}, "does not divide into 9 heads"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5"),
    ],
)
def test_what_is_not_known_exactly_is_refused(changes, reason):
    with pytest.raises(BadInput, match="unknown architecture") as refusal:
        shape_of({**LLAMA_8B, **changes}, "config.json")
    assert reason in refusal.value.message
    assert "LlamaForCausalLM" in refusal.value.fix


@pytest.mark.parametrize("key", TRAPS)
def test_every_trap_is_refused_and_harmless_when_empty(key):
    with pytest.raises(BadInput, match=key):
        shape_of({**LLAMA_8B, key: 2}, "config.json")
    for empty in (None, 0, False, []):
        assert shape_of({**LLAMA_8B, key: empty}, "config.json").layers == 32


@pytest.mark.parametrize(
    "harmless",
    [
        {"sliding_window": None},
        {"sliding_window": 0},
        {"sliding_window": 131072},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 32},
        {"quantization_config": {"quant_method": "awq"}},
    ],
)
def test_entries_that_change_no_bytes_are_fine(harmless):
    assert shape_of({**LLAMA_8B, **harmless}, "config.json").kv_bytes_per_token() == 131_072


def test_a_family_whose_missing_entries_mean_a_constant_must_state_them():
    # A missing head_dim is 256 for Gemma, whatever hidden_size / heads gives.
    for config, key in ((GEMMA_2B, "head_dim"), (QWEN2_3B, "num_key_value_heads")):
        with pytest.raises(BadInput, match=f"{key} is None"):
            shape_of({k: v for k, v in config.items() if k != key}, "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[]", "is not a JSON object"), (None, "cannot read the model config")],
)
def test_an_unusable_file_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInput, match=message) as refusal:
        read_model_shape(tmp_path)
    assert "config.json" in refusal.value.message
    assert refusal.value.fix


def test_a_model_that_is_no_path_is_refused_in_words(tmp_path):
    with pytest.raises(BadInput, match="cannot read"):
        read_model_shape(tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct")


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (
            {
                **GEMMA_2B,
                "architectures": ["Gemma2ForCausalLM"],
                "num_hidden_layers": 26,
                "sliding_window": 4096,
            },
            "its 26 layers keep window in 13, full in 13",
        ),
        (
            {**QWEN2_3B, "architectures": ["MistralForCausalLM"], "sliding_window": 4096},
            "its 36 layers keep window in 36",
        ),
    ],
)
def test_layers_that_are_not_all_full_have_no_shape(config, kept):
    with pytest.raises(BadInput, match=kept):
        shape_of(config, "config.json")


def test_a_window_that_spans_the_longest_sequence_is_none():
    mistral = {**QWEN2_3B, "architectures": ["MistralForCausalLM"], "sliding_window": 32768}
    assert shape_of(mistral, "config.json").kv_bytes_per_token() == 36_864


def test_experts_change_nothing_of_the_shape():
    mixtral = {**LLAMA_8B, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    assert shape_of(mixtral, "config.json").kv_bytes_per_token() == 131_072


@pytest.mark.parametrize("key", ["max_position_embeddings", "vocab_size"])
def test_a_shape_needs_the_longest_sequence_and_the_vocabulary(key):
    with pytest.raises(BadInput, match="lacks the longest sequence or the vocabulary"):
        shape_of({**LLAMA_8B, key: None}, "config.json")
