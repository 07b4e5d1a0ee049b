"""Counted parameters against the tensors of transformers' own classes, and against known models."""

import pytest

from kvtune.policies.model_parameters import RECIPES, parameters_of, weight_bytes_of

SHAPE = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "vocab_size": 40,
}
LATENT = {
    "first_k_dense_replace": 2,
    "kv_lora_rank": 7,
    "moe_intermediate_size": 9,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 11,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "topk_group": 1,
    "v_head_dim": 5,
}
INDEX = {"index_head_dim": 8, "index_n_heads": 3, "index_topk": 4}
EXPERTS = {"moe_intermediate_size": 9, "num_experts": 4, "num_experts_per_tok": 2}
OLD_NAMES = {"n_embd": 24, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 40}
CASES = [
    ("DeepseekV2ForCausalLM", LATENT),
    ("DeepseekV2ForCausalLM", {**LATENT, "q_lora_rank": None}),
    ("DeepseekV32ForCausalLM", {**LATENT, **INDEX}),
    ("DeepseekV3ForCausalLM", LATENT),
    ("DeepseekV3ForCausalLM", {**LATENT, "attention_bias": True, "tie_word_embeddings": True}),
    ("GPT2LMHeadModel", OLD_NAMES),
    ("GPT2LMHeadModel", {**OLD_NAMES, "n_inner": 30, "tie_word_embeddings": False}),
    ("Gemma2ForCausalLM", {"head_dim": 8}),
    ("Gemma3ForCausalLM", {"head_dim": 8}),
    ("GemmaForCausalLM", {"head_dim": 8, "attention_bias": True}),
    ("Glm4ForCausalLM", {"head_dim": 8, "attention_bias": False}),
    ("GlmForCausalLM", {"head_dim": 8}),
    ("GlmMoeDsaForCausalLM", {**LATENT, **INDEX, "index_topk_freq": 2}),
    ("GptOssForCausalLM", {"head_dim": 8, "num_local_experts": 3, "sliding_window": 8}),
    ("GraniteForCausalLM", {"attention_bias": True}),
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"attention_bias": True, "head_dim": 8, "mlp_bias": True}),
    ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("MistralForCausalLM", {}),
    ("MixtralForCausalLM", {"num_local_experts": 3}),
    ("Olmo2ForCausalLM", {}),
    ("Olmo3ForCausalLM", {"layer_types": ["full_attention"] * 5}),
    ("Phi3ForCausalLM", {}),
    ("Qwen2ForCausalLM", {}),
    ("Qwen3ForCausalLM", {"head_dim": 8}),
    ("Qwen3MoeForCausalLM", {"head_dim": 8, **EXPERTS}),
    (
        "Qwen3MoeForCausalLM",
        {"head_dim": 8, **EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    ("SmolLM3ForCausalLM", {"mlp_bias": True}),
    ("Starcoder2ForCausalLM", {}),
    ("Starcoder2ForCausalLM", {"use_bias": False}),
]
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def counted(name, entries):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**entries))
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_the_count_is_that_of_the_model(name, changes):
    entries = changes if "n_embd" in changes else {**SHAPE, **changes}
    assert parameters_of({**entries, "architectures": [name]}) == counted(name, entries)


def test_every_recipe_is_compared_with_a_model():
    assert {name for name, _ in CASES} == set(RECIPES)


# Meta and DeepSeek name them 8B and 671B; the counts are by hand from the layers' shapes.
@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            LLAMA_8B,
            32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096)
            + 2 * 128256 * 4096
            + 4096,
        ),
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "first_k_dense_replace": 3,
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "kv_lora_rank": 512,
                "moe_intermediate_size": 2048,
                "n_routed_experts": 256,
                "n_shared_experts": 1,
                "num_attention_heads": 128,
                "num_hidden_layers": 61,
                "num_key_value_heads": 128,
                "q_lora_rank": 1536,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "tie_word_embeddings": False,
                "v_head_dim": 128,
                "vocab_size": 129280,
            },
            671_026_404_352,
        ),
    ],
)
def test_known_models_have_as_many_as_their_names_say(config, parameters):
    assert parameters_of(config) == parameters
    assert weight_bytes_of(config) == 2 * parameters


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Other"]},
        {"architectures": ["Zamba2ForCausalLM"]},
        {"intermediate_size": None},
        {"kv_lora_rank": 512},
    ],
)
def test_what_is_not_known_exactly_has_no_count(changes):
    assert parameters_of({**LLAMA_8B, **changes}) is None
    assert weight_bytes_of({**LLAMA_8B, **changes}) is None


def test_experts_of_an_unknown_make_have_no_count():
    sparse = {**SHAPE, **LATENT, "architectures": ["DeepseekV3ForCausalLM"]}
    assert parameters_of(sparse) is not None
    assert parameters_of({**sparse, "moe_layer_freq": 2}) is None
    assert parameters_of({**sparse, "mlp_bias": True}) is None
    assert parameters_of({**sparse, "first_k_dense_replace": None}) is None


def test_a_quantised_checkpoint_has_a_count_but_no_bytes():
    quantised = {**LLAMA_8B, "quantization_config": {"quant_method": "awq"}}
    assert parameters_of(quantised) == parameters_of(LLAMA_8B)
    assert weight_bytes_of(quantised) is None
