"""Low-rank factors of a tensor by power iteration."""

from __future__ import annotations

import torch
from torch import Tensor


def power_iteration(x: Tensor, rank: int, loops: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Approximate each matrix as A Bᵀ of a small rank (GEAR, 2403.05527; its official code).

    Each loop maps a basis through xᵀ x. GEAR orthonormalises in the last loop only; doing so in
    every loop spans the same space, and float32 does not lose the weaker directions.

    Args:
        x: (..., n, d), any float dtype.
        rank: r; above min(n, d) it is cut to that, and the factors are then exact.
        loops: at least 1; 3 comes within a few per cent of the truncated SVD.
        seed: of the start basis, drawn on the CPU and shared by all matrices.

    Returns:
        A: (..., n, r) with orthonormal columns, and B: (..., d, r); float32, or float64 for
        float64 input. x ≈ A @ Bᵀ.

    Raises:
        ValueError: `rank` is negative, or `loops` is below 1.
    """
    if rank < 0:
        raise ValueError(f"rank must be at least 0 but got {rank}")
    if loops < 1:
        raise ValueError(f"loops must be at least 1 but got {loops}")
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    rank = min(rank, *x.shape[-2:])
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(x.shape[-1], rank, generator=generator).to(x.device, x.dtype)
    b = start.expand(*x.shape[:-2], *start.shape)
    for _ in range(loops):
        a = torch.linalg.qr(x @ torch.linalg.qr(b).Q).Q
        b = x.transpose(-1, -2) @ a
    return a, b
