"""Golden bytes are worked out by hand from the facts of public configs."""

import pytest
from contracts.model_samples import NEMOTRON, QWEN3_5_27B, QWEN3_NEXT, YOCO_3B, ZAMBA2

from kvtune.errors import BadInput
from kvtune.policies.model_cache import read_model_cache
from kvtune.policies.model_layers import Kind

MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "conv_kernel": 4,
    "intermediate_size": 5120,
    "num_hidden_layers": 64,
    "state_size": 16,
}
# The state in the first term, the convolution's last three columns in the second.
DELTA_BYTES = 32 * 128 * 128 * 2 + (2 * 16 * 128 + 32 * 128) * 3 * 2
DELTA_FLOAT_BYTES = 48 * 128 * 128 * 4 + (2 * 16 * 128 + 48 * 128) * 3 * 2
ZAMBA2_BYTES = 8 * 640 * 64 * 2 + (5120 + 2 * 64) * 3 * 2
NEMOTRON_BYTES = 64 * 64 * 128 * 4 + (4096 + 2 * 8 * 128) * 3 * 2


@pytest.mark.parametrize(
    ("config", "state_bytes", "token_bytes"),
    [
        (QWEN3_NEXT, 36 * DELTA_BYTES, 12 * 2 * 2 * 256 * 2),
        (QWEN3_5_27B, 48 * DELTA_FLOAT_BYTES, 16 * 2 * 4 * 256 * 2),
        # Attention sees twice the hidden size: heads of 160, whatever kv_channels says.
        (ZAMBA2, 54 * ZAMBA2_BYTES, 9 * 2 * 32 * 160 * 2),
        (NEMOTRON, 23 * NEMOTRON_BYTES, 6 * 2 * 2 * 128 * 2),
        (MAMBA, 64 * (5120 * 16 * 2 + 5120 * 3 * 2), 0),
        (YOCO_3B, 13 * 24 * 128 * 128 * 2, 2 * 8 * 128 * 2),
    ],
)
def test_a_state_does_not_grow(config, state_bytes, token_bytes):
    cache = read_model_cache(config)
    assert cache.bytes_at(0) == state_bytes
    for tokens in (1, 5000):
        assert cache.bytes_at(tokens) == state_bytes + tokens * token_bytes
    assert cache.bytes_at(5000, element_bytes=1) == state_bytes + 2500 * token_bytes


@pytest.mark.parametrize(
    ("config", "expected_bytes"),
    [
        (QWEN3_NEXT, DELTA_BYTES // 4),
        (NEMOTRON, NEMOTRON_BYTES // 4),
        # The one group of a convolution is held by every rank.
        (ZAMBA2, 2 * 640 * 64 * 2 + (5120 // 4 + 2 * 64) * 3 * 2),
    ],
)
def test_a_state_is_split_over_ranks(config, expected_bytes):
    state = read_model_cache(config).breakdown(0, tensor_parallel=4)[0]
    assert state.group.kind is Kind.STATE
    assert state.resident_bytes == state.group.layers * expected_bytes


def test_hybrid_layers_keep_both_and_expert_layers_nothing():
    zamba2 = read_model_cache(ZAMBA2).layer_kinds
    assert (zamba2[5], zamba2[6]) == ((Kind.STATE,), (Kind.STATE, Kind.FULL))
    nemotron = read_model_cache(NEMOTRON).layer_kinds
    assert nemotron[:6] == ((Kind.STATE,), (), (Kind.STATE,), (), (Kind.STATE,), (Kind.FULL,))


def test_the_interval_stands_in_for_a_list_of_layers():
    listed = {**QWEN3_NEXT, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}
    assert read_model_cache(QWEN3_NEXT) == read_model_cache(listed)


def test_the_older_and_newer_names_of_layers_mean_the_same():
    names = {"M": "linear_attention", "*": "full_attention", "E": "moe"}
    listed = [names[letter] for letter in NEMOTRON["hybrid_override_pattern"]]
    newer = {**NEMOTRON, "hybrid_override_pattern": None, "layers_block_type": listed}
    assert read_model_cache(newer) == read_model_cache(NEMOTRON)


def test_a_state_without_a_stated_format_is_float32_only_in_nemotron():
    unstated = {key: value for key, value in NEMOTRON.items() if key != "mamba_ssm_cache_dtype"}
    assert read_model_cache(unstated) == read_model_cache(NEMOTRON)
    text = {**QWEN3_5_27B["text_config"], "mamba_ssm_dtype": None}
    halved = read_model_cache({**QWEN3_5_27B, "text_config": text})
    assert halved.bytes_at(0) == 48 * (DELTA_FLOAT_BYTES - 48 * 128 * 128 * 2)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**ZAMBA2, "layers_block_type": None}, "does not state layers_block_type"),
        ({**ZAMBA2, "layers_block_type": ["hybrid"]}, "of every layer what it is"),
        ({**ZAMBA2, "n_mamba_heads": 7}, "does not divide into heads"),
        ({**NEMOTRON, "hybrid_override_pattern": "X" * 52}, "layers of X"),
        ({**NEMOTRON, "hybrid_override_pattern": None}, "states neither"),
        ({**NEMOTRON, "n_groups": 7}, "64 heads of a recurrent state do not divide into 7 groups"),
        ({**NEMOTRON, "sliding_window": 512}, "a window of 512 tokens"),
        ({**NEMOTRON, "mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype is int8"),
        ({**QWEN3_NEXT, "layer_types": ["sliding_attention"] * 48}, "layers of sliding_attention"),
        ({**YOCO_3B, "num_kv_cache_layers": 2}, "readers of one cache"),
        ({**YOCO_3B, "num_self_decoder_layers": 12}, "readers of one cache"),
        ({**YOCO_3B, "n_self_heads": 7}, "3072 does not divide into 7 heads"),
    ],
)
def test_what_is_not_known_exactly_is_refused(config, reason):
    with pytest.raises(BadInput) as refusal:
        read_model_cache(config, "config.json")
    assert reason in refusal.value.message
