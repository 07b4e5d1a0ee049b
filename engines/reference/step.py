"""One pass of the model over a batch, and the attention function that transformers calls for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvtune.engines.reference.layer import LayerCache
from kvtune.engines.reference.sequence import Sequence as CachedSequence
from kvtune.policies.eviction import Seen

ATTENTION = "kvtune_reference"


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one sequence. `last` ends a prompt; `scoring` passes are shown, not stored.

    `positions` are those of the tokens, ascending; without them they follow what was read. With
    `sees_stored` they attend to all that is stored, wherever it stands.
    """

    sequence: CachedSequence
    token_ids: tuple[int, ...]
    phase: Literal["prefill", "decode", "scoring"]
    last: bool
    positions: tuple[int, ...] = ()
    sees_stored: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A padded batch of rows: token ids and positions [B, M], and which columns are whose."""

    rows: tuple[Row, ...]
    token_ids: Tensor
    positions: Tensor
    slices: tuple[slice, ...]

    @classmethod
    def of(cls, rows: Sequence[Row], padding: str, device: torch.device) -> Step:
        """Pad rows to the longest, on the left or on the right."""
        width = max(len(row.token_ids) for row in rows)
        token_ids = torch.zeros(len(rows), width, dtype=torch.long)
        positions = torch.zeros(len(rows), width, dtype=torch.long)
        slices = []
        for n, row in enumerate(rows):
            count = len(row.token_ids)
            start = width - count if padding == "left" else 0
            own = slice(start, start + count)
            token_ids[n, own] = torch.tensor(row.token_ids)
            first = row.sequence.next_position
            at = row.positions or range(first, first + count)
            positions[n, own] = torch.tensor(at)
            slices.append(own)
        return cls(tuple(rows), token_ids.to(device), positions.to(device), tuple(slices))


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kvtune_step: Step,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend each row over its own cache: query [B, Hq, M, d] gives [B, M, Hq, d]."""
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    for n, (row, own) in enumerate(zip(kvtune_step.rows, kvtune_step.slices, strict=True)):
        result = _attend_row(
            row,
            module.layer_idx,
            query[n, :, own],
            key[n, :, own],
            value[n, :, own],
            kvtune_step.positions[n, own],
        )
        out[n, own] = result.transpose(0, 1)
    return out, None


def _attend_row(
    row: Row, number: int, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor
) -> Tensor:
    layer = row.sequence.layers[number]
    if row.phase == "decode":
        return layer.decode(queries, keys, values, positions)
    if row.phase == "scoring":
        return layer.score(queries, keys, values, positions)
    if row.sequence.recording is not None:
        row.sequence.recording.append((queries, keys, values))
    out, seen = layer.prefill(queries, keys, values, positions, sees_stored=row.sees_stored)
    if row.last:
        finish(row.sequence, number, seen)
    return out


def finish(sequence: CachedSequence, number: int, seen: Seen) -> None:
    """Compress one layer of a prompt that has ended, and count the peak on the way.

    A method that chooses over the whole sequence does so when the last layer is through.
    """
    layer = sequence.layers[number]
    if any(method.scope == "sequence" for method in layer.stack.evictors):
        return
    store_prompt(sequence, layer, layer.choose(seen))


def store_prompt(
    sequence: CachedSequence, layer: LayerCache, kept: Tensor | list[Tensor] | None
) -> None:
    """Store what a layer keeps of its prompt, and count the peak on the way."""
    staged_bytes = layer.staged_bytes
    layer.finish_prefill(kept)
    freed_bytes = sum(plane.freed_bytes for plane in layer.planes())
    sequence.note_peak(staged_bytes + freed_bytes + layer.scratch_bytes)


AttentionInterface.register(ATTENTION, attention)
