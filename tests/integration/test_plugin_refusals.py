"""What the plugin refuses is seen in the configurations that a real vLLM makes."""

import pytest

pytestmark = pytest.mark.integration

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 512,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **SIZES}
GEMMA = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **SIZES, "head_dim": 32}
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    **SIZES,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
JAMBA = {"architectures": ["JambaForCausalLM"], "model_type": "jamba", **SIZES, "num_experts": 1}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}

SERVERS = {
    "plain": (None, {}, None),
    "mistral without a window": (MISTRAL | {"sliding_window": None}, {}, None),
    "sliding window": (MISTRAL | {"sliding_window": 64}, {}, "a window of their own"),
    "windows in some layers": (GEMMA | {"sliding_window": 64}, {}, "a window of their own"),
    "MLA": (DEEPSEEK, {}, "(MLA)"),
    "hybrid": (JAMBA, {}, "hold a state"),
    "tensor parallel": (None, {"tensor_parallel_size": 3}, "tensor parallelism"),
    "pipeline parallel": (None, {"pipeline_parallel_size": 2}, "pipeline parallelism"),
    "speculative": (None, {"speculative_config": NGRAM}, "speculative decoding"),
    "connector": (None, {"kv_transfer_config": CONNECTOR}, "connector"),
    "KV format": (None, {"kv_cache_dtype": "int8_per_token_head"}, "wrong"),
    "layers of other formats": (
        None,
        {"kv_cache_dtype_skip_layers": ["0"]},
        "formats of their own",
    ),
    "parts of pages": (None, {"prefix_match_unit": 16}, "copies pages"),
    "embeddings": (None, {"runner": "pooling"}, "generates text"),
}


@pytest.mark.parametrize(
    "asked", [{"streaming_llm": {"window_tokens": 64}}, {"quest": {"pages": 2}}], ids=str
)
def test_servers_that_would_answer_wrong_are_refused_before_they_start(ask, model, asked):
    servers = [[config, arguments] for config, arguments, _ in SERVERS.values()]
    told = ask("refusals_engine", model, asked=asked, servers=servers)["refused"]
    for (name, (*_, why)), said in zip(SERVERS.items(), told, strict=True):
        assert (said is None) is (why is None), (name, said)
        assert why is None or why in said, (name, said)
