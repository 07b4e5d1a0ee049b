"""Which pages a step reads, in an order of their own. Torch alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read_pages(block_table: Tensor, lengths: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
    """Number the pages that rows hold anew, each once, as if no others existed.

    Args:
        block_table: page numbers, [rows, pages]; beyond a row's own it may say anything.
        lengths: tokens of each row, [rows].
        page_tokens: tokens of a page.

    Returns:
        The pages, [n] int64, ascending; and the rows' table of places among them, [rows, most pages
        of a row], in the table's dtype, 0 beyond a row's own.
    """
    held = -(-lengths // page_tokens)
    table = block_table[:, : max(held.tolist())]
    is_held = torch.arange(table.shape[1], device=table.device) < held[:, None]
    found = torch.unique(table[is_held].long(), return_inverse=True)  # type: ignore[no-untyped-call]
    pages, places = found
    numbered = torch.zeros_like(table)
    numbered[is_held] = places.to(table.dtype)
    return pages, numbered


def rows_by_page(
    query_starts: Tensor, lengths: Tensor, page_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows so that the queries of each are on one page, which is its last.

    Args:
        query_starts: where the queries of each row begin in the batch, [rows + 1].
        lengths: tokens of each row with its queries, which are its last, [rows].
        page_tokens: tokens of a page.

    Returns:
        The old row that each comes from [new rows], where its queries begin [new rows + 1], and its
        tokens with them [new rows]; int64, on the host as the arguments are.
    """
    ends = lengths.long()
    computed = ends - query_starts.long().diff()
    first, last = computed // page_tokens, (ends - 1) // page_tokens
    pieces = (last - first + 1).clamp_(min=0)
    source = torch.repeat_interleave(pieces)
    page = first[source] + torch.arange(len(source)) - (pieces.cumsum(0) - pieces)[source]
    begins = torch.maximum(computed[source], page * page_tokens)
    ends = torch.minimum((page + 1) * page_tokens, ends[source])
    starts = torch.cat([query_starts[:1].long(), query_starts[0] + (ends - begins).cumsum(0)])
    return source, starts, ends


def groups_of_rows(pages: Sequence[int], most: int) -> list[slice]:
    """Split rows that hold so many `pages` into runs that hold at most `most` together.

    A row that alone holds more is a run of its own.
    """
    groups: list[slice] = []
    start = total = 0
    for row, count in enumerate(pages):
        if row > start and total + count > most:
            groups.append(slice(start, row))
            start, total = row, 0
        total += count
    return [*groups, slice(start, len(pages))]
