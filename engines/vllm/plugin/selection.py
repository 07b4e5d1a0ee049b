"""Which pages of its request a decode step reads (Quest, 2406.10774), for all rows at once.

The scores of a KV head are those of `kvtune.kernels.pages.page_scores`, and its choice is that of
`kvtune.policies.methods.quest`. A server's kernel is much cheaper when the KV heads of a request
read the same pages; then the mean of their scores decides. (Of SmolLM2-135M's attention that keeps
more than the greatest score does, by which one loud head decides for all.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtune.kernels.scores import reduce_group
from kvtune.policies.plugin_config import QuestConfig

BOUNDS_AT_ONCE = 1 << 20
"""Numbers of pages' bounds that are copied at once, about what a processor's cache holds. All at
once would take gigabytes where one request is long, as it widens the rows of all."""


def pages_to_read(asked: QuestConfig, held: Tensor, page_tokens: int) -> Tensor:
    """How many of its `held` pages, [rows], each row may read; at least 1, maybe more than held."""
    if asked.share is not None:
        # 0.07 * 100 is a little more than 7 in floating point.
        wanted = (held.double() * asked.share - 1e-9).ceil().to(held.dtype)
        return wanted.clamp(min=1)
    if asked.budget_tokens is not None:
        return torch.full_like(held, -(-asked.budget_tokens // page_tokens))
    assert asked.pages is not None
    return torch.full_like(held, asked.pages)


def page_scores(queries: Tensor, bounds: Tensor, table: Tensor) -> Tensor:
    """How large q k can be in each page: sum over c of max(q_c min_c, q_c max_c).

    Args:
        queries: [rows, Hq, d].
        bounds: [Hk, pages of the cache, 2 d], of `Summaries`.
        table: the pages of each row, [rows, p].

    Returns:
        [Hk, rows, p] in float32, the greatest of a KV head's Hq / Hk query heads.
    """
    heads, _, numbers = bounds.shape
    at_once = max(BOUNDS_AT_ONCE // (heads * table.shape[1] * numbers), 1)
    blocks = zip(torch.split(queries, at_once), torch.split(table, at_once), strict=True)
    return torch.cat([_block_scores(asking, bounds, pages) for asking, pages in blocks], dim=1)


def _block_scores(queries: Tensor, bounds: Tensor, table: Tensor) -> Tensor:
    """`page_scores` of some rows."""
    rows, _, width = queries.shape
    heads = bounds.shape[0]
    grouped = queries.float().view(rows, heads, -1, width).transpose(0, 1)
    positive = torch.cat((grouped, -grouped), dim=-1).clamp_(min=0)
    theirs = bounds.index_select(1, table.flatten()).float().view(heads, *table.shape, -1)
    return reduce_group(positive @ theirs.transpose(-1, -2), "max")


def choose(scores: Tensor, held: Tensor, kept: Tensor) -> Tensor:
    """The best pages of each row and its last one, which is being written.

    Args:
        scores: [..., rows, p]; equal ones are taken from the front.
        held: how many of the p pages are the row's, [rows].
        kept: how many it reads, [rows], at least 1 and at most `held`.

    Returns:
        [..., rows, greatest `kept`] positions in the row, ascending. Beyond a row's `kept` its last
        page is repeated.
    """
    last = (held - 1)[:, None]
    columns = torch.arange(scores.shape[-1], device=scores.device)
    old = scores.masked_fill(columns >= last, float("-inf"))
    ranked = old.sort(dim=-1, descending=True, stable=True).indices
    among = columns[: int(kept.max())] < (kept - 1)[:, None]
    return torch.where(among, ranked[..., : among.shape[-1]], last).sort(dim=-1).values
