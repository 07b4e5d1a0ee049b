"""The decoder families that the reference engine runs exactly, and what each layer of one is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtune.engines.reference.rope import Rope, model_ropes
from kvtune.errors import BadInput
from kvtune.policies.method import LayerShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
"""`model_type` of models whose attention is q, k, v, RoPE, softmax, and nothing else."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer: its shape, rotation, score scale, score cap, and trained window."""

    shape: LayerShape
    rope: Rope
    scale: float
    softcap: float | None
    window_tokens: int | None


def layer_facts(model: Any) -> tuple[LayerFacts, ...]:
    """Read every layer of a transformers model.

    Raises:
        BadInput: the model's family is not one of `FAMILIES`.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise BadInput(
            f"the reference engine does not run {config.model_type!r} models",
            fix="it runs: " + ", ".join(FAMILIES),
        )
    blocks = model.model.layers
    default = "full_attention"
    kinds = tuple(getattr(config, "layer_types", None) or (default,) * len(blocks))
    ropes = model_ropes(model, kinds)
    element_bytes = next(model.parameters()).element_size()
    facts = []
    for index, (block, rope) in enumerate(zip(blocks, ropes, strict=True)):
        attention = block.self_attn
        heads = config.num_attention_heads
        kv_heads = heads // attention.num_key_value_groups
        dim = attention.head_dim
        shape = LayerShape(index, len(blocks), heads, kv_heads, dim, dim, element_bytes)
        window = getattr(attention, "sliding_window", None)
        if window is None and config.model_type == "mistral":
            window = config.sliding_window
        softcap = getattr(attention, "attn_logit_softcapping", None)
        facts.append(LayerFacts(shape, rope, attention.scaling, softcap, window))
    return tuple(facts)
