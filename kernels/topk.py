"""Choose the largest scores in a way that never depends on the device or on luck."""

from __future__ import annotations

import torch
from torch import Tensor


def top_indices(scores: Tensor, k: int) -> Tensor:
    """Return the ascending indices of the `k` largest scores of each row.

    Equal scores are taken from the lower index on (`torch.topk` leaves that open). NaN counts as
    minus infinity. A `k` of n or more returns every index.

    Args:
        scores: (..., n), any real dtype.
        k: how many to take, at least 0.

    Returns:
        (..., min(k, n)) int64, strictly ascending along the last dimension.

    Raises:
        ValueError: `k` is negative.
    """
    if k < 0:
        raise ValueError(f"k must be at least 0 but got {k}")
    n = scores.shape[-1]
    if k >= n:
        every = torch.arange(n, device=scores.device)
        return every.expand(scores.shape).contiguous()
    if scores.is_floating_point():
        scores = scores.masked_fill(scores.isnan(), float("-inf"))
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :k].sort(dim=-1).values
