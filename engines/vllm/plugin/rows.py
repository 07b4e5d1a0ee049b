"""Rewrite a step's rows so that a kernel reads the kept pages only. Torch alone.

A paged-attention kernel knows of a request what its row says: which tokens ask, the pages in order,
and how many tokens they hold. Two changes of rows are all that a window needs of a kernel. A row
whose tokens see different pages becomes several rows, and pages that no token of a row sees leave
it. Nothing moves in memory, and keys keep the positions that they were rotated by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtune.policies.sink_window import SinkWindow

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """What a step's rows become; on the host, as all that it depends on is there.

    `source` [rows]: the old row that each comes from. `query_starts` [rows + 1]: where the queries
    of each begin. `dropped` [rows]: how many pages leave behind the sinks. `lengths` [rows]: tokens
    that are left, the queries among them.
    """

    source: Tensor
    query_starts: Tensor
    dropped: Tensor
    lengths: Tensor


def kept_rows(query_starts: Tensor, lengths: Tensor, sink_window: SinkWindow) -> Rows | None:
    """Which rows a step becomes under `sink_window`; None when nothing leaves any.

    Args:
        query_starts: where the queries of each row begin in the batch, [rows + 1].
        lengths: tokens of each row with its queries, which are its last, [rows].
        sink_window: what the tokens of a page see.
    """
    import torch

    size = sink_window.block_tokens
    seen = sink_window.sink_blocks + sink_window.window_blocks
    starts, ends = query_starts.long(), lengths.long()
    queries = starts[1:] - starts[:-1]
    computed = ends - queries
    last_page = (ends - 1) // size
    if not bool((last_page > seen).any()):
        return None
    # Up to the last page that sees everything, tokens can share a row.
    first_page = torch.minimum((computed // size).clamp_(min=seen), last_page)
    first_page = torch.where(queries > 0, first_page, last_page)
    pieces = last_page - first_page + 1
    source = torch.repeat_interleave(pieces)
    within = torch.arange(len(source)) - (pieces.cumsum(0) - pieces)[source]
    page = first_page[source] + within
    begins = torch.where(within == 0, computed[source], page * size)
    ends = torch.minimum((page + 1) * size, ends[source])
    dropped = (page - seen).clamp_(min=0)
    return Rows(
        source=source,
        query_starts=torch.cat([(ends - begins).new_zeros(1), (ends - begins).cumsum(0)])
        + starts[0],
        dropped=dropped,
        lengths=ends - dropped * size,
    )


def without_middle(block_table: Tensor, first: int, dropped: Tensor) -> Tensor:
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


def with_rows(
    common: Any, source: Tensor, query_starts: Tensor, lengths: Tensor, table: Tensor
) -> Any:
    """A step's `CommonAttentionMetadata` with these rows.

    Positions and slots stay as they are: they say where a token is.

    Args:
        common: of the old rows.
        source: the old row that each row comes from, [rows], on the host.
        query_starts: where the queries of each begin, [rows + 1], on the host.
        lengths: tokens that each holds, the queries among them, [rows], on the host.
        table: the pages of each, [rows, pages], where the step is computed.
    """
    device, flags = common.seq_lens.device, common.is_prefilling
    starts = query_starts.to(common.query_start_loc_cpu.dtype)
    on_host = lengths.to(common.seq_lens.dtype)
    return common.replace(
        num_reqs=len(source),
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        max_query_len=int((starts[1:] - starts[:-1]).max()),
        seq_lens=on_host.to(device),
        seq_lens_cpu_upper_bound=on_host,
        max_seq_len=int(on_host.max()),
        block_table_tensor=table,
        is_prefilling=None if flags is None else flags[source.to(flags.device)],
        req_idx=None if common.req_idx is None else common.req_idx[source.numpy()],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def host_lengths(common: Any) -> Tensor:
    """Tokens of each row with its queries, [rows], on the host: exact without speculation."""
    known: Tensor | None = common.seq_lens_cpu_upper_bound
    if known is not None:
        return known
    lengths: Tensor = common.seq_lens.cpu()
    return lengths
