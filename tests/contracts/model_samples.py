"""What public configs say of a model's cache; entries that do not matter to it are left out."""

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
GEMMA_3N = {
    "architectures": ["Gemma3nForCausalLM"],
    "head_dim": 256,
    "hidden_size": 2048,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "max_position_embeddings": 32768,
    "num_attention_heads": 8,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "sliding_window": 512,
}
LLAMA_4 = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "max_position_embeddings": 10485760,
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
}
FALCON_7B = {
    "architectures": ["FalconForCausalLM"],
    "hidden_size": 4544,
    "max_position_embeddings": 2048,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "num_kv_heads": 71,
}
GLM_5 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "head_dim": 64,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}
DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "num_attention_heads": 64,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "sliding_window": 128,
}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}
QWEN3_5_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        **{key: value for key, value in QWEN3_NEXT.items() if key != "architectures"},
        "hidden_size": 5120,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_num_value_heads": 48,
        "mamba_ssm_dtype": "float32",
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
    },
}
ZAMBA2 = {
    "architectures": ["Zamba2ForCausalLM"],
    "hidden_size": 2560,
    "kv_channels": 80,
    "layers_block_type": [
        "hybrid" if index in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "linear_attention"
        for index in range(54)
    ],
    "mamba_d_conv": 4,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "max_position_embeddings": 4096,
    "n_mamba_heads": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 54,
    "num_key_value_heads": 32,
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "ssm_state_size": 128,
}
YOCO_3B = {
    "architectures": ["YOCOForCausalLM"],
    "head_dim": 128,
    "hidden_size": 3072,
    "n_self_heads": 24,
    "num_attention_heads": 24,
    "num_cross_decoder_layers": 13,
    "num_hidden_layers": 26,
    "num_key_value_heads": 8,
    "num_kv_cache_layers": 1,
    "num_self_decoder_layers": 13,
}
