"""Whole pages of a worker's KV cache as bytes, and the rows of host memory that they go to.

A row holds one page of each layer, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvtune.errors import BadInput

_ROWS_AT_ONCE = 64
"""Rows that are copied in one go, as each copy takes as much memory in between."""


class Pages:
    """The caches of all layers, as `register_kv_caches` gives them, of `num_blocks` pages each.

    Raises:
        BadInput: a page's bytes do not lie side by side.
    """

    def __init__(self, caches: Iterable[Tensor], num_blocks: int) -> None:
        self._layers = [_pages_of(cache, num_blocks) for cache in caches]
        self.row_bytes = sum(layer.shape[1] for layer in self._layers)

    @torch.inference_mode()
    def to_rows(self, block_ids: Sequence[int], rows: Tensor, slots: Sequence[int]) -> None:
        """Copy pages into the rows at `slots` of `rows` (slots, row_bytes), uint8."""
        for ids, at in _batches(block_ids, slots):
            first = 0
            for layer in self._layers:
                end = first + layer.shape[1]
                rows[:, first:end].index_copy_(0, at, layer.index_select(0, ids))
                first = end

    @torch.inference_mode()
    def from_rows(self, rows: Tensor, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy the rows at `slots` of `rows` into pages."""
        for ids, at in _batches(block_ids, slots):
            first = 0
            for layer in self._layers:
                end = first + layer.shape[1]
                layer.index_copy_(0, ids, rows[:, first:end].index_select(0, at))
                first = end


def _pages_of(cache: Tensor, num_blocks: int) -> Tensor:
    """A view of a layer's cache as (num_blocks, bytes of a page), uint8."""
    pages = cache.view(num_blocks, -1, *cache.shape[1:])
    if not pages[0].is_contiguous():
        raise BadInput(
            f"kvtune's tiers cannot copy pages whose bytes are apart: {tuple(pages.stride())}",
            fix="take tiers out of kvtune's section of --additional-config",
        )
    return pages.flatten(1).view(torch.uint8)


def _batches(block_ids: Sequence[int], slots: Sequence[int]) -> Iterable[tuple[Tensor, Tensor]]:
    for first in range(0, len(slots), _ROWS_AT_ONCE):
        batch = slice(first, first + _ROWS_AT_ONCE)
        yield torch.tensor(block_ids[batch]), torch.tensor(slots[batch])
