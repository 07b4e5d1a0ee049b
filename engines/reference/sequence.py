"""One sequence in the reference engine: its layers' caches, how far it is, and what it takes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.engines.reference.layer import LayerCache
from kvtune.errors import BadInput
from kvtune.policies.eviction import Span
from kvtune.policies.footprint import Facts, Footprint, Observed
from kvtune.policies.method import Role
from kvtune.policies.method_stack import MethodStack
from kvtune.policies.plane import Piece


@dataclass(frozen=True, slots=True)
class Parked:
    """Keys and values that lie on another tier, and what was observed before they left."""

    key: str
    nbytes: int
    observed: Observed


class Sequence:
    """The cache of one sequence under a stack of methods.

    `seen_tokens` counts what the model has read, `token_ids` are those; what is held after an
    eviction is less. `reused_tokens` of them were not computed but taken from other sequences.
    `skipped_positions` counts the gaps that modules leave before the next position. `parked` says
    what lies on another tier. `recording`, when set, collects the queries, keys and values of the
    prompt, one entry a layer.
    """

    def __init__(
        self, stack: MethodStack, layers: Items[LayerCache], spans: tuple[Span, ...]
    ) -> None:
        self.stack = stack
        self.layers = tuple(layers)
        self.spans = spans
        self.seen_tokens = 0
        self.reused_tokens = 0
        self.skipped_positions = 0
        self.token_ids: list[int] = []
        self.prompt_tokens = 0
        self.peak_bytes = 0
        self.facts_at: dict[int, Facts] = {}
        self.parked: Parked | None = None
        self.recording: list[tuple[Tensor, Tensor, Tensor]] | None = None

    @property
    def next_position(self) -> int:
        """Where the next token goes."""
        return self.seen_tokens + self.skipped_positions

    @property
    def holds_everything(self) -> bool:
        """Whether each layer holds every token that was read, at positions from 0."""
        seen = len(self.token_ids)
        return self.seen_tokens == seen and all(
            group.tokens == seen and group.stored is None and group.first == 0
            for layer in self.layers
            for group in layer.groups
        )

    @property
    def shares_tokens(self) -> bool:
        """Whether all layers store tokens one by one, so that `share` and `adopt` work."""
        return all(plane.shares_tokens for layer in self.layers for plane in layer.planes())

    def share(self, start: int, end: int) -> tuple[tuple[Piece, Piece], ...]:
        """Return the tokens [start, end) as each layer stores them: keys and values.

        Raises:
            BadInput: a layer does not store tokens one by one.
        """
        groups = (layer.groups[0] for layer in self.layers)
        return tuple(
            (group.keys.share(start, end), group.values.share(start, end)) for group in groups
        )

    def adopt(self, layers: Items[tuple[Piece, Piece]], first: int) -> None:
        """Hold tokens that another sequence shared, at positions from `first` on."""
        for layer, (keys, values) in zip(self.layers, layers, strict=True):
            layer.groups[0].adopt(keys, values, first)

    @torch.inference_mode()
    def fork(self) -> Sequence:
        """Return a sequence that goes on from here by itself (beams, parallel samples).

        It holds copies of all tensors, except in pages: those are shared until one of the two
        writes. What all sequences share (pools, constants, calibrations) stays shared.

        Raises:
            BadInput: it is swapped out.
        """
        if self.parked is not None:
            raise BadInput("a sequence that is swapped out cannot fork", fix="swap it in first")
        memo: dict[int, object] = {id(self.stack): self.stack}
        for layer in self.layers:
            setup = layer.setup
            for shared in (setup.engine, setup.rope, setup.calibration, setup.stack):
                memo[id(shared)] = shared
            for plane in layer.planes():
                memo |= {id(tensor): tensor for tensor in plane.constants.values()}
        return copy.deepcopy(self, memo)

    def free(self) -> None:
        """Hold nothing any more, for good; pages go back to their pool."""
        for layer in self.layers:
            for plane in layer.planes():
                plane.clear()
        self.layers = ()

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

    def note_step(self) -> None:
        """Count what is held after the prompt or after decoded tokens, and note planes' facts."""
        self.note_peak()
        decoded = self.seen_tokens - self.prompt_tokens
        if not decoded:
            self.facts_at = {}
        facts = _facts([layer.facts() for layer in self.layers])
        if any(facts.values()):
            self.facts_at[decoded] = facts

    def note_peak(self, passing_bytes: int = 0) -> None:
        """Count what is held now, and `passing_bytes` that are about to be freed."""
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + passing_bytes)

    def measured(self) -> Footprint:
        """The bytes of the tensors themselves."""
        constants = {
            tensor.data_ptr(): tensor.numel() * tensor.element_size()
            for layer in self.layers
            for plane in layer.planes()
            for tensor in plane.constants.values()
        }
        return Footprint(
            resident_bytes=self.resident_bytes,
            read_bytes_per_step=sum(layer.read_bytes_per_step for layer in self.layers),
            peak_bytes=self.peak_bytes,
            remote_bytes=self.parked.nbytes if self.parked else 0,
            constant_bytes=sum(constants.values()),
        )

    def observed(self) -> Observed:
        """What the formulas can't know without the data."""
        if self.parked is not None:
            return self.parked.observed
        decoded = self.seen_tokens - self.prompt_tokens
        kept = {
            layer.setup.shape.index: [group.tokens - decoded for group in layer.groups]
            for layer in self.layers
            if layer.ragged
        }
        return Observed(
            kept,
            _facts([layer.facts() for layer in self.layers]),
            self.reused_tokens,
            facts_at=self.facts_at,
            facts_read=_facts([layer.facts_read for layer in self.layers]),
        )


def _facts(layers: Items[Mapping[Role, dict[str, int]]]) -> Facts:
    return {
        (index, role): facts for index, layer in enumerate(layers) for role, facts in layer.items()
    }
