"""Whole pages of a worker's KV cache as bytes, and the rows of host memory that they go to.

A row holds one page of each layer, one after the other. Copies are NumPy's: a page is a few tens of
kilobytes, for which PyTorch's indexed copies were ten times slower on two cores.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.tiers import memory
from kvtune.errors import BadInput

Bytes = npt.NDArray[np.uint8]


class Pages:
    """The caches of all layers, as `register_kv_caches` gives them, of `num_blocks` pages each.

    Raises:
        BadInput: a page's bytes do not lie side by side.
    """

    def __init__(self, caches: Iterable[Tensor], num_blocks: int) -> None:
        self._layers = [_pages_of(cache, num_blocks) for cache in caches]
        self.row_bytes = sum(layer.shape[1] for layer in self._layers)

    def to_row(self, block_id: int, row: Bytes) -> None:
        """Copy a page of all layers into a row (row_bytes)."""
        first = 0
        for layer in self._layers:
            end = first + layer.shape[1]
            row[first:end] = layer[block_id]
            first = end

    def from_row(self, row: Bytes, block_id: int) -> None:
        """Copy a row into a page of all layers."""
        first = 0
        for layer in self._layers:
            end = first + layer.shape[1]
            layer[block_id] = row[first:end]
            first = end


def host_rows(count: int, row_bytes: int) -> Bytes:
    """Host memory of (count, row_bytes), which this process has from now on.

    The system gives memory when it is written to. Were that left to the pages that come, a server
    that there is too little for would be killed hours after its start.

    Raises:
        BadInput: there is less.
    """
    memory.check(count * row_bytes)
    rows = np.empty((count, row_bytes), dtype=np.uint8)
    rows.fill(0)
    return rows


def _pages_of(cache: Tensor, num_blocks: int) -> Bytes:
    """A view of a layer's cache as (num_blocks, bytes of a page)."""
    pages = cache.view(num_blocks, -1, *cache.shape[1:])
    if not pages[0].is_contiguous():
        raise BadInput(
            f"kvtune's tiers cannot copy pages whose bytes are apart: {tuple(pages.stride())}",
            fix="take tiers out of kvtune's section of --additional-config",
        )
    in_bytes: Bytes = pages.flatten(1).view(torch.uint8).numpy()
    return in_bytes
