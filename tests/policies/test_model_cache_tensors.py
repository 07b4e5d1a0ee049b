"""Counted bytes against the tensors that transformers keeps for tiny random models."""

import pytest

from kvtune.policies.model_cache import read_model_cache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Loading an old model compiles with a deprecated call of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

TOKENS = 11
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "vocab_size": 32,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
OLD_NAMES = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 32}
TINY = {
    "FalconForCausalLM": {"num_kv_heads": 4, "multi_query": True},
    "GPT2LMHeadModel": OLD_NAMES,
    "GPTBigCodeForCausalLM": OLD_NAMES,
    "Gemma2ForCausalLM": {"head_dim": 12, "sliding_window": 4},
    "Gemma3ForCausalLM": {"head_dim": 12, "sliding_window": 4, "sliding_window_pattern": 3},
    "GlmForCausalLM": {"head_dim": 12},
    "GptOssForCausalLM": {"head_dim": 12, "sliding_window": 4, "num_local_experts": 4},
    "Llama4ForCausalLM": {
        "attention_chunk_size": 4,
        "head_dim": 12,
        "intermediate_size_mlp": 16,
        "num_local_experts": 2,
    },
    "LlamaForCausalLM": {"head_dim": 12},
    "MistralForCausalLM": {"sliding_window": 4},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Olmo2ForCausalLM": {},
    "Phi3ForCausalLM": {"sliding_window": 64},
    "Qwen2ForCausalLM": {"max_window_layers": 2, "sliding_window": 4, "use_sliding_window": True},
    "Qwen3ForCausalLM": {"head_dim": 12, "sliding_window": 4},
    "Qwen3MoeForCausalLM": {"head_dim": 12, **EXPERTS},
    "Starcoder2ForCausalLM": {"sliding_window": 4},
}
GEMMA_3N = {
    **SHAPE,
    "head_dim": 12,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": [16] * 6,
    "activation_sparsity_pattern": [0.0] * 6,
    "laurel_rank": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "sliding_window": 4,
    "vocab_size_per_layer_input": 32,
}


def kept_bytes(model):
    """The bytes of all caches after a sequence of `TOKENS` tokens, allocated for just that."""
    torch.set_num_threads(1)
    text = model.config.get_text_config()
    cache = transformers.StaticCache(config=text, max_cache_len=TOKENS)
    with torch.no_grad():
        model(torch.zeros(1, TOKENS, dtype=torch.long), past_key_values=cache, use_cache=True)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tiny(name, entries):
    config_class = getattr(transformers, name).config_class
    return getattr(transformers, name)(config_class(**entries)).eval().float()


@pytest.mark.parametrize("name", TINY)
def test_the_count_is_what_the_tensors_take(name):
    entries = TINY[name] if TINY[name] is OLD_NAMES else {**SHAPE, **TINY[name]}
    model = tiny(name, entries)
    # What the checkpoint of this very model would state.
    stated = {**model.config.to_dict(), "architectures": [name]}
    assert read_model_cache(stated).bytes_at(TOKENS, element_bytes=4) == kept_bytes(model)
    # A config that leaves the defaults out means the same.
    terse = {**entries, "architectures": [name]}
    assert read_model_cache(terse).bytes_at(TOKENS, element_bytes=4) == kept_bytes(model)


def test_shared_layers_take_no_tensors():
    model = tiny("Gemma3nForCausalLM", GEMMA_3N)
    stated = {**GEMMA_3N, "architectures": ["Gemma3nForCausalLM"]}
    # A layer takes 2 x 2 heads x 12 numbers; of the 4 that own a cache 2 have windows of 4.
    assert kept_bytes(model) == 2 * 2 * 12 * 4 * (2 * TOKENS + 2 * 4)
    assert read_model_cache(stated).bytes_at(TOKENS, element_bytes=4) == kept_bytes(model)
