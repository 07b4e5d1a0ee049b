"""How many bytes a token costs in the KV cache, for the architectures that are known exactly.

Known means: every layer keeps one key and one value of `head_dim` numbers per KV head for every
token. Whatever departs from that (windows, latent attention, state-space layers, shared caches)
is refused, because a guess here would pass for a measurement later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtune.errors import BadInput

SERVED_DTYPE_BYTES = 2
"""`--dtype auto` serves float32 checkpoints in 16 bits too, and those without a dtype."""
KNOWN_DTYPES = ("bfloat16", "float16", "float32", None)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family spells its shape, and what a missing entry means.

    A family whose own default for a missing entry is a constant rather than a function of the
    others must state that entry.
    """

    layers: str = "num_hidden_layers"
    query_heads: str = "num_attention_heads"
    hidden: str = "hidden_size"
    max_tokens: str = "max_position_embeddings"
    states_kv_heads: bool = False
    states_head_dim: bool = False


FAMILIES: Mapping[str, Family] = {
    "GPT2LMHeadModel": Family("n_layer", "n_head", "n_embd", "n_positions"),
    "GPTNeoXForCausalLM": Family(),
    "GemmaForCausalLM": Family(states_kv_heads=True, states_head_dim=True),
    "GraniteForCausalLM": Family(),
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(states_kv_heads=True),
    "Olmo2ForCausalLM": Family(),
    "OlmoForCausalLM": Family(),
    "Phi3ForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(states_kv_heads=True),
    "Qwen3ForCausalLM": Family(states_kv_heads=True, states_head_dim=True),
    "SmolLM3ForCausalLM": Family(states_kv_heads=True),
    "StableLmForCausalLM": Family(states_kv_heads=True),
    "Starcoder2ForCausalLM": Family(states_kv_heads=True),
}

TRAPS: Mapping[str, str] = {
    "attention_chunk_size": "chunked attention",
    "compress_ratios": "compressed attention",
    "dual_chunk_attention_config": "dual-chunk attention",
    "full_attention_interval": "hybrid layers",
    "hybrid_override_pattern": "hybrid layers",
    "index_topk": "sparse attention",
    "is_encoder_decoder": "an encoder",
    "kv_lora_rank": "latent attention",
    "layers_block_type": "hybrid layers",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "state-space layers",
    "num_kv_cache_layers": "a cache shared between layers",
    "num_kv_shared_layers": "a cache shared between layers",
    "sliding_window_pattern": "sliding-window layers",
    "ssm_state_size": "state-space layers",
    "text_config": "a text model nested in another",
}
"""Entries of a config that change what a token costs."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder whose every layer attends to every token.

    `dtype_bytes` is what one number takes when served with `--dtype auto`; `max_tokens` is the
    longest sequence that the model's config names.
    """

    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    max_tokens: int
    vocab_size: int

    def kv_bytes_per_token(self, dtype_bytes: int | None = None) -> int:
        """Return the bytes that one token takes in all layers together.

        Args:
            dtype_bytes: bytes of one cached number; None is the model's own.
        """
        each = self.dtype_bytes if dtype_bytes is None else dtype_bytes
        return 2 * self.layers * self.kv_heads * self.head_dim * each


def read_model_shape(path: Path) -> ModelShape:
    """Read the shape from a model directory, or from its `config.json`.

    Raises:
        BadInput: there is no readable config, or its architecture is not known exactly.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"cannot read the model config {file}: {error.strerror}",
            fix="give a local model directory that holds config.json",
        ) from error
    except ValueError as error:
        raise BadInput(f"{file} is not JSON: {error}", fix="check the file") from error
    if not isinstance(config, dict):
        raise BadInput(f"{file} is not a JSON object", fix="give a model's config.json")
    return shape_of(config, str(file))


def shape_of(config: Mapping[str, Any], source: str) -> ModelShape:
    """Return the shape that a parsed config describes; `source` names it in messages.

    Raises:
        BadInput: the architecture is not known exactly.
    """
    names = config.get("architectures") or []
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else None
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise _unknown(source, architecture or names, "it is not among the known ones")
    obstacle = _obstacle(config, family)
    if obstacle is not None:
        raise _unknown(source, architecture, obstacle)
    return _read(config, family, str(architecture), source)


def _obstacle(config: Mapping[str, Any], family: Family) -> str | None:
    """Say what makes this config's KV cache something else than plain attention."""
    for key, what in TRAPS.items():
        if config.get(key):
            return f"its {key} means {what}"
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        return "its layer_types are not all full_attention"
    window = config.get("sliding_window")
    # A window that spans the longest sequence never drops a token.
    if window and config.get("use_sliding_window", True):
        longest = config.get(family.max_tokens)
        if not isinstance(longest, int) or window < longest:
            return f"it attends through a sliding window of {window} tokens"
    if (config.get("quantization_config") or {}).get("kv_cache_scheme"):
        return "its checkpoint sets its own KV cache format"
    if config.get("dtype", config.get("torch_dtype")) not in KNOWN_DTYPES:
        return f"its dtype is {config.get('dtype', config.get('torch_dtype'))}"
    return None


def _read(config: Mapping[str, Any], family: Family, architecture: str, source: str) -> ModelShape:
    query_heads = _count(config, family.query_heads, source, architecture)
    hidden = _count(config, family.hidden, source, architecture)
    kv_heads, head_dim = query_heads, hidden // query_heads
    if config.get("num_key_value_heads") is not None or family.states_kv_heads:
        kv_heads = _count(config, "num_key_value_heads", source, architecture)
    if config.get("head_dim") is not None or family.states_head_dim:
        head_dim = _count(config, "head_dim", source, architecture)
    elif hidden % query_heads:
        raise _unknown(source, architecture, f"{hidden} does not divide into {query_heads} heads")
    return ModelShape(
        architecture=architecture,
        layers=_count(config, family.layers, source, architecture),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype_bytes=SERVED_DTYPE_BYTES,
        max_tokens=_count(config, family.max_tokens, source, architecture),
        vocab_size=_count(config, "vocab_size", source, architecture),
    )


def _count(config: Mapping[str, Any], key: str, source: str, architecture: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _unknown(source, architecture, f"its {key} is {value!r}, not a positive integer")
    return value


def _unknown(source: str, architecture: object, reason: str) -> BadInput:
    return BadInput(
        f"unknown architecture {architecture!r} in {source}: {reason}",
        fix="kvtune predicts KV bytes only for plain full-attention decoders; go on without the "
        "prediction, or use one of: " + ", ".join(sorted(FAMILIES)),
    )
