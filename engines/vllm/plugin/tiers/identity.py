"""What two servers must have in common for one to use the pages of the other.

A page's key is vLLM's hash of all tokens up to its end. That says what was computed, and nothing of
by what, nor of how the bytes are laid out.
"""

from __future__ import annotations

from typing import Any

from kvtune.engines.vllm.plugin.tiers.weights import weights_digest
from kvtune.policies.plugin_config import PluginConfig
from kvtune.types import fingerprint_of


def identity(vllm_config: Any, kv_cache_config: Any, asked: PluginConfig) -> str:
    """A fingerprint of the model, its weights, the format of pages and the policies.

    More is in it than need be (the longest length, the version of PyTorch): where it differs
    without need, pages are computed once more.

    Raises:
        OSError: a file of the model cannot be read.
    """
    import torch
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    return fingerprint_of(
        {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "model": model.compute_hash(),
            "weights": weights_digest(model.model),
            "load_format": str(vllm_config.load_config.load_format),
            "hash": cache.prefix_caching_hash_algo,
            "policies": asked.fingerprint,
            "kv_dtype": cache.cache_dtype,
            "layers": list(group.layer_names),
            "page_bytes": spec.page_size_bytes,
            "block_tokens": spec.block_size,
            "layout": kv_cache_config.kv_cache_layout,
            # The CPU kernels lay a page out as suits the instructions that the CPU has.
            "isa": _isa(model.dtype, cache.cache_dtype, spec),
        }
    )


def _isa(dtype: Any, kv_dtype: str, spec: Any) -> str:
    """As the kernels' metadata builder has it: the model's dtype decides in 8-bit caches too."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, spec.block_size, spec.head_size, kv_dtype))
