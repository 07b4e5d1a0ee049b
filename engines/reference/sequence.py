"""One sequence in the reference engine: its layers' caches, how far it is, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from kvtune.engines.reference.layer import LayerCache
from kvtune.policies.eviction import Span
from kvtune.policies.footprint import Footprint, Observed
from kvtune.policies.method import Role
from kvtune.policies.method_stack import MethodStack


class Sequence:
    """The cache of one sequence under a stack of methods.

    `seen_tokens` counts what the model has read and gives the next position; what is held after an
    eviction is less. `recording`, when set, collects the queries, keys and values of the prompt,
    one entry a layer.
    """

    def __init__(
        self, stack: MethodStack, layers: Items[LayerCache], spans: tuple[Span, ...]
    ) -> None:
        self.stack = stack
        self.layers = tuple(layers)
        self.spans = spans
        self.seen_tokens = 0
        self.prompt_tokens = 0
        self.peak_bytes = 0
        self.recording: list[tuple[Tensor, Tensor, Tensor]] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that the sequence owns, by name."""
        return {
            f"layer{number}.{name}": tensor
            for number, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }

    @property
    def resident_bytes(self) -> int:
        """Bytes of `tensors()`."""
        return sum(layer.nbytes for layer in self.layers)

    def note_peak(self, passing_bytes: int = 0) -> None:
        """Count what is held now, and `passing_bytes` that are about to be freed."""
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + passing_bytes)

    def measured(self) -> Footprint:
        """The bytes of the tensors themselves."""
        constants = {
            tensor.data_ptr(): tensor.numel() * tensor.element_size()
            for layer in self.layers
            for group in layer.groups
            for plane in (group.keys, group.values)
            for tensor in plane.constants.values()
        }
        return Footprint(
            resident_bytes=self.resident_bytes,
            read_bytes_per_step=sum(layer.read_bytes_per_step for layer in self.layers),
            peak_bytes=self.peak_bytes,
            constant_bytes=sum(constants.values()),
        )

    def observed(self) -> Observed:
        """What the formulas can't know without the data."""
        decoded = self.seen_tokens - self.prompt_tokens
        kept = {
            layer.setup.shape.index: [group.tokens - decoded for group in layer.groups]
            for layer in self.layers
            if len(layer.groups) > 1
        }
        facts: dict[tuple[int, Role], dict[str, int]] = {}
        for layer in self.layers:
            index = layer.setup.shape.index
            facts[index, "key"] = layer.groups[0].keys.facts()
            facts[index, "value"] = layer.groups[0].values.facts()
        return Observed(kept, facts)
