"""How much a key repeats others (R-KV, 2505.24133)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 256


def key_redundancy(
    keys: Tensor, threshold: float, *, centre: bool = False, block: int = BLOCK_ROWS
) -> Tensor:
    """Return the mean cosine similarity of all keys to each key.

    A key is not compared with itself. Of the keys that are more similar to a row than `threshold`,
    the latest does not count for that row, so that of several copies the newest is no repetition.
    Rows are worked on `block` at a time, so that memory grows with block * n and never with n * n.

    Args:
        keys: (H, n, d).
        threshold: cosine above which two keys count as copies.
        centre: take the mean key off first; without, what all keys share makes all look alike.
        block: rows per step, at least 1.

    Returns:
        (H, n) in float32 (float64 for float64 keys), within [-1, 1].
    """
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    if centre:
        wide = wide - wide.mean(dim=1, keepdim=True)
    unit = F.normalize(wide, dim=-1)
    tokens = keys.shape[1]
    order = torch.arange(tokens, device=keys.device)
    total = torch.zeros(keys.shape[:2], dtype=wide.dtype, device=keys.device)
    for start in range(0, tokens, block):
        rows = order[start : start + block]
        cosine = unit[:, rows] @ unit.transpose(1, 2)
        cosine[:, torch.arange(len(rows), device=keys.device), rows] = 0.0
        latest = torch.where(cosine > threshold, order, -1).amax(dim=-1, keepdim=True)
        total += cosine.masked_fill(order == latest, 0.0).sum(dim=1)
    return total / tokens
