"""Oja's rule in blocks: follow the leading subspace of a stream of vectors (Oja, 1982).

U <- qr(U + rate * Xᵀ (X U) / m) for each block X of m vectors, where U stays orthonormal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def oja_update(basis: Tensor, x: Tensor, rate: Tensor | float) -> Tensor:
    """Turn a basis towards where one block of vectors has its energy.

    Args:
        basis: (..., d, r) with orthonormal columns.
        x: (..., m, d), m at least 1.
        rate: a number, or one for each batch member (...); 0 leaves the basis alone.

    Returns:
        (..., d, r) with orthonormal columns, float32 (float64 for float64 bases). Columns keep
        their direction: none is flipped.
    """
    x = x.to(basis.dtype)
    step = torch.as_tensor(rate, dtype=basis.dtype, device=basis.device)[..., None, None]
    moved = basis + step * (x.mT @ (x @ basis)) / x.shape[-2]
    q, r = torch.linalg.qr(moved)
    flips = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(basis.dtype)
    turned: Tensor = q * flips.unsqueeze(-2)
    return turned


def largest_energy(x: Tensor) -> Tensor:
    """Return the largest eigenvalue (...) of Xᵀ X / m for vectors (..., m, d), in float32."""
    x = x.float()
    energy: Tensor = torch.linalg.matrix_norm(x, 2).square() / x.shape[-2]
    return energy
