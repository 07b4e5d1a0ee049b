"""YOCO and its kin: layers that read the cache of another layer (2405.05254)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.policies.architecture import (
    CheckpointArchitecture,
    attention_rows,
    cache_owners,
    names_of,
)
from kvtune.policies.method import Axis, Paper, Saves, Serving, StoreMethod, TokenMethod
from kvtune.policies.model_cache import ModelCache


class YouOnlyCacheOnce(CheckpointArchitecture):
    """Layers without a cache of their own.

    YOCO has a self-decoder of windows (or retention states) and layers that all read one global
    cache: `2 T Hk d e + L/2 · 2 min(T, W) Hself dself e` bytes. Gemma 3n's last layers each read
    that of the last layer of their kind before them. Found by such layers; those of a prompt's
    tokens whose output nobody reads can be skipped in them.
    """

    name = "yoco"
    title = "cross-layer cache sharing"
    axis = Axis.LAYER
    saves = (Saves.CAPACITY, Saves.BANDWIDTH, Saves.PREFILL)
    serving = (
        Serving("reference", "kvtune.engines.reference.architectures.yoco (random weights)"),
        Serving(
            "vllm", "Gemma 3n, with --kv-sharing-fast-prefill for the early exit; not YOCO", "0.32"
        ),
    )
    paper = Paper(
        "You Only Cache Once: Decoder-Decoder Architectures for Language Models", "2405.05254", 2024
    )
    summary = (
        "A checkpoint whose later layers read the cache of an earlier one: they hold nothing, and "
        "a prompt can skip them but for its last token; an error in that cache reaches all of them."
    )
    retrofit = "which layers read which cache is learned"

    def present(self, cache: ModelCache) -> bool:
        """Some layer reads rows that it does not keep."""
        return any(not rows.owned for rows in attention_rows(cache))

    def remarks(self, cache: ModelCache) -> Sequence[str]:
        """Fewer owners, errors that spread, scores over all readers, nothing to merge."""
        owners = {
            index: owner for index, owner in enumerate(cache_owners(cache)) if owner is not None
        }
        read = [owner for index, owner in owners.items() if owner != index]
        sources = ", ".join(str(owner) for owner in sorted(set(read)))
        token = names_of(TokenMethod, lambda cls: True)
        merging = names_of(StoreMethod, lambda cls: cls.axis is Axis.LAYER)
        return [
            f"{len(owners)} attention layers keep caches in {len(owners) - len(read)}: the other "
            f"{len(read)} read those of {sources} (the first layer is 0)",
            "an error in a shared cache reaches all its readers: give number formats at least 4 "
            "bits",
            f"what a shared cache drops is lost to all its readers: token methods ({token}) must "
            "score over all of them together",
            f"readers hold nothing to merge: layer merging ({merging}) is pointless for them",
            "a prompt need not run through the readers but for its last token",
        ]
