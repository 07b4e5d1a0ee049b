"""A vLLM server that forecasts start from, and the levers on it."""

from __future__ import annotations

from kvtune.autotune.forecast.levers import levers
from kvtune.autotune.forecast.system import as_reported
from kvtune.policies.base import Context
from kvtune.policies.method import History
from kvtune.policies.model_cache import read_model_cache
from kvtune.policies.model_shape import shape_of
from kvtune.types import Device, EffectiveConfig, EngineInfo

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "torch_dtype": "bfloat16",
}
TOKEN_BYTES = 2 * 30 * 3 * 64 * 2  # 23,040
GPU = Device(kind="cuda", name="NVIDIA H200", count=1, memory_bytes=141 * 10**9)
CPU = Device(kind="cpu", name="cpu", count=1, memory_bytes=8 << 30)


def context(device=GPU, blocks=1000, block_tokens=16, model=True, **changes):
    seen = {
        "num_gpu_blocks": blocks,
        "block_size_tokens": block_tokens,
        "kv_cache_memory_bytes": blocks * block_tokens * TOKEN_BYTES + 77,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len_tokens": 360,
        "enable_prefix_caching": True,
        "kv_cache_dtype": "auto",
    }
    return Context(
        engine=EngineInfo(
            name="vllm", version="0.32", distribution="vllm", platform=device.kind, python=None
        ),
        device=device,
        model=shape_of(CONFIG, "config.json") if model else None,
        baseline=EffectiveConfig(**{**seen, **changes}),
    )


def found_on(ctx):
    cache = read_model_cache(CONFIG, "config.json") if ctx.model else None
    return {lever.name: lever for lever in levers(as_reported(ctx), cache, History(600, 200))}
