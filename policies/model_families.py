"""The architectures whose cache is known exactly, and how each describes its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtune.policies import model_attention as attention
from kvtune.policies import model_recurrent as recurrent
from kvtune.policies.model_config import ModelConfig, Spelling, unknown
from kvtune.policies.model_layers import Layers


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one architecture.

    Args:
        read: returns what each layer keeps.
        understands: traps that `read` accounts for.
        spelling: names of the entries.
        attends: False where no layer has query heads.
    """

    read: Callable[[ModelConfig], Layers] = attention.plain
    understands: frozenset[str] = frozenset()
    spelling: Spelling = field(default_factory=Spelling)
    attends: bool = True


GPT2_NAMES = Spelling("n_layer", "n_head", "n_head", "n_embd", "n_positions")
KV_HEADS = Spelling(states_kv_heads=True)
HEAD_DIM = Spelling(states_kv_heads=True, states_head_dim=True)
ANY_HEADS = Spelling(states_head_dim=True)
LATENT = frozenset({"kv_lora_rank", "v_head_dim"})
SPARSE = LATENT | {"index_topk"}
DELTA = frozenset({"full_attention_interval", "linear_num_key_heads"})
ZAMBA2 = frozenset({"layers_block_type", "mamba_d_state"})
NEMOTRON_H = frozenset({"hybrid_override_pattern", "layers_block_type", "ssm_state_size"})

FAMILIES: Mapping[str, Family] = {
    "DeepseekV2ForCausalLM": Family(attention.latent, LATENT),
    "DeepseekV32ForCausalLM": Family(attention.latent, SPARSE),
    "DeepseekV3ForCausalLM": Family(attention.latent, LATENT),
    "DeepseekV4ForCausalLM": Family(
        attention.deepseek_v4, frozenset({"compress_ratios", "index_topk"}), HEAD_DIM
    ),
    "FalconForCausalLM": Family(attention.falcon),
    "FalconMambaForCausalLM": Family(recurrent.mamba, attends=False),
    "GPT2LMHeadModel": Family(spelling=GPT2_NAMES),
    "GPTBigCodeForCausalLM": Family(attention.gpt_bigcode, spelling=GPT2_NAMES),
    "GPTNeoXForCausalLM": Family(),
    "Gemma2ForCausalLM": Family(attention.alternating, spelling=HEAD_DIM),
    "Gemma3ForCausalLM": Family(
        attention.gemma3, frozenset({"sliding_window_pattern"}), spelling=HEAD_DIM
    ),
    "Gemma3ForConditionalGeneration": Family(
        attention.gemma3, frozenset({"sliding_window_pattern"}), spelling=HEAD_DIM
    ),
    "Gemma3nForCausalLM": Family(
        attention.gemma3n, frozenset({"num_kv_shared_layers"}), spelling=HEAD_DIM
    ),
    "GemmaForCausalLM": Family(spelling=HEAD_DIM),
    "Glm4ForCausalLM": Family(spelling=HEAD_DIM),
    "Glm4MoeForCausalLM": Family(spelling=HEAD_DIM),
    "Glm4MoeLiteForCausalLM": Family(attention.latent, LATENT),
    "GlmForCausalLM": Family(spelling=HEAD_DIM),
    "GlmMoeDsaForCausalLM": Family(attention.latent, SPARSE),
    "GptOssForCausalLM": Family(attention.alternating, spelling=HEAD_DIM),
    "GraniteForCausalLM": Family(),
    "GraniteMoeForCausalLM": Family(),
    "Llama4ForCausalLM": Family(
        attention.llama4, frozenset({"attention_chunk_size"}), spelling=HEAD_DIM
    ),
    "Llama4ForConditionalGeneration": Family(
        attention.llama4, frozenset({"attention_chunk_size"}), spelling=HEAD_DIM
    ),
    "LlamaForCausalLM": Family(),
    "MambaForCausalLM": Family(recurrent.mamba, attends=False),
    "MistralForCausalLM": Family(attention.mistral, spelling=KV_HEADS),
    "MixtralForCausalLM": Family(attention.all_windowed, spelling=KV_HEADS),
    "NemotronHForCausalLM": Family(recurrent.nemotron_h, NEMOTRON_H, HEAD_DIM),
    "Olmo2ForCausalLM": Family(),
    "Olmo3ForCausalLM": Family(attention.listed),
    "OlmoForCausalLM": Family(),
    "OlmoeForCausalLM": Family(),
    "Phi3ForCausalLM": Family(attention.all_windowed),
    "PhiForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(attention.windowed_from, spelling=KV_HEADS),
    "Qwen2MoeForCausalLM": Family(attention.unwindowed, spelling=KV_HEADS),
    "Qwen3ForCausalLM": Family(attention.windowed_from, spelling=HEAD_DIM),
    "Qwen3MoeForCausalLM": Family(attention.unwindowed, spelling=KV_HEADS),
    "Qwen3NextForCausalLM": Family(recurrent.gated_delta_net, DELTA, HEAD_DIM),
    "Qwen3VLForConditionalGeneration": Family(spelling=HEAD_DIM),
    "Qwen3VLMoeForConditionalGeneration": Family(spelling=KV_HEADS),
    "Qwen3_5ForCausalLM": Family(recurrent.gated_delta_net, DELTA, HEAD_DIM),
    "Qwen3_5ForConditionalGeneration": Family(recurrent.gated_delta_net, DELTA, HEAD_DIM),
    "Qwen3_5MoeForCausalLM": Family(recurrent.gated_delta_net, DELTA, HEAD_DIM),
    "Qwen3_5MoeForConditionalGeneration": Family(recurrent.gated_delta_net, DELTA, HEAD_DIM),
    "SmolLM3ForCausalLM": Family(attention.unwindowed, spelling=KV_HEADS),
    "StableLmForCausalLM": Family(spelling=KV_HEADS),
    "Starcoder2ForCausalLM": Family(attention.all_windowed, spelling=KV_HEADS),
    "Step3p7FlashForCausalLM": Family(attention.listed, spelling=HEAD_DIM),
    "YOCOForCausalLM": Family(recurrent.yoco, frozenset({"num_kv_cache_layers"}), HEAD_DIM),
    "Zamba2ForCausalLM": Family(recurrent.zamba2, ZAMBA2, KV_HEADS),
}
NESTED = frozenset(name for name in FAMILIES if name.endswith("ForConditionalGeneration"))
"""Their decoder is described in `text_config`; what they see adds tokens, and no other cache."""


def find_family(config: Mapping[str, Any], source: str) -> tuple[Family, ModelConfig]:
    """Return the family of a parsed config, and the entries of its decoder.

    Raises:
        BadInput: the architecture is not known, or something in the config changes its cache in a
            way that its family does not have.
    """
    known = tuple(FAMILIES)
    names = config.get("architectures") or []
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else None
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None or not isinstance(architecture, str):
        raise unknown(source, architecture or names, "it is not among the known ones", known)
    entries: Any = config
    if architecture in NESTED:
        entries = config.get("text_config")
        if not isinstance(entries, dict):
            raise unknown(source, architecture, "it has no text_config", known)
        # The outer config carries what holds for the whole checkpoint.
        outer = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")
        entries = {key: config[key] for key in outer if key in config} | entries
    model = ModelConfig(entries, source, architecture, known, family.spelling)
    model.check(family.understands)
    return family, model
