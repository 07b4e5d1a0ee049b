"""Multi-head latent attention: one low-rank row of a token for all heads (2405.04434)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.policies.architecture import (
    CheckpointArchitecture,
    attention_rows,
    names_of,
    replicated,
)
from kvtune.policies.method import (
    Axis,
    Paper,
    SelectionMethod,
    Serving,
    StoreMethod,
    TokenMethod,
)
from kvtune.policies.model_cache import ModelCache
from kvtune.policies.model_layers import Kind

SPLIT_FORMATS = ("gear", "kivi", "kvquant")
"""Formats with scales per channel for keys and per token for values."""


class MultiHeadLatentAttention(CheckpointArchitecture):
    """A latent of `dc` numbers and a rotary key of `dr` a token: `L (dc + dr) e` bytes.

    Keys and values of all heads are projections of the latent. Decoding needs no such projection
    of past tokens: the key's is absorbed into the query, the value's into the output. Indexes of
    sparse attention (DeepSeek-V3.2) are counted on top; DeepSeek-V4's compressed rows are another
    architecture. vLLM's packed rows (fp8_ds_mla) are not counted here.
    """

    name = "mla"
    title = "multi-head latent attention"
    axis = Axis.DIM
    serving = (
        Serving("reference", "kvtune.engines.reference.architectures.mla (full precision)"),
        Serving("vllm", "any checkpoint that has it", "0.32"),
    )
    paper = Paper(
        "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
        "2405.04434",
        2024,
    )
    summary = (
        "A checkpoint that caches one low-rank row a token for all heads: about the bytes of two "
        "KV heads, learned in training, and held whole by every tensor-parallel device."
    )
    retrofit = (
        "its latents are learned: conversions of other checkpoints train on too, and a projection "
        "without training is what Palu does"
    )

    def present(self, cache: ModelCache) -> bool:
        """Every attention layer keeps latents."""
        rows = attention_rows(cache)
        return bool(rows) and all(each.kind is Kind.LATENT for each in rows)

    def remarks(self, cache: ModelCache) -> Sequence[str]:
        """No choice of tokens per head, no split of keys and values, no second projection."""
        rows = attention_rows(cache)[0]
        choosing = names_of((TokenMethod, SelectionMethod), lambda cls: True)
        split = names_of(StoreMethod, lambda cls: cls.name in SPLIT_FORMATS)
        low_rank = names_of(StoreMethod, lambda cls: cls.axis is Axis.DIM)
        found = [
            f"a token has one row of {rows.key_dim} numbers for all {cache.query_heads} heads: "
            f"methods that choose tokens ({choosing}) must choose the same for all of them",
            f"keys and values are read from the same row: formats per channel for keys and per "
            f"token for values ({split}) do not apply; round rows token by token, and leave the "
            "rotary part in 16 bits",
            f"rows are low-rank already: projections ({low_rank}) are redundant",
        ]
        held = replicated(cache, 2)
        return [*found, held] if held else found
