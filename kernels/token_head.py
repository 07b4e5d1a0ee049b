"""The numerics of vLLM's quantized KV caches, for measuring their loss where vLLM does not run.

Formats named `*_per_token_head` keep one float32 scale for each (token, KV head), for keys and for
values. Read from vLLM 0.32.0:

- int8 and fp8: `_reshape_cache_per_token_head` in
  v1/attention/ops/triton_reshape_and_cache_flash.py
- int4: `_reshape_cache_int4_kernel`, `single_rht`, `reshape_and_cache_int4` in
  v1/attention/ops/int4_per_token_head.py
- fp8 per tensor: `reshape_and_cache_kernel_flash` in the first file; the scale is 1.0 unless the
  checkpoint brings one (model_executor/layers/quantization/kv_cache.py)

GPUs divide float32 less exactly than IEEE, and vLLM may run the int4 transform in bfloat16 on
CUDA; codes can then differ by one step from these.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kvtune.kernels.hadamard import hadamard_transform, random_signs
from kvtune.kernels.packing import look_up, pack_bits, table_of_fours, unpack_bits

TokenHeadFormat = Literal["int8", "int4", "fp8"]

_SMALLEST_SCALE = 1e-6
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_INT4_SIGNS_SEED = 0x9E3779B9


def quantize_token_head(x: Tensor, fmt: TokenHeadFormat) -> tuple[Tensor, Tensor]:
    """Quantize keys or values as vLLM's `<fmt>_per_token_head` cache does.

    int8 and fp8 (e4m3): scale = max(absmax / 127 or 448, 1e-6); int8 rounds halves away from zero,
    fp8 to even; both saturate. int4: the head is rotated by an unnormalised Hadamard transform
    with fixed random signs, rounded to x's dtype, and stored between its minimum and maximum with
    a zero point of 0 to 15, which replaces the low 4 bits of the scale. The zero point is clamped,
    so a rotated head that does not span 0 loses more.

    Args:
        x: (..., d), any float dtype; one row is one (token, KV head).
        fmt: the format.

    Returns:
        data: (..., d) int8 or float8_e4m3fn, or (..., d / 2) uint8 for int4, the even channel in
            the low four bits.
        scale: (...) float32.

    Raises:
        ValueError: `fmt` is unknown, or d is odd for int4.
    """
    if fmt == "int8":
        return _quantize_int8(x)
    if fmt == "fp8":
        scale = _absmax_scale(x, _FP8_MAX)
        return _to_fp8(x.float() * (1.0 / scale)[..., None]), scale
    if fmt == "int4":
        return _quantize_int4(x)
    raise _unknown(fmt)


def dequantize_token_head(
    data: Tensor, scale: Tensor, fmt: TokenHeadFormat, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return (..., d) as vLLM's attention reads what `quantize_token_head` stored.

    Attention folds the scale into its scores and, for values, into its probabilities, which it
    then rounds to the model's dtype; that last rounding is not part of this function.

    Raises:
        ValueError: `fmt` is unknown.
    """
    if fmt == "int8" or fmt == "fp8":
        return data.float().mul_(scale[..., None]).to(dtype)
    if fmt == "int4":
        return _dequantize_int4(data, scale).to(dtype)
    raise _unknown(fmt)


def dequantize_int4_rotated(
    data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `int4_rotate` of what int4 stored, but for rounding, without turning anything."""
    rotated = _rotated_int4(data, scale)
    return rotated.div_(math.sqrt(_power_of_two_factor(rotated.shape[-1]))).to(dtype)


def int4_rotate(x: Tensor) -> Tensor:
    """Return x (..., d) in float32 in the axes of int4's codes; inner products stay as they are."""
    return _int4_rotation(x.float()) / math.sqrt(_power_of_two_factor(x.shape[-1]))


def int4_unrotate(x: Tensor) -> Tensor:
    """Undo `int4_rotate`."""
    turned = _int4_rotation(x.float(), inverse=True)
    return turned / math.sqrt(_power_of_two_factor(x.shape[-1]))


def int4_signs(width: int, device: torch.device) -> Tensor:
    """Return the signs of int4's rotation of `width` channels, one float32 tensor for all callers.

    Their number is the largest power of two that divides `width`: blocks of it are rotated alike.
    """
    return _signs(_power_of_two_factor(width), device)


def quantize_fp8_tensor(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return x / scale in float8_e4m3fn as vLLM's `fp8` cache stores it; beyond ±448 saturates.

    There are no stored scales: a slot takes 2 d bytes.
    """
    return _to_fp8(x.float() / scale)


def dequantize_fp8_tensor(
    data: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return what `quantize_fp8_tensor` stored, times `scale`, in `dtype`."""
    return (data.float() * scale).to(dtype)


def _quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _absmax_scale(x, 127.0)
    steps = x.float() * (1.0 / scale)[..., None]
    return _half_away(steps).clamp(-128, 127).to(torch.int8), scale


def _quantize_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1] % 2:
        raise ValueError(f"int4 needs an even head dimension but got {x.shape[-1]}")
    rotated = _int4_rotation(x.float()).to(x.dtype).float()
    low, high = rotated.amin(-1), rotated.amax(-1)
    scale = ((high - low) / 15.0).clamp(min=_SMALLEST_SCALE)
    zero_point = _half_away(-low / scale).clamp(0, 15)
    steps = rotated * (1.0 / scale)[..., None] + zero_point[..., None]
    codes = _half_away(steps).clamp(0, 15).to(torch.uint8)
    stored = (scale.view(torch.int32) & -16) | zero_point.to(torch.int32)
    return pack_bits(codes, 4), stored.view(torch.float32)


def _dequantize_int4(data: Tensor, scale: Tensor) -> Tensor:
    rotated = _rotated_int4(data, scale)
    return _int4_rotation(rotated, inverse=True) / _power_of_two_factor(rotated.shape[-1])


def _rotated_int4(data: Tensor, scale: Tensor) -> Tensor:
    stored = scale.contiguous().view(torch.int32)
    zero_point = (stored & 0xF).float()
    step = (stored & -16).view(torch.float32)
    width = data.shape[-1] * 2
    if width % 8:
        codes = unpack_bits(data, 4, width).float()
    else:
        codes = look_up(data, 4, width, _int4_codes(data.device))
    return codes.sub_(zero_point[..., None]).mul_(step[..., None])


@lru_cache
def _int4_codes(device: torch.device) -> Tensor:
    return table_of_fours(torch.arange(16, dtype=torch.float32, device=device), 4)


def _int4_rotation(x: Tensor, inverse: bool = False) -> Tensor:
    """Apply H D, or D H, to each block of the largest power of two that divides d."""
    block = _power_of_two_factor(x.shape[-1])
    signs = int4_signs(x.shape[-1], x.device)
    blocks = x.reshape(*x.shape[:-1], -1, block)
    turned = hadamard_transform(blocks) * signs if inverse else hadamard_transform(blocks * signs)
    return turned.reshape(x.shape)


@lru_cache
def _signs(block: int, device: torch.device) -> Tensor:
    return random_signs(block, torch.Generator().manual_seed(_INT4_SIGNS_SEED)).to(device)


def _power_of_two_factor(d: int) -> int:
    return d & -d


def _absmax_scale(x: Tensor, largest: float) -> Tensor:
    return (x.float().abs().amax(-1) / largest).clamp(min=_SMALLEST_SCALE)


def _half_away(x: Tensor) -> Tensor:
    """Round halves away from zero, the way vLLM's kernels do it: add a half, then truncate."""
    return torch.where(x >= 0, x + 0.5, x - 0.5).trunc()


def _to_fp8(x: Tensor) -> Tensor:
    # The cast itself gives NaN beyond the range; NVIDIA's conversion saturates.
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8)


def _unknown(fmt: str) -> ValueError:
    return ValueError(f"the format must be int8, int4 or fp8 but is {fmt!r}")
