"""Rotary position embedding in the rotate-half layout, with the model's own frequencies.

Channel i is paired with channel i + r / 2 of the r rotary channels, as Llama, Mistral and Qwen do
in transformers; models that pair neighbours (interleaved layout) are not covered. Always pass the
model's `inv_freq`: scaled variants (llama3, YaRN, linear) cannot be rebuilt from theta alone.
Source: RoFormer, 2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cos_sin(inv_freq: Tensor, positions: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of positions, in the shape transformers hands to attention.

    Args:
        inv_freq: (r / 2,) radians per token of each channel pair.
        positions: (...) token positions, any sign.
        scaling: the model's `attention_scaling` (YaRN); both results are multiplied by it.

    Returns:
        Two tensors (..., r), float32 (float64 if `inv_freq` is), each half a copy of the other.
    """
    dtype = torch.promote_types(inv_freq.dtype, torch.float32)
    angles = positions.to(inv_freq.device, dtype)[..., None] * inv_freq.to(dtype)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r channels of x; the rest passes (partial rotary).

    Args:
        x: (..., n, d), d >= r.
        cos: (..., n, r) broadcastable to x without its last dimension; add a head dimension to
            what transformers hands over as (batch, n, r).
        sin: as `cos`.

    Returns:
        (..., n, d) in x's dtype; the arithmetic is float32, or float64 where an input is.

    Raises:
        ValueError: r is odd or above d.
    """
    return _rotated(x, cos, sin)


def unapply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo `apply_rope` with the same `cos` and `sin`, their scaling included."""
    norm = cos * cos + sin * sin
    return _rotated(x, cos / norm, -sin / norm)


def rerotate(x: Tensor, inv_freq: Tensor, delta_positions: Tensor) -> Tensor:
    """Move rotated vectors by `delta_positions`: from a to b is b - a.

    Rotations add up, so that a stored key needs no way back. Scaling stays as it was applied.

    Args:
        x: (..., n, d) rotated by `apply_rope`.
        inv_freq: (r / 2,) as used for x.
        delta_positions: broadcastable to (..., n).

    Returns:
        (..., n, d) in x's dtype.
    """
    return _rotated(x, *cos_sin(inv_freq, delta_positions))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    if rotary % 2 or rotary > x.shape[-1]:
        raise ValueError(
            f"rotary channels must be even and at most {x.shape[-1]} (d) but got {rotary}"
        )
    dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    head = x[..., :rotary].to(dtype)
    first, second = head.chunk(2, dim=-1)
    half_turn = torch.cat((-second, first), dim=-1)
    rotated = head * cos.to(dtype) + half_turn * sin.to(dtype)
    return torch.cat((rotated.to(x.dtype), x[..., rotary:]), dim=-1)
