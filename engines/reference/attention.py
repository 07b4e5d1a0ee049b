"""Attention of one sequence over what its cache holds, exact, without padding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK_QUERIES = 256
"""Queries scored at once where attention cannot use the fused kernel."""


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window_tokens: int | None = None,
) -> Tensor:
    """Return softmax(q k^T scale) v: [Hq, m, dv].

    queries [Hq, m, d] at positions [m]; keys [Hk, n, d] and values [Hk, n, dv] at positions [S, n],
    S being 1 or Hk, ascending. A query sees keys at its position and before, at most
    `window_tokens` of them by position; one query alone is taken to be the last and, without a
    window, sees all. `softcap` squashes scores as Gemma 2 does.
    """
    kv_heads, held = keys.shape[:2]
    asked = queries.shape[1]
    if softcap is not None:
        return _attend_in_blocks(
            queries, keys, values, query_positions, key_positions, scale, softcap, window_tokens
        )
    if asked == 1 and window_tokens is None:
        grouped = queries.reshape(1, kv_heads, -1, queries.shape[-1])
        out = scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale)
        return out.reshape(queries.shape[0], 1, -1)
    mask = None
    if asked != held or window_tokens is not None:
        mask = visible(query_positions, key_positions, window_tokens)
        if mask.shape[0] > 1:
            mask = mask.repeat_interleave(queries.shape[0] // kv_heads, dim=0)
        mask = mask[None]
    out = scaled_dot_product_attention(
        queries[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None and asked > 1,
        scale=scale,
        enable_gqa=queries.shape[0] != kv_heads,
    )
    return out[0]


def visible(
    query_positions: Tensor, key_positions: Tensor, window_tokens: int | None = None
) -> Tensor:
    """Return which keys each query sees: bool [S, m, n]."""
    distance = query_positions[None, :, None] - key_positions[:, None, :]
    mask = distance >= 0
    return mask if window_tokens is None else mask & (distance < window_tokens)


def _attend_in_blocks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    softcap: float,
    window_tokens: int | None,
) -> Tensor:
    kv_heads = keys.shape[0]
    grouped = queries.reshape(kv_heads, -1, *queries.shape[1:])
    parts = []
    for start in range(0, queries.shape[1], BLOCK_QUERIES):
        block = slice(start, start + BLOCK_QUERIES)
        scores = torch.einsum("hgmd,hnd->hgmn", grouped[:, :, block], keys).float() * scale
        scores = softcap * torch.tanh(scores / softcap)
        seen = visible(query_positions[block], key_positions, window_tokens)
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).to(values.dtype)
        parts.append(torch.einsum("hgmn,hnd->hgmd", weights, values))
    return torch.cat(parts, dim=2).reshape(queries.shape[0], queries.shape[1], -1)
