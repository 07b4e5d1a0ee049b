"""Take pages out of the rows of a step whose requests lost them. Torch alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.evict.orders import Eviction


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What a step's rows become, on the host.

    `source` [rows]: the old row that each comes from. `query_starts` [rows + 1]: where the queries
    of each begin. `lengths` [rows]: tokens that are left, the queries among them. `masks`: by row,
    the pages that left it.
    """

    source: Tensor
    query_starts: Tensor
    lengths: Tensor
    masks: dict[int, int]


def kept_rows(
    query_starts: Tensor,
    lengths: Tensor,
    evictions: Mapping[int, Sequence[Eviction]],
    page_tokens: int,
) -> KeptRows:
    """Take from rows what tokens do not see; a row on both sides of an eviction becomes two.

    Args:
        query_starts: where the queries of each row begin in the batch, [rows + 1].
        lengths: tokens of each row with its queries, which are its last, [rows].
        evictions: of the rows that have some, by row, in the order they came.
        page_tokens: tokens per page.
    """
    starts, ends = query_starts.tolist(), lengths.tolist()
    sources: list[int] = []
    begins: list[int] = []
    left: list[int] = []
    masks: dict[int, int] = {}
    for row, end in enumerate(ends):
        computed = end - (starts[row + 1] - starts[row])
        for first, past, mask in _parts(computed, end, evictions.get(row, ())):
            if mask:
                masks[len(sources)] = mask
            sources.append(row)
            begins.append(starts[row] + first - computed)
            left.append(past - mask.bit_count() * page_tokens)
    return KeptRows(
        torch.tensor(sources), torch.tensor([*begins, starts[-1]]), torch.tensor(left), masks
    )


def _parts(first: int, past: int, evictions: Sequence[Eviction]) -> Iterator[tuple[int, int, int]]:
    """Tokens [first, past) in parts that see the same: each with what it does not see."""
    mask = 0
    for eviction in evictions:
        if eviction.first_token >= past:
            break
        if eviction.first_token > first:
            yield first, eviction.first_token, mask
            first = eviction.first_token
        mask = eviction.mask
    yield first, past, mask


def kept_table(table: Tensor, masks: Mapping[int, int]) -> Tensor:
    """Close the gaps that the pages of `masks`, by row, leave in a table [rows, pages].

    Returns:
        Rows of the same width, as a new tensor. What is beyond a row's pages is not to be read.
    """
    closed = table.clone()
    if not masks:
        return closed
    width = table.shape[1]
    told = bytearray().join(mask.to_bytes(-(-width // 8), "little") for mask in masks.values())
    eights = torch.frombuffer(told, dtype=torch.uint8).view(len(masks), -1, 1)
    gone = ((eights >> torch.arange(8)) & 1).flatten(1)[:, :width]
    order = gone.argsort(dim=1, stable=True).to(table.device)
    rows = torch.tensor(list(masks), device=table.device)
    closed[rows] = table[rows].gather(1, order)
    return closed
