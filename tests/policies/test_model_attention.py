"""Golden bytes are worked out by hand from the facts of public configs."""

import pytest
from contracts.model_samples import DEEPSEEK_V4, FALCON_7B, GEMMA_3N, GLM_5, LLAMA_4

from kvtune.errors import BadInput
from kvtune.policies.model_cache import read_model_cache
from kvtune.policies.model_layers import Kind

BASE = {
    "hidden_size": 1024,
    "max_position_embeddings": 32768,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 1152,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
STEP = {
    "architectures": ["Step3p7FlashForCausalLM"],
    "head_dim": 128,
    "hidden_size": 4096,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
    "max_position_embeddings": 65536,
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "num_key_value_heads": 8,
    "sliding_window": 512,
}
STARCODER = {
    "architectures": ["GPTBigCodeForCausalLM"],
    "multi_query": True,
    "n_embd": 6144,
    "n_head": 48,
    "n_layer": 40,
    "n_positions": 8192,
}
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {**BASE, "dtype": "bfloat16", "head_dim": 128, "num_hidden_layers": 36},
}


def kinds(config):
    return [layer[0] for layer in read_model_cache(config).layer_kinds]


def family(name, **changes):
    return {**BASE, "architectures": [name], **changes}


@pytest.mark.parametrize(
    ("config", "tokens", "expected_bytes"),
    [
        # 1,024 bytes a token and layer; 4 full layers, 22 windows of 512.
        (GEMMA_3_1B, 32768, 1024 * (4 * 32768 + 22 * 512)),
        # 2,048 bytes; of the 20 layers that own a cache 4 are full.
        (GEMMA_3N, 32768, 2048 * (4 * 32768 + 16 * 512)),
        # 4,096 bytes; every fourth of 48 layers is full.
        (LLAMA_4, 20000, 4096 * (12 * 20000 + 36 * 8192)),
        (LLAMA_4, 100, 4096 * 48 * 100),
        (GPT_OSS, 131072, 2048 * (18 * 131072 + 18 * 128)),
        (STEP, 65536, 4096 * (12 * 65536 + 33 * 512)),
        # One head of 64 numbers, whatever num_kv_heads says.
        (FALCON_7B, 10, 32 * 2 * 64 * 2 * 10),
        (STARCODER, 10, 40 * 2 * 128 * 2 * 10),
        # 576 numbers, and an index of 128 bytes and one scale.
        (GLM_5, 1000, 78 * (576 * 2 + 132) * 1000),
        (QWEN3_VL, 10, 36 * 2 * 2 * 128 * 2 * 10),
    ],
)
def test_bytes_of_a_sequence(config, tokens, expected_bytes):
    assert read_model_cache(config).bytes_at(tokens) == expected_bytes


def test_deepseek_v4_adds_compressed_rows_to_its_windows():
    tokens = 1003
    windows = 43 * 128 * 512 * 2
    fours = 21 * 250 * (512 * 2 + 132)
    many = 20 * 7 * 512 * 2
    # Keys and scores in float32: the last 8 tokens of both halves, or the last 128 of one.
    sums = 21 * 8 * (2 * 1024 + 2 * 256) * 4 + 20 * 128 * 2 * 512 * 4
    cache = read_model_cache(DEEPSEEK_V4)
    assert cache.bytes_at(tokens) == windows + fours + many + sums
    assert cache.layer_kinds[0] == (Kind.WINDOW,)
    assert cache.layer_kinds[3] == (Kind.WINDOW, Kind.COMPRESSED, Kind.STATE)
    assert cache.bytes_at(tokens, tensor_parallel=8) == cache.bytes_at(tokens)


def test_sparse_attention_reads_all_of_its_index_but_few_of_its_rows():
    cache = read_model_cache(GLM_5)
    assert cache.read_bytes_per_step(1000) == cache.bytes_at(1000)
    assert cache.read_bytes_per_step(100_000) == 78 * (2048 * 576 * 2 + 100_000 * 132)


def test_the_index_keeps_its_format_whatever_the_caches():
    latent, index = read_model_cache(GLM_5).breakdown(10, element_bytes=1)
    assert latent.resident_bytes == 78 * 576 * 10
    assert index.resident_bytes == 78 * 132 * 10


@pytest.mark.parametrize(
    ("changes", "indexed"),
    [
        # The first two layers and then every fourth from the second on keep an index.
        ({"index_topk_freq": 4}, [0, 1, 5, 9]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
        ({"index_topk_pattern": "FSSFSSFSSF"}, [0, 3, 6, 9]),
        ({"indexer_types": ["full", "shared"] * 5}, [0, 2, 4, 6, 8]),
    ],
)
def test_layers_that_reuse_picks_keep_no_index(changes, indexed):
    cache = read_model_cache({**GLM_5, "num_hidden_layers": 10, **changes})
    found = [index for index, layer in enumerate(cache.layer_kinds) if Kind.INDEX in layer]
    assert found == indexed
    assert all(Kind.LATENT in layer for layer in cache.layer_kinds)


def test_a_chunk_is_read_from_its_start():
    full_bytes = 12 * 4096
    chunk_bytes = 36 * 4096
    cache = read_model_cache(LLAMA_4)
    assert cache.read_bytes_per_step(8192) == 8192 * (full_bytes + chunk_bytes)
    assert cache.read_bytes_per_step(8193) == 8193 * full_bytes + chunk_bytes
    # What it holds stays what it needed.
    assert cache.bytes_at(8193) == 8193 * full_bytes + 8192 * chunk_bytes


@pytest.mark.parametrize(
    ("config", "full"),
    [
        (GEMMA_3_1B, [5, 11, 17, 23]),
        (GPT_OSS, list(range(1, 36, 2))),
        (LLAMA_4, list(range(3, 48, 4))),
        ({**GPT_OSS, "layer_types": None}, list(range(1, 36, 2))),
        (STEP, list(range(0, 45, 4))),
        (GEMMA_3N, [4, 9, 14, 19]),
    ],
)
def test_which_layers_are_full(config, full):
    assert [index for index, kind in enumerate(kinds(config)) if kind is Kind.FULL] == full


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (family("Starcoder2ForCausalLM", sliding_window=4096), [Kind.WINDOW] * 4),
        (family("Phi3ForCausalLM", sliding_window=262144), [Kind.FULL] * 4),
        (family("MixtralForCausalLM", sliding_window=None), [Kind.FULL] * 4),
        (family("MixtralForCausalLM", sliding_window=4096), [Kind.WINDOW] * 4),
        (family("MistralForCausalLM", sliding_window=None), [Kind.FULL] * 4),
        # A missing entry is not a null one.
        (family("MistralForCausalLM"), [Kind.WINDOW] * 4),
        (
            family(
                "Qwen2ForCausalLM",
                max_window_layers=3,
                sliding_window=4096,
                use_sliding_window=True,
            ),
            [Kind.FULL] * 3 + [Kind.WINDOW],
        ),
        (
            family("Qwen2ForCausalLM", max_window_layers=3, sliding_window=4096),
            [Kind.FULL] * 4,
        ),
        (
            family("Qwen3MoeForCausalLM", use_sliding_window=False, sliding_window=4096),
            [Kind.FULL] * 4,
        ),
    ],
)
def test_what_a_window_entry_means_to_each_family(config, expected):
    assert kinds(config) == expected


def test_the_newer_falcons_have_as_many_kv_heads_as_they_say():
    falcon_40b = {**FALCON_7B, "new_decoder_architecture": True, "num_kv_heads": 8}
    falcon_40b |= {"hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60}
    assert read_model_cache(falcon_40b).bytes_per_token() == 60 * 2 * 8 * 64 * 2


def test_layers_of_multi_token_prediction_are_left_out():
    padded = {**STEP, "layer_types": STEP["layer_types"] + ["sliding_attention"] * 3}
    assert read_model_cache(padded) == read_model_cache(STEP)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**GPT_OSS, "layer_types": ["full_attention"]}, "lists 1 of 36 layers"),
        ({**GPT_OSS, "layer_types": ["x_attention"] * 36}, "hold x_attention"),
        ({**GPT_OSS, "layer_types": [1] * 36}, "not a list of strings"),
        ({**GPT_OSS, "sliding_window": None}, "sliding_window is None"),
        ({**GPT_OSS, "attention_other_setting": {"head_dim": 2}}, "layers of different shapes"),
        ({**GPT_OSS, "use_bidirectional_attention": True}, "attention to later tokens"),
        ({**STEP, "layer_types": None}, "does not state layer_types"),
        ({**GEMMA_3N, "num_kv_shared_layers": 35}, "num_kv_shared_layers is 35"),
        ({**GEMMA_3N, "num_kv_shared_layers": 33}, "a cache that no layer keeps"),
        ({**DEEPSEEK_V4, "compress_ratios": [4]}, "does not list every layer"),
        ({**DEEPSEEK_V4, "compress_ratios": [8] * 43}, "hold 8, not 0, 4 or 128"),
        ({**DEEPSEEK_V4, "num_key_value_heads": 2}, "num_key_value_heads is 2, not 1"),
        ({**GLM_5, "index_topk_pattern": "FX" * 39}, "for every layer whether it has an index"),
        ({**GLM_5, "index_head_dim": None}, "index_head_dim is None"),
        ({**QWEN3_VL, "text_config": None}, "has no text_config"),
        (
            {**LLAMA_4, "text_config": {**LLAMA_4["text_config"], "no_rope_layers": [1]}},
            "no_rope_layers does not list every layer",
        ),
        (
            family("Qwen3MoeForCausalLM", use_sliding_window=True, sliding_window=4096),
            "slides a window of 4096",
        ),
        (family("DeepseekV3ForCausalLM", kv_lora_rank=512, index_topk=8), "sparse attention"),
    ],
)
def test_what_is_not_known_exactly_is_refused(config, reason):
    with pytest.raises(BadInput) as refusal:
        read_model_cache(config, "config.json")
    assert reason in refusal.value.message
