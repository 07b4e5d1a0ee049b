"""Grouped-query attention: several query heads share a KV head (2305.13245)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.policies.architecture import CheckpointArchitecture, kv_heads, replicated
from kvtune.policies.method import REFERENCE, Axis, Paper, Serving
from kvtune.policies.model_cache import ModelCache


class GroupedQueryAttention(CheckpointArchitecture):
    """`Hk` KV heads for `Hq` query heads, 1 < Hk < Hq: `2 L Hk d e` bytes a token, Hk/Hq of MHA's.

    Query head i reads KV head floor(i / g), g = Hq / Hk. Found by counting heads in every
    attention layer; a hybrid model counts by those of its layers that attend.
    """

    name = "gqa"
    title = "grouped-query attention"
    axis = Axis.HEAD
    serving = (REFERENCE, Serving("vllm", "any checkpoint that has it", "0.32"))
    paper = Paper(
        "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
        "2305.13245",
        2023,
    )
    summary = (
        "A checkpoint whose query heads share KV heads in groups: bytes fall by the group's size, "
        "which training has fixed."
    )
    retrofit = (
        "KV heads are learned: averaging those of a group without training on ruins the answers, "
        "and the authors train on for 5 % of the original steps"
    )

    def present(self, cache: ModelCache) -> bool:
        """More than one KV head, and fewer than query heads."""
        heads = kv_heads(cache)
        return bool(heads) and all(1 < each < (cache.query_heads or 0) for each in heads)

    def remarks(self, cache: ModelCache) -> Sequence[str]:
        """Less redundancy, a choice of tokens for each group, a limit to splitting."""
        heads = max(kv_heads(cache))
        group = (cache.query_heads or 0) // heads
        found = [
            f"{group} query heads read each KV head, so that less in it is redundant than in MHA: "
            "for such models the authors of KIVI advise 4 bits rather than 2",
            f"token methods choose for each of the {heads} KV heads: their scores are reduced "
            f"over its {group} query heads",
        ]
        split = replicated(cache, 2 * heads)
        return [*found, split] if split else found
