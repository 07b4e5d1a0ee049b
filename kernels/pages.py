"""Summaries of pages of keys that bound every score in a page from above (Quest, 2406.10774)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtune.kernels.scores import GroupReduce, reduce_group


def page_bounds(keys: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest key of each channel in each page.

    Args:
        keys: (..., n, d); page p holds tokens p * page_tokens and on, the last page what is left.
        page_tokens: tokens per page, at least 1.

    Returns:
        Two tensors (..., ceil(n / page_tokens), d) in the dtype of the keys.
    """
    tokens, width = keys.shape[-2:]
    pages = -(-tokens // page_tokens)
    missing = pages * page_tokens - tokens
    shape = (*keys.shape[:-2], pages, page_tokens, width)
    low = F.pad(keys, (0, 0, 0, missing), value=float("inf")).reshape(shape).amin(dim=-2)
    high = F.pad(keys, (0, 0, 0, missing), value=float("-inf")).reshape(shape).amax(dim=-2)
    return low, high


def page_scores(
    queries: Tensor, low: Tensor, high: Tensor, group_reduce: GroupReduce = "max"
) -> Tensor:
    """Return how large q k can be for a key of each page: sum over c of max(q_c low_c, q_c high_c).

    Args:
        queries: (Hq, d).
        low: (Hk, pages, d) from `page_bounds`.
        high: (Hk, pages, d).
        group_reduce: over the Hq / Hk query heads of a KV head; only `max` stays an upper bound.

    Returns:
        (Hk, pages) in float32 (float64 for float64 queries).
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.to(wide).reshape(low.shape[0], -1, queries.shape[-1])
    best = grouped.clamp(min=0) @ high.to(wide).transpose(-1, -2)
    best += grouped.clamp(max=0) @ low.to(wide).transpose(-1, -2)
    return reduce_group(best, group_reduce)
