"""Low-rank factors: of a tensor by power iteration, of a weight under its inputs' statistics."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_JITTER = 1e-12
_LAST_JITTER = 1.0


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


def whitened_low_rank(weight: Tensor, second_moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factor a weight so that its outputs, not its entries, change least (Palu, 2407.21118).

    With S Sᵀ = Xᵀ X (Cholesky) and the SVD U Σ Vᵀ of W S, the factors are L = U √Σ and
    R = √Σ Vᵀ S⁻¹. The error of the outputs is then the least possible one:
    ‖X Wᵀ - X (L R)ᵀ‖_F² is the sum of the squares of the dropped singular values.

    Args:
        weight: (..., out, in) of y = W x.
        second_moment: (..., in, in), Xᵀ X of the inputs that the weight is calibrated on. Where it
            is not positive definite (fewer inputs than channels), the least jitter that makes it
            so is added to its diagonal, in steps of 10 from 1e-12 of the diagonal's mean.
        rank: r, at least 1; above min(out, in) it is cut to that, and the factors are then exact.

    Returns:
        L: (..., out, r) and R: (..., r, in); computed in float64, returned as float32 (float64 for
        a float64 weight).

    Raises:
        ValueError: `rank` is below 1, or no jitter makes `second_moment` positive definite.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1 but got {rank}")
    rank = min(rank, *weight.shape[-2:])
    dtype = torch.promote_types(weight.dtype, torch.float32)
    root = _cholesky(second_moment.double())
    u, sigma, vh = torch.linalg.svd(weight.double() @ root, full_matrices=False)
    half = sigma[..., :rank].sqrt()
    left = u[..., :rank] * half[..., None, :]
    whitened = half[..., None] * vh[..., :rank, :]
    right = torch.linalg.solve_triangular(root, whitened, upper=False, left=False)
    return left.to(dtype), right.to(dtype)


def _cholesky(matrix: Tensor) -> Tensor:
    """Return the lower factor of each matrix, with the least jitter that all of them need."""
    diagonal_mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    unit = torch.where(diagonal_mean > 0, diagonal_mean, torch.ones_like(diagonal_mean))
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    jitter = 0.0
    while jitter <= _LAST_JITTER:
        factor, info = torch.linalg.cholesky_ex(matrix + jitter * unit[..., None, None] * identity)
        if not bool(info.any()):
            lower: Tensor = factor
            return lower
        jitter = max(_FIRST_JITTER, jitter * 10)
    raise ValueError("second_moment is no second moment: it has a large negative direction or NaN")
