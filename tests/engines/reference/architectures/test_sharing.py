"""Which layer reads whose cache, as transformers wires a Gemma 3n."""

import pytest
import torch

from kvtune.policies.architecture import cache_owners
from kvtune.policies.methods.yoco import YouOnlyCacheOnce
from kvtune.policies.model_cache import read_model_cache

transformers = pytest.importorskip("transformers")

TOKENS = 11
WINDOW = 4
CONFIG = {
    "activation_sparsity_pattern": [0.0] * 8,
    "head_dim": 12,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": [16] * 8,
    "laurel_rank": 4,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 3,
    "pad_token_id": 0,
    "sliding_window": WINDOW,
    "vocab_size": 32,
    "vocab_size_per_layer_input": 32,
}


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**CONFIG)).eval()


@pytest.fixture(scope="module")
def config():
    return {**CONFIG, "architectures": ["Gemma3nForCausalLM"]}


def test_the_map_is_how_the_model_is_wired(model, config):
    wired = tuple(
        index
        if block.self_attn.kv_shared_layer_index is None
        else block.self_attn.kv_shared_layer_index
        for index, block in enumerate(model.model.layers)
    )
    assert cache_owners(read_model_cache(config)) == wired == (0, 1, 2, 3, 4, 4, 4, 3)
    assert YouOnlyCacheOnce().detect(config)


@torch.no_grad()
def test_owners_times_a_slot_times_tokens_is_what_is_allocated(model, config):
    cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS)
    model(torch.zeros(1, TOKENS, dtype=torch.long), past_key_values=cache, use_cache=True)
    measured = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    owners = set(cache_owners(read_model_cache(config)))
    slot_bytes = 2 * 2 * 12 * 4
    held = [TOKENS if owner == 3 else WINDOW for owner in owners]
    assert measured == slot_bytes * sum(held)
    assert measured == read_model_cache(config).bytes_at(TOKENS, element_bytes=4)
