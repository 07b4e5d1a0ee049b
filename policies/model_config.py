"""A model's `config.json`, read with care: what is missing or not understood is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtune.errors import BadInput

SERVED_DTYPE_BYTES = 2
"""`--dtype auto` serves float32 checkpoints in 16 bits too, and those without a dtype."""
KNOWN_DTYPES = ("bfloat16", "float16", "float32", None)
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MOST_LAYERS = 4096
"""A damaged config must not make a list of a billion layers."""

TRAPS: Mapping[str, str] = {
    "attention_chunk_size": "chunked attention",
    "attention_other_setting": "layers of different shapes",
    "attn_layer_period": "hybrid layers",
    "attn_type_list": "hybrid layers",
    "block_configs": "layers of different shapes",
    "cla_share_factor": "a cache shared between layers",
    "compress_rates": "compressed attention",
    "compress_ratios": "compressed attention",
    "conv_L_cache": "hybrid layers",
    "cross_attention_layers": "an encoder",
    "dual_chunk_attention_config": "dual-chunk attention",
    "full_attention_interval": "hybrid layers",
    "global_head_dim": "layers of different shapes",
    "hybrid_layer_pattern": "hybrid layers",
    "hybrid_override_pattern": "hybrid layers",
    "index_topk": "sparse attention",
    "interleaved_sliding_window": "sliding-window layers",
    "is_encoder_decoder": "an encoder",
    "kv_lora_rank": "latent attention",
    "layers_block_type": "hybrid layers",
    "linear_attn_config": "linear attention",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "state-space layers",
    "num_global_key_value_heads": "layers of different shapes",
    "num_kv_cache_layers": "a cache shared between layers",
    "num_kv_shared_layers": "a cache shared between layers",
    "per_layer_config": "layers of different shapes",
    "rswa_window": "sliding-window layers",
    "sliding_window_pattern": "sliding-window layers",
    "sparse_attention_config": "sparse attention",
    "ssm_state_size": "state-space layers",
    "swa_num_key_value_heads": "layers of different shapes",
    "text_config": "a text model nested in another",
    "use_bidirectional_attention": "attention to later tokens",
    "v_head_dim": "values of another size than keys",
}
"""Entries of a config that change what a token costs, unless the family is known to have them."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a family spells its shape, and what a missing entry means.

    A family whose own default for a missing entry is a constant rather than a function of the
    others must state that entry.
    """

    layers: str = "num_hidden_layers"
    query_heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    hidden: str = "hidden_size"
    max_tokens: str = "max_position_embeddings"
    states_kv_heads: bool = False
    states_head_dim: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The entries of one decoder; `source` and `architecture` name it in messages."""

    entries: Mapping[str, Any]
    source: str
    architecture: str
    known: tuple[str, ...] = ()
    spelling: Spelling = field(default_factory=Spelling)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the entry; the default where it is absent or null."""
        value = self.entries.get(key)
        return default if value is None else value

    def count(self, key: str) -> int:
        """Return a positive integer.

        Raises:
            BadInput: the entry is absent or something else.
        """
        value = self.entries.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(f"its {key} is {value!r}, not a positive integer")
        return value

    def count_or(self, key: str, default: int) -> int:
        """Return a positive integer; the default where the entry is absent or null."""
        return default if self.entries.get(key) is None else self.count(key)

    def strings(self, key: str) -> list[str] | None:
        """Return a list of strings; None where the entry is absent or null."""
        value = self.entries.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(f"its {key} is not a list of strings")
        return value

    @property
    def layers(self) -> int:
        """How many layers the decoder has."""
        layers = self.count(self.spelling.layers)
        if layers > MOST_LAYERS:
            raise self.refusal(f"its {self.spelling.layers} is {layers}, more than any model has")
        return layers

    @property
    def query_heads(self) -> int:
        """How many query heads a layer has."""
        return self.count(self.spelling.query_heads)

    @property
    def kv_heads(self) -> int:
        """How many key and value heads a layer has."""
        key = self.spelling.kv_heads
        if self.spelling.states_kv_heads:
            return self.count(key)
        return self.count_or(key, self.query_heads)

    @property
    def head_dim(self) -> int:
        """How many numbers a head has; `hidden / heads` where the config does not say."""
        if self.spelling.states_head_dim:
            return self.count("head_dim")
        hidden = self.count(self.spelling.hidden)
        if self.entries.get("head_dim") is None and hidden % self.query_heads:
            raise self.refusal(f"{hidden} does not divide into {self.query_heads} heads")
        return self.count_or("head_dim", hidden // self.query_heads)

    def refusal(self, reason: str) -> BadInput:
        """Return the error that refuses this config for a reason."""
        return unknown(self.source, self.architecture, reason, self.known)

    def check(self, understood: frozenset[str]) -> None:
        """Refuse what changes the cache in a way that nobody reads here.

        Raises:
            BadInput: a trap is set that is not among the `understood`.
        """
        for key, what in TRAPS.items():
            if key not in understood and self.entries.get(key):
                raise self.refusal(f"its {key} means {what}")
        quantized = self.entries.get("quantization_config") or {}
        if not isinstance(quantized, dict) or quantized.get("kv_cache_scheme"):
            raise self.refusal("its checkpoint sets its own KV cache format")
        dtype = self.entries.get("dtype", self.entries.get("torch_dtype"))
        if dtype not in KNOWN_DTYPES:
            raise self.refusal(f"its dtype is {dtype}")


def load_config(path: Path) -> tuple[Mapping[str, Any], str]:
    """Read a config from a model directory or a file; also return the name of the file.

    Raises:
        BadInput: there is no readable config.
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
    return config, str(file)


def unknown(source: str, architecture: object, reason: str, known: Sequence[str]) -> BadInput:
    """Return the error for a model whose cache is not known exactly."""
    return BadInput(
        f"unknown architecture {architecture!r} in {source}: {reason}",
        fix="kvtune counts KV bytes only where it knows them exactly; go on without the count, "
        "or use one of: " + ", ".join(sorted(known)),
    )
