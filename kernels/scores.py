"""Attention scores that token policies rank cached tokens by.

Softmax runs in float32 (float64 for float64 inputs). Query heads come in groups: with Hq query
heads and Hk KV heads, the g = Hq / Hk heads of a group read the same KV head, so head h belongs to
KV head h // g. A query that sees no key gets probability 0 everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GroupReduce = Literal["mean", "max"]


def attention_logits(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return scale * q kᵀ per KV head and head of its group.

    Args:
        q: (..., Hq, m, d) queries, rotated as the model does.
        k: (..., Hk, n, d) keys, rotated as the model does.
        scale: factor of the logits, usually d ** -0.5.
        mask: bool, broadcastable to (..., Hk, g, m, n), True where a key is seen; None: everywhere.
        softcap: logits become `softcap * tanh(logits / softcap)` before the mask (Gemma 2).

    Returns:
        (..., Hk, g, m, n), float32; minus infinity where a key is not seen.

    Raises:
        ValueError: Hq is no multiple of Hk.
    """
    grouped = _widened(_grouped(q, k))
    # The heads of a group ask as if they were one head's queries, so that keys are not copied.
    logits = grouped.flatten(-3, -2) @ _widened(k).transpose(-1, -2) * scale
    logits = logits.reshape(*grouped.shape[:-1], k.shape[-2])
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if mask is None else logits.masked_fill(~mask, float("-inf"))


def attention_probs(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return softmax(scale * q kᵀ) per KV head and head of its group; see `attention_logits`.

    Returns:
        (..., Hk, g, m, n), float32.

    Raises:
        ValueError: Hq is no multiple of Hk.
    """
    probs = torch.softmax(attention_logits(q, k, scale, mask=mask, softcap=softcap), dim=-1)
    # A row without a visible key is 0/0 in softmax; it attends to nothing.
    return probs if mask is None else probs.masked_fill(~mask, 0.0)


def reduce_group(per_head: Tensor, group_reduce: GroupReduce) -> Tensor:
    """Reduce (..., Hk, g, n) over the g query heads of a KV head to (..., Hk, n).

    Raises:
        ValueError: `group_reduce` is neither `mean` nor `max`.
    """
    if group_reduce == "mean":
        return per_head.mean(dim=-2)
    if group_reduce == "max":
        return per_head.amax(dim=-2)
    raise ValueError(f"group_reduce must be mean or max but got {group_reduce!r}")


def pool1d(scores: Tensor, kernel: int, kind: Literal["avg", "max"]) -> Tensor:
    """Smooth scores along the last dimension, stride 1, same length (SnapKV, 2404.14469).

    Args:
        scores: (..., n).
        kernel: odd width in tokens; 1 changes nothing.
        kind: `avg` divides by the full width also at the edges (zeros are padded); `max` ignores
            the padding.

    Returns:
        (..., n) float32.

    Raises:
        ValueError: `kernel` is even or below 1, or `kind` is neither `avg` nor `max`.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel must be odd and at least 1 but got {kernel}")
    rows = _widened(scores).reshape(-1, 1, scores.shape[-1])
    if kind == "avg":
        pooled = F.avg_pool1d(rows, kernel, stride=1, padding=kernel // 2)
    elif kind == "max":
        pooled = F.max_pool1d(rows, kernel, stride=1, padding=kernel // 2)
    else:
        raise ValueError(f"kind must be avg or max but got {kind!r}")
    return pooled.reshape(scores.shape)


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Return q as (..., Hk, g, m, d)."""
    query_heads, kv_heads = q.shape[-3], k.shape[-3]
    if query_heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of KV heads but got {query_heads} and {kv_heads}"
        )
    return q.reshape(*q.shape[:-3], kv_heads, query_heads // kv_heads, *q.shape[-2:])


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
