"""Rewrite a batch's block table so that a kernel reads the kept pages only. Torch alone.

A paged-attention kernel knows of a request what its row says: the pages in order, and how many
tokens they hold. Pages that leave the middle of a row make a shorter request of it. Nothing moves
in memory, and keys keep the positions that they were rotated by.
"""

from __future__ import annotations

from typing import Any


def without_middle(block_table: Any, first: int, dropped: Any) -> Any:
    """Close the gap that `dropped` pages from page `first` on leave in each row.

    Args:
        block_table: page numbers, [rows, pages].
        first: how many pages at the start of every row stay.
        dropped: how many pages leave each row, [rows].

    Returns:
        Rows of the same width, as a new tensor. What is beyond a row's pages is not to be read.
    """
    import torch

    width = block_table.shape[1]
    columns = torch.arange(width, device=block_table.device)
    moved = columns + torch.where(columns >= first, dropped.long()[:, None], 0)
    return block_table.gather(1, moved.clamp_(max=width - 1))
