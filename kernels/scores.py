"""Attention scores that token policies rank cached tokens by.

Softmax runs in float32 (float64 for float64 inputs). Query heads come in groups: with Hq query
heads and Hk KV heads, the g = Hq / Hk heads of a group read the same KV head, so head h belongs to
KV head h // g. A query that sees no key gets probability 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GroupReduce = Literal["mean", "max"]


def attention_probs(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    causal_offset: int | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return softmax(scale * q kᵀ) per KV head and head of its group.

    Args:
        q: (..., Hq, m, d) queries, rotated as the model does.
        k: (..., Hk, n, d) keys, rotated as the model does.
        scale: factor of the logits, usually d ** -0.5.
        causal_offset: query i sees keys 0 to i + causal_offset; n - m where the queries are the
            last m of n tokens. None leaves out the causal mask.
        mask: bool, broadcastable to (..., Hk, g, m, n), True where a key is seen. Combines with
            `causal_offset`.
        softcap: logits become `softcap * tanh(logits / softcap)` before the mask (Gemma 2).

    Returns:
        (..., Hk, g, m, n), float32.

    Raises:
        ValueError: Hq is no multiple of Hk.
    """
    visible = mask
    if causal_offset is not None:
        queries = torch.arange(q.shape[-2], device=q.device)
        keys = torch.arange(k.shape[-2], device=q.device)
        causal = keys <= queries[:, None] + causal_offset
        visible = causal if mask is None else causal & mask
    return _probs(_grouped(q, k), k, scale, visible, softcap)


def column_sums(
    q: Tensor,
    k: Tensor,
    scale: float,
    first_query_position: int,
    *,
    key_positions: Tensor | None = None,
    block: int = 256,
    group_reduce: GroupReduce = "mean",
    softcap: float | None = None,
) -> Tensor:
    """Return what attention each key got, summed over all queries (the score of H2O, 2306.14048).

    The sum over queries is taken per query head; the group is reduced afterwards. (`column_max`
    reduces heads and queries together.) Queries are worked on `block` at a time, so that memory
    grows with block * n and never with m * n.

    Args:
        q: (..., Hq, m, d) rotated queries at positions first_query_position, + 1, ...
        k: (..., Hk, n, d) rotated keys.
        scale: factor of the logits.
        first_query_position: true position of query 0; a query sees keys at its position or before.
        key_positions: (n,) or (..., Hk, n) true positions; None means 0 to n - 1.
        block: queries per step, at least 1.
        group_reduce: over the g heads of a KV head.
        softcap: as in `attention_probs`.

    Returns:
        (..., Hk, n) float32. With `mean`, each KV head's row sums to m where every query sees a
        key.

    Raises:
        ValueError: Hq is no multiple of Hk, or `block` is below 1.
    """
    total = _head_zeros(q, k)
    for probs in _blocks(q, k, scale, first_query_position, key_positions, block, softcap):
        total += probs.sum(dim=-2)
    return reduce_group(total, group_reduce)


def column_max(
    q: Tensor,
    k: Tensor,
    scale: float,
    first_query_position: int,
    *,
    key_positions: Tensor | None = None,
    block: int = 256,
    softcap: float | None = None,
) -> Tensor:
    """Return the most attention each key got from any query of any head of its group.

    The score of KVzip (2505.23416). Arguments, shapes and errors are those of `column_sums`.
    Returns (..., Hk, n) float32 in [0, 1].
    """
    best = _head_zeros(q, k)
    for probs in _blocks(q, k, scale, first_query_position, key_positions, block, softcap):
        best = torch.maximum(best, probs.amax(dim=-2))
    return reduce_group(best, "max")


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


def _blocks(
    q: Tensor,
    k: Tensor,
    scale: float,
    first_query_position: int,
    key_positions: Tensor | None,
    block: int,
    softcap: float | None,
) -> Iterator[Tensor]:
    """Yield the probabilities (..., Hk, g, <= block, n) of one block of queries after another."""
    if block < 1:
        raise ValueError(f"block must be at least 1 but got {block}")
    grouped = _grouped(q, k)
    if key_positions is None:
        key_positions = torch.arange(k.shape[-2], device=k.device)
    if key_positions.dim() > 1:
        key_positions = key_positions[..., None, None, :]
    queries = q.shape[-2]
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        positions = first_query_position + torch.arange(start, stop, device=k.device)
        visible = key_positions <= positions[:, None]
        yield _probs(grouped[..., start:stop, :], k, scale, visible, softcap)


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Return q as (..., Hk, g, m, d)."""
    query_heads, kv_heads = q.shape[-3], k.shape[-3]
    if query_heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of KV heads but got {query_heads} and {kv_heads}"
        )
    return q.reshape(*q.shape[:-3], kv_heads, query_heads // kv_heads, *q.shape[-2:])


def _probs(
    grouped: Tensor, k: Tensor, scale: float, visible: Tensor | None, softcap: float | None
) -> Tensor:
    keys = _widened(k)[..., None, :, :]
    logits = _widened(grouped) @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if visible is None:
        return torch.softmax(logits, dim=-1)
    logits = logits.masked_fill(~visible, float("-inf"))
    # A row without a visible key is 0/0 in softmax; it attends to nothing.
    return torch.softmax(logits, dim=-1).masked_fill(~visible, 0.0)


def _head_zeros(q: Tensor, k: Tensor) -> Tensor:
    """Return zeros of (..., Hk, g, n), one row for each query head."""
    grouped = _grouped(q, k)
    shape = (*grouped.shape[:-2], k.shape[-2])
    return torch.zeros(shape, dtype=_widened_dtype(q), device=q.device)


def _widened(x: Tensor) -> Tensor:
    return x.to(_widened_dtype(x))


def _widened_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
