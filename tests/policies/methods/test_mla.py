"""Latent attention on configs: bytes, replication, and what it makes pointless."""

import pytest
from contracts.model_samples import GLM_5, LLAMA_8B

from kvtune.errors import BadInput
from kvtune.policies.architecture import alternatives
from kvtune.policies.compose import refusals
from kvtune.policies.method import methods
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.methods.mla import SPLIT_FORMATS, MultiHeadLatentAttention
from kvtune.policies.model_cache import read_model_cache

METHOD = MultiHeadLatentAttention()
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


def test_deepseek_v2_takes_a_57th_of_mha():
    assert METHOD.bytes_per_token(DEEPSEEK_V2) == 69_120
    others = alternatives(read_model_cache(DEEPSEEK_V2), 128)
    mha = next(other.cache for other in others if other.method == "mha")
    assert mha.bytes_per_token() == 3_932_160
    assert mha.bytes_per_token() / METHOD.bytes_per_token(DEEPSEEK_V2) == pytest.approx(56.9, 1e-3)
    # 2.25 KV heads of 128 numbers, keys and values.
    assert METHOD.bytes_per_token(DEEPSEEK_V2) == 2.25 * 60 * 2 * 128 * 2


def test_every_rank_holds_all_rows():
    cache = read_model_cache(DEEPSEEK_V2)
    assert cache.bytes_per_token(tensor_parallel=8) == cache.bytes_per_token(tensor_parallel=1)
    lines = METHOD.advise(DEEPSEEK_V2)
    assert any("each holds 69,120 B of a token's 69,120 B" in line for line in lines)


@pytest.mark.parametrize("config", [DEEPSEEK_V2, GLM_5])
def test_advice_names_what_does_not_fit_one_row_for_all_heads(config):
    choosing, split, low_rank, *_ = METHOD.advise(config)
    assert f"one row of 576 numbers for all {config['num_attention_heads']} heads" in choosing
    for name in ("snapkv", "h2o", "quest"):
        assert name in choosing
    for name in SPLIT_FORMATS:
        assert name in methods()
        assert name in split
    assert "palu" in low_rank


def test_advice_for_a_model_without_it_says_why_it_stays_so():
    lacks, would = METHOD.advise(LLAMA_8B)
    assert "latents are learned" in lacks
    # 32 x 576 x 2 bytes x 131,072 tokens.
    assert would.startswith("MLA (rows of 576) of the same size would hold 4.50 GiB")


def test_a_plain_model_is_refused():
    with pytest.raises(BadInput, match="8 KV heads for 32 query heads"):
        METHOD.require(LLAMA_8B)


@pytest.mark.parametrize("other", ["palu", "ojakv"])
def test_no_second_projection_goes_with_it(other):
    assert any(
        "two low-rank projections" in reason for reason in refusals(parse_stack(f"mla + {other}"))
    )
