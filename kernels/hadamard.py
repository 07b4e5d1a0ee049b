"""The fast Walsh-Hadamard transform in Sylvester's order."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard_transform(x: Tensor) -> Tensor:
    """Return H x along the last dimension, unnormalised: H H = d I.

    Args:
        x: (..., d), d a power of two.

    Returns:
        (..., d) in x's dtype, d log2(d) additions a row.

    Raises:
        ValueError: d is no power of two.
    """
    d = x.shape[-1]
    if d < 1 or d & (d - 1):
        raise ValueError(f"the last dimension must be a power of two but is {d}")
    shape = x.shape
    half = 1
    while half < d:
        pairs = x.reshape(*shape[:-1], d // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((first + second, first - second), dim=-2).reshape(shape)
        half *= 2
    return x


def random_signs(d: int, generator: torch.Generator) -> Tensor:
    """Return (d,) float32 of ±1, each as likely, drawn on the CPU."""
    return 2.0 * torch.bernoulli(torch.full((d,), 0.5), generator=generator) - 1.0
