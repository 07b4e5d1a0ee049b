"""Shared caches on configs: bytes, owners, and what they make pointless."""

import pytest
from contracts.model_samples import GEMMA_3N, LLAMA_8B

from kvtune.errors import BadInput
from kvtune.policies.compose import refusals
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.methods.yoco import YouOnlyCacheOnce
from kvtune.policies.model_cache import read_model_cache

METHOD = YouOnlyCacheOnce()
YOCO = {
    "architectures": ["YOCOForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 1 << 20,
    "n_self_heads": 8,
    "num_attention_heads": 8,
    "num_cross_decoder_layers": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_kv_cache_layers": 1,
    "num_self_decoder_layers": 16,
    "sliding_window": 1024,
}


def test_beyond_the_windows_a_token_costs_one_layer():
    # 2 x 8 heads x 128 x 2 bytes; before, in 16 windows and the global cache.
    assert METHOD.bytes_per_token(YOCO, tokens=1024) == 4096
    assert METHOD.bytes_per_token(YOCO, tokens=1023) == 17 * 4096
    assert METHOD.bytes_per_token(YOCO) == 17 * 4096


def test_a_million_tokens_take_4_gib_and_the_windows():
    held = read_model_cache(YOCO).bytes_at(1 << 20)
    assert held == (4 << 30) + (64 << 20)
    full = read_model_cache({**LLAMA_8B, "num_key_value_heads": 8}).bytes_at(1 << 20)
    assert full == 128 << 30


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        (YOCO, "32 attention layers keep caches in 17: the other 15 read those of 16"),
        (
            GEMMA_3N,
            "35 attention layers keep caches in 20: the other 15 read those of 18, 19",
        ),
    ],
)
def test_advice_names_owners_and_what_sharing_changes(config, counts):
    first, bits, tokens, merging, prompt, *_ = METHOD.advise(config)
    assert first == counts + " (the first layer is 0)"
    assert "at least 4 bits" in bits
    assert "snapkv" in tokens
    assert "over all of them together" in tokens
    assert "minicache" in merging
    assert "last token" in prompt


def test_advice_for_a_model_without_it_says_why_it_stays_so():
    lacks, would = METHOD.advise(LLAMA_8B)
    assert "which layers read which cache is learned" in lacks
    # One global cache (512 MiB) and 16 windows of 1,024 tokens (64 MiB), at 131,072 tokens.
    assert would.startswith("YOCO (KV heads: 8) of the same size would hold 576.00 MiB")


def test_a_plain_model_is_refused():
    with pytest.raises(BadInput, match="no cross-layer cache sharing"):
        METHOD.require(LLAMA_8B)


def test_layer_merging_does_not_go_with_it():
    assert any("merge layers" in reason for reason in refusals(parse_stack("yoco + minicache")))
