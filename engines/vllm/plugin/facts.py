"""Read from a vLLM configuration what decides whether the plugin can serve it."""

from __future__ import annotations

from typing import Any

from kvtune.engines.vllm.plugin.refusals import Facts
from kvtune.engines.vllm.plugin.tiers.weights import has_weights

BACKEND = "kvtune.engines.vllm.plugin.backend.Backend"
"""What vLLM's registry of attention backends is told; the class is made when it is looked up."""


def facts_of(vllm_config: Any) -> Facts:
    """The facts of a `VllmConfig`."""
    import vllm
    from vllm.platforms import current_platform

    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return Facts(
        vllm_version=vllm.__version__,
        platform=_platform(current_platform),
        backend_is_ours=_backend_is_ours(vllm_config, is_cpu=current_platform.is_cpu()),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        context_parallel=max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        ),
        is_speculative=vllm_config.speculative_config is not None,
        has_connector=_has_other_connector(vllm_config),
        is_generative=model.runner_type == "generate",
        is_multimodal=model.is_multimodal_model,
        uses_mla=model.use_mla,
        has_state=model.is_hybrid or model.is_attention_free,
        has_window=_has_window(vllm_config),
        is_encoder_decoder=model.is_encoder_decoder,
        shares_layers=bool(getattr(model.hf_text_config, "num_kv_shared_layers", 0)),
        kv_dtype=cache.cache_dtype,
        skips_kv_layers=bool(cache.kv_cache_dtype_skip_layers),
        matches_part_blocks=cache.prefix_match_unit is not None,
        uses_v2_runner=vllm_config.use_v2_model_runner,
        splits_batches=parallel.use_ubatching,
        data_parallel=parallel.data_parallel_size,
        has_lora=vllm_config.lora_config is not None,
        has_prefix_cache=bool(cache.enable_prefix_caching),
        prefix_hash=cache.prefix_caching_hash_algo,
        knows_weights=has_weights(model.model) and vllm_config.load_config.load_format != "dummy",
    )


def _has_other_connector(vllm_config: Any) -> bool:
    """Whether others bring KV in. A worker's configuration may have the plugin's own connector."""
    transfer = vllm_config.kv_transfer_config
    is_ours = transfer and str(transfer.kv_connector_module_path).startswith(__package__)
    return bool((transfer and not is_ours) or vllm_config.cache_config.kv_offloading_size)


def _platform(platform: Any) -> str:
    return "cpu" if platform.is_cpu() else "cuda" if platform.is_cuda() else platform.device_name


def _backend_is_ours(vllm_config: Any, *, is_cpu: bool) -> bool:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    if not is_cpu and vllm_config.attention_config.backend is not custom:
        return False
    member = AttentionBackendEnum.CPU_ATTN if is_cpu else custom
    return bool(member.is_overridden() and member.get_path() == BACKEND)


def _has_window(vllm_config: Any) -> bool:
    """Whether any layer sees less than all that precedes a token."""
    model = vllm_config.model_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    return bool(
        vllm_config.cache_config.sliding_window
        or model.get_sliding_window()
        or model.attention_chunk_size
        or model.rswa_window
        or any(kind != "full_attention" for kind in kinds)
    )
