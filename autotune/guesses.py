"""First points of a search, read off the verdict. Where to look first, never a claim of a gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from kvtune.autotune.space import SearchSpace
from kvtune.types import Bottleneck

Values = dict[str, JsonValue]

_TOWARD: Mapping[Bottleneck, Sequence[tuple[tuple[str, str], ...]]] = {
    Bottleneck.KV_CAPACITY: (
        (("block_size", "low"),),
        (("block_size", "low"), ("max_num_seqs", "middle")),
        (("block_size", "low"), ("max_num_batched_tokens", "middle")),
    ),
    Bottleneck.BATCH_WIDTH: (
        (("max_num_seqs", "high"),),
        (("max_num_seqs", "high"), ("max_num_batched_tokens", "high")),
    ),
    Bottleneck.COMPUTE: (
        (("max_num_batched_tokens", "high"),),
        (("max_num_batched_tokens", "low"),),
    ),
    Bottleneck.KV_BANDWIDTH: ((("max_num_seqs", "middle"),),),
    Bottleneck.WEIGHT_BANDWIDTH: ((("max_num_seqs", "high"),),),
    # Fewer sequences at once leave more blocks to prefixes, and small blocks fit them closer.
    Bottleneck.PREFIX_THRASH: ((("max_num_seqs", "low"),), (("block_size", "low"),)),
}


def first_guesses(space: SearchSpace, bottleneck: Bottleneck) -> list[Values]:
    """Points to try before the sampler knows anything; what is not moved is at its default."""
    guesses = []
    for recipe in _TOWARD.get(bottleneck, ()):
        values: Values = space.defaults
        for policy, where in recipe:
            knob = next((k for k in space.knobs if k.policy == policy), None)
            if knob is not None and (options := knob.knob.choices):
                index = {"low": 0, "middle": len(options) // 2, "high": len(options) - 1}[where]
                values[knob.knob.name] = options[index]
        if values != space.defaults and values not in guesses:
            guesses.append(values)
    return guesses
