"""What the KV cache of a model holds, layer by layer, from its `config.json` alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtune.errors import BadInput
from kvtune.policies.model_config import SERVED_DTYPE_BYTES, load_config
from kvtune.policies.model_families import find_family
from kvtune.policies.model_layers import Kind, LayerCache


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same thing; `layers` of them. A layer can be in several groups."""

    cache: LayerCache
    layers: int

    @property
    def kind(self) -> Kind:
        """What these layers keep."""
        return self.cache.kind

    def bytes_at(self, tokens: int, element_bytes: int, tensor_parallel: int) -> int:
        """Return what one sequence takes in these layers on one device."""
        return self.layers * self.cache.resident_bytes(tokens, element_bytes, tensor_parallel)

    def read_bytes(self, tokens: int, element_bytes: int, tensor_parallel: int) -> int:
        """Return what one decode step reads of one sequence on one device."""
        return self.layers * self.cache.read_bytes(tokens, element_bytes, tensor_parallel)


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """The bytes of one group for one sequence on one device."""

    group: LayerGroup
    resident_bytes: int
    read_bytes_per_step: int


@dataclass(frozen=True, slots=True)
class ModelCache:
    """What a model keeps for one sequence.

    `layers` has one entry a layer, each with all that the layer keeps: nothing for layers without
    attention, more than one thing for hybrid ones. `query_heads` is None for a model without
    attention; `max_tokens` (the longest sequence) and `vocab_size` are None where the config does
    not name them. `dtype_bytes` is what one number takes when served with `--dtype auto`.

    In all methods `element_bytes` is the size of one number of the KV cache (1 for fp8); states
    and indexes keep their own formats. Every method raises `BadInput` for a tensor-parallel size
    that vLLM refuses, and for counts that make no sense.
    """

    architecture: str
    layers: tuple[tuple[LayerCache, ...], ...]
    query_heads: int | None
    max_tokens: int | None
    vocab_size: int | None
    dtype_bytes: int = SERVED_DTYPE_BYTES

    @property
    def layer_kinds(self) -> tuple[tuple[Kind, ...], ...]:
        """Return the kinds of what each layer keeps, one entry a layer."""
        return tuple(tuple(cache.kind for cache in layer) for layer in self.layers)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Return the layers grouped by what they keep, in order of first appearance."""
        counts = Counter(cache for layer in self.layers for cache in layer)
        return tuple(LayerGroup(cache, layers) for cache, layers in counts.items())

    def bytes_at(self, tokens: int, element_bytes: int = 2, tensor_parallel: int = 1) -> int:
        """Return the bytes that one sequence of `tokens` tokens takes on one device.

        That is what it needed at most on its way: a chunk of attention counts as a whole once the
        sequence has filled one, although only a part is still read at the start of the next.
        """
        groups = self.breakdown(tokens, element_bytes, tensor_parallel)
        return sum(each.resident_bytes for each in groups)

    def bytes_per_token(
        self, tokens: int = 0, element_bytes: int = 2, tensor_parallel: int = 1
    ) -> int:
        """Return the bytes that the token after the first `tokens` adds on one device."""
        grown = self.bytes_at(tokens + 1, element_bytes, tensor_parallel)
        return grown - self.bytes_at(tokens, element_bytes, tensor_parallel)

    def read_bytes_per_step(
        self, tokens: int, element_bytes: int = 2, tensor_parallel: int = 1
    ) -> int:
        """Return what a decode step reads on one device, its own token the last of `tokens`."""
        groups = self.breakdown(tokens, element_bytes, tensor_parallel)
        return sum(each.read_bytes_per_step for each in groups)

    def breakdown(
        self, tokens: int, element_bytes: int = 2, tensor_parallel: int = 1
    ) -> tuple[GroupBytes, ...]:
        """Return the bytes of each group for one sequence of `tokens` tokens on one device."""
        self._check(tokens, element_bytes, tensor_parallel)
        return tuple(
            GroupBytes(
                group,
                group.bytes_at(tokens, element_bytes, tensor_parallel),
                group.read_bytes(tokens, element_bytes, tensor_parallel),
            )
            for group in self.groups
        )

    def _check(self, tokens: int, element_bytes: int, tensor_parallel: int) -> None:
        if tokens < 0 or element_bytes < 1 or tensor_parallel < 1:
            raise BadInput(
                f"no cache has {tokens} tokens of {element_bytes}-byte numbers on "
                f"{tensor_parallel} devices",
                fix="give no less than 0 tokens, 1 byte and 1 device",
            )
        if self.query_heads is not None and self.query_heads % tensor_parallel:
            raise BadInput(
                f"{self.query_heads} query heads do not divide over {tensor_parallel} ranks",
                fix="choose a tensor-parallel size that divides them",
            )


def read_model_cache(model: Path | str | Mapping[str, Any], source: str = "") -> ModelCache:
    """Read what a model keeps.

    Args:
        model: a model directory, its `config.json`, or that file's parsed content.
        source: what to call the config in messages; a file is called by its name.

    Raises:
        BadInput: there is no readable config, or its cache is not known exactly.
    """
    if isinstance(model, Mapping):
        entries, name = model, source or "the model config"
    else:
        entries, file = load_config(Path(model).expanduser())
        name = source or file
    family, config = find_family(entries, name)
    longest = config.spelling.max_tokens
    return ModelCache(
        architecture=config.architecture,
        layers=tuple(family.read(config)),
        query_heads=config.query_heads if family.attends else None,
        max_tokens=None if config.get(longest) is None else config.count(longest),
        vocab_size=None if config.get("vocab_size") is None else config.count("vocab_size"),
    )
