"""Attention to pages that are read back to full precision, a few rows at a time. Torch alone.

vLLM's CPU kernel wants its cache packed in a layout of its own, and packing what was decoded takes
longer than attending to it. So torch's fused attention takes what was decoded as it is. In full
precision at a time are the pages of one row in one layer, or of several short rows that ask one
query each, `TOGETHER_BYTES` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

TOGETHER_BYTES = 16 << 20
"""Keys and values of rows that are attended to together."""

BLOCK_QUERIES = 256
"""Queries whose scores are taken at once."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a step with as many queries each, m, which are the last tokens of a row.

    `numbers`: which rows. `tokens` [rows, m]: places of their queries in the step. `places`
    [rows, m]: places of these in their row. `table` [rows, pages]: pages, 0 beyond a row's own.
    """

    numbers: list[int]
    tokens: Tensor
    places: Tensor
    table: Tensor


def rows_together(
    query_starts: Tensor, lengths: Tensor, block_table: Tensor, page_tokens: int, most_pages: int
) -> Iterator[Rows]:
    """Go through a step's rows; those with one query come together, `most_pages` at a time.

    Args:
        query_starts: where the queries of each row begin in the step, [rows + 1].
        lengths: tokens of each row with its queries, [rows].
        block_table: page numbers, [rows, pages]; beyond a row's own it may say anything.
        page_tokens: tokens of a page.
        most_pages: of rows that come together, as if all were as long as the longest.
    """
    queries = query_starts.diff().tolist()
    held = -(-lengths.long() // page_tokens)
    for numbers in _groups(queries, held.tolist(), most_pages):
        index = torch.tensor(numbers)
        asking = torch.arange(queries[numbers[0]])
        pages = held[index]
        columns = torch.arange(int(pages.max()))
        table = block_table[index][:, : len(columns)].long()
        yield Rows(
            numbers,
            query_starts[index][:, None].long() + asking,
            lengths[index][:, None].long() - len(asking) + asking,
            torch.where(columns < pages[:, None], table, 0),
        )


def pages_together(page_bytes: int) -> int:
    """How many pages of this size in full precision are attended to together."""
    return max(1, TOGETHER_BYTES // page_bytes)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    sees: Callable[[Tensor], Tensor],
    scale: float,
    output: Tensor,
) -> None:
    """Put into `output` what the queries of `rows` get.

    Args:
        query: all queries of the step, [tokens, Hq, d].
        keys: [rows, Hk, n, d], of each row in the same order as its values.
        values: as keys.
        rows: whose queries ask.
        sees: from places of queries in their row, [rows, m], to which of the n they see,
            [rows, m, n].
        scale: of scores.
        output: as query.
    """
    for tokens, places in zip(
        torch.split(rows.tokens, BLOCK_QUERIES, dim=1),
        torch.split(rows.places, BLOCK_QUERIES, dim=1),
        strict=True,
    ):
        attended = scaled_dot_product_attention(
            query[tokens].transpose(1, 2),
            keys,
            values,
            attn_mask=sees(places)[:, None],
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        output[tokens] = attended.transpose(1, 2)


def read_pages(
    kv_cache: Tensor, table: Tensor, decode: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Read pages [rows, p] of a cache [blocks, Hk, N, bytes]: keys and values [rows, Hk, p N, d].

    `decode`: from the pages of heads, [n, N, bytes], to their keys and values [n, N, d].
    """
    blocks, kv_heads, page_tokens, cell = kv_cache.shape
    rows, count = table.shape
    heads = torch.arange(kv_heads, device=table.device)
    # Whole pages of heads are copied at once, where indexing by both would copy byte by byte.
    which = (table[:, None, :] * kv_heads + heads[:, None]).flatten()
    pages = kv_cache.view(blocks * kv_heads, page_tokens, cell).index_select(0, which)
    keys, values = (x.view(rows, kv_heads, count * page_tokens, x.shape[-1]) for x in decode(pages))
    return keys, values


def _groups(queries: Sequence[int], pages: Sequence[int], most: int) -> Iterator[list[int]]:
    """Numbers of rows: those with more than one query alone, the others shortest first."""
    yield from ([row] for row, count in enumerate(queries) if count > 1)
    group: list[int] = []
    single = [row for row, count in enumerate(queries) if count == 1]
    for row in sorted(single, key=lambda row: pages[row]):
        # A row is filled up to the longest of its group: half of it at most for nothing.
        if group and ((len(group) + 1) * pages[row] > most or pages[row] > 2 * pages[group[0]]):
            yield group
            group = []
        group.append(row)
    if group:
        yield group
