"""The shape of decoders whose every layer keeps a key and a value of every token.

A view of `model_cache` for what asks for no more. Whatever departs from that (windows, latent
attention, state-space layers, shared caches) is refused, because a guess here would pass for a
measurement later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtune.errors import BadInput
from kvtune.policies.model_cache import ModelCache, read_model_cache
from kvtune.policies.model_config import load_config, unknown
from kvtune.policies.model_families import FAMILIES
from kvtune.policies.model_layers import Kind, Rows


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
    config, source = load_config(path)
    return shape_of(config, source)


def shape_of(config: Mapping[str, Any], source: str) -> ModelShape:
    """Return the shape that a parsed config describes; `source` names it in messages.

    Raises:
        BadInput: the architecture is not known exactly, or not every layer is full attention.
    """
    cache = read_model_cache(config, source)
    kept = set(cache.layers)
    only = next(iter(kept)) if len(kept) == 1 else ()
    rows = only[0] if len(only) == 1 else None
    if not isinstance(rows, Rows) or rows.kind is not Kind.FULL:
        groups = ", ".join(f"{group.kind} in {group.layers}" for group in cache.groups)
        raise _refusal(cache, source, f"its {len(cache.layers)} layers keep {groups}")
    if cache.query_heads is None or cache.max_tokens is None or cache.vocab_size is None:
        raise _refusal(cache, source, "its config lacks the longest sequence or the vocabulary")
    return ModelShape(
        architecture=cache.architecture,
        layers=len(cache.layers),
        query_heads=cache.query_heads,
        kv_heads=rows.heads,
        head_dim=rows.key_dim,
        dtype_bytes=cache.dtype_bytes,
        max_tokens=cache.max_tokens,
        vocab_size=cache.vocab_size,
    )


def _refusal(cache: ModelCache, source: str, reason: str) -> BadInput:
    return unknown(source, cache.architecture, reason, tuple(FAMILIES))
