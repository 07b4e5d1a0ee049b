"""Multi-query attention: one KV head for all query heads (1911.02150)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.policies.architecture import CheckpointArchitecture, kv_heads, replicated
from kvtune.policies.method import REFERENCE, Axis, Paper, Serving
from kvtune.policies.model_cache import ModelCache


class MultiQueryAttention(CheckpointArchitecture):
    """One KV head in every attention layer: `2 L d e` bytes a token, 1/Hq of MHA's.

    Found by counting heads: 1 KV head for more than one query head in every attention layer.
    Latent rows (MLA) and compressed ones (DeepSeek-V4) are other architectures.
    """

    name = "mqa"
    title = "multi-query attention"
    axis = Axis.HEAD
    serving = (REFERENCE, Serving("vllm", "any checkpoint that has it", "0.32"))
    paper = Paper("Fast Transformer Decoding: One Write-Head is All You Need", "1911.02150", 2019)
    summary = (
        "A checkpoint whose query heads share one KV head: the fewest bytes of plain attention, "
        "fixed by training, and held whole by every tensor-parallel device."
    )
    retrofit = (
        "KV heads are learned: averaging them without training on ruins the answers, and the "
        "authors of GQA train on for 5 % of the original steps"
    )

    def present(self, cache: ModelCache) -> bool:
        """One KV head and several query heads."""
        return kv_heads(cache) == {1} and (cache.query_heads or 0) > 1

    def remarks(self, cache: ModelCache) -> Sequence[str]:
        """Less redundancy, one choice of tokens for all queries, no split over devices."""
        found = [
            f"{cache.query_heads} query heads read one KV head, so that little in it is "
            "redundant: for such models the authors of KIVI advise 4 bits rather than 2",
            "token methods choose once for all query heads: their scores are reduced over all "
            f"{cache.query_heads}",
        ]
        split = replicated(cache, 2)
        return [*found, split] if split else found
