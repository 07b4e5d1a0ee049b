"""Asymmetric min/max quantization in groups along one dimension (KIVI, 2402.02750).

A group of values spans [min, max]; with s = (max - min) / (2^bits - 1), a value is stored as
q = round((x - min) / s) and read as q * s + min.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize(
    x: Tensor,
    bits: int,
    dim: int,
    group: int,
    stored_dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x against the scale and minimum as they are stored.

    Codes are chosen after `scale` and `minimum` were rounded to `stored_dtype`, so that
    |x - x̂| <= s / 2 + |min error| + (2^bits - 1) |s error|, which is s / 2 for float32. A group
    of equal values (or one whose scale rounds to 0) uses scale 1. What `stored_dtype` cannot hold
    is clamped to its largest number.

    Args:
        x: any shape, any float dtype.
        bits: 1 to 8.
        dim: dimension that groups run along: tokens for KIVI's keys, channels for its values.
        group: values per group; must divide the size of `dim`.
        stored_dtype: of `scale` and `minimum`.

    Returns:
        codes: x's shape, uint8, unpacked.
        scale, minimum: x's shape with `dim` divided by `group`, in `stored_dtype`.

    Raises:
        ValueError: `bits` is not 1 to 8, or `group` does not divide the dimension.
    """
    steps = _steps(bits)
    grouped, axis = _grouped(x, dim, group)
    values = grouped.float()
    low, high = values.amin(axis), values.amax(axis)
    largest = torch.finfo(stored_dtype).max
    minimum = low.clamp(-largest, largest).to(stored_dtype)
    scale = ((high - low) / steps).clamp(max=largest).to(stored_dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    offsets = values - minimum.float().unsqueeze(axis)
    codes = (offsets / scale.float().unsqueeze(axis)).round().clamp(0, steps)
    return codes.to(torch.uint8).reshape(x.shape), scale, minimum


def dequantize(
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    dim: int,
    group: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return what `quantize` stored, in `dtype`; the arithmetic is float32.

    Args:
        codes: any shape, uint8, unpacked.
        scale: codes' shape with `dim` divided by `group`.
        minimum: as `scale`.
        dim: as quantized.
        group: as quantized.
        dtype: of the result.

    Raises:
        ValueError: `group` does not divide the dimension.
    """
    grouped, axis = _grouped(codes, dim, group)
    values = grouped.float() * scale.float().unsqueeze(axis) + minimum.float().unsqueeze(axis)
    return values.to(dtype).reshape(codes.shape)


def _steps(bits: int) -> int:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 to 8 but got {bits}")
    return (1 << bits) - 1


def _grouped(x: Tensor, dim: int, group: int) -> tuple[Tensor, int]:
    """Return x with `dim` split in (groups, group), and the axis that runs within a group."""
    dim %= x.dim()
    size = x.shape[dim]
    if group < 1 or size % group:
        raise ValueError(f"group must divide the {size} values of dimension {dim} but is {group}")
    shape = (*x.shape[:dim], size // group, group, *x.shape[dim + 1 :])
    return x.reshape(shape), dim + 1
