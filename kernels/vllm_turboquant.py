"""The numerics of vLLM's TurboQuant caches, for measuring their loss where vLLM does not run.

Read from vLLM 0.32.0:

- presets and bytes: `TurboQuantConfig` in model_executor/layers/quantization/turboquant/config.py
- levels: `solve_lloyd_max` in .../turboquant/centroids.py
- storing: `_tq_fused_store_mse`, `_tq_fused_store_fp8`, `_store_quantized_value` and
  `triton_turboquant_store` in v1/attention/ops/triton_turboquant_store.py
- reading: `_tq_decode_stage1` in v1/attention/ops/triton_turboquant_decode.py
- rotation: `_build_hadamard` in v1/attention/backends/turboquant_attn.py

A slot's bytes are those of vLLM's cache. GPUs divide and sum float32 in another way, so that single
codes can differ by one; the chunks of a long prompt after the first read keys in float16 there.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtune.kernels.packing import pack_bits, packed_bytes, unpack_bits
from kvtune.kernels.rotation import Rotation
from kvtune.kernels.token_head import dequantize_fp8_tensor, quantize_fp8_tensor

Array = NDArray[np.float64]

FP8_BITS = 8
_SMALLEST_SCALE = 1e-8
_INTERVALS = 200
_MOST_STEPS = 200
_TOLERANCE = 1e-10


@lru_cache
def levels(dim: int, bits: int) -> tuple[float, ...]:
    """Return vLLM's 2^bits levels for the channels of a rotated unit vector, ascending.

    Lloyd-Max for N(0, 1/dim) with means by a trapezoid rule of 200 intervals a cell, which is off
    by up to 0.0017 standard deviations, at the outermost levels.
    """
    count = 1 << bits
    deviation = 1 / math.sqrt(dim)
    end = 3.5 * deviation
    found = -end + 2 * end * (np.arange(count) + 0.5) / count
    for _ in range(_MOST_STEPS):
        inner = (found[1:] + found[:-1]) / 2
        moved = _cell_means(np.concatenate(([-3 * end], inner, [3 * end])), deviation)
        if float(np.max(np.abs(moved - found))) < _TOLERANCE:
            break
        found = moved
    return tuple(found.tolist())


@lru_cache
def level_tensor(dim: int, bits: int, device: torch.device) -> Tensor:
    """Return `levels` as one float32 tensor for all callers on a device."""
    return torch.tensor(levels(dim, bits), dtype=torch.float32, device=device)


def encode_key(x: Tensor, bits: int) -> Tensor:
    """Return the bytes of keys.

    Args:
        x: (..., d), any float dtype.
        bits: 8 stores fp8 (e4m3, no scale); 3 or 4 the norm in float16 and the nearest level of
            each channel of the unit vector after a Hadamard transform without signs.

    Returns:
        (..., d) uint8 for 8 bits, else (..., ceil(d bits / 8) + 2).
    """
    if bits == FP8_BITS:
        return quantize_fp8_tensor(x).view(torch.uint8)
    d = x.shape[-1]
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    turned = Rotation("plain", d).rotate(wide / (norm + 1e-8))
    level = level_tensor(d, bits, x.device)
    borders = (level[:-1] + level[1:]) / 2
    codes = torch.bucketize(turned.contiguous(), borders, right=True).to(torch.uint8)
    return torch.cat((pack_bits(codes, bits), _as_bytes(norm)), dim=-1)


def decode_key(
    slot: Tensor, d: int, bits: int, renormalise: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the keys (..., d) that `encode_key` stored.

    Args:
        slot: bytes, as stored.
        d: channels of a key.
        bits: as stored.
        renormalise: bring the levels of each vector to length 1 ("norm correction").
        dtype: of the result.
    """
    if bits == FP8_BITS:
        return dequantize_fp8_tensor(slot.view(torch.float8_e4m3fn), dtype=dtype)
    size = packed_bytes(d, bits)
    packed, norm = slot[..., :size], slot[..., size:]
    unit = level_tensor(d, bits, slot.device)[unpack_bits(packed, bits, d).long()]
    if renormalise:
        unit = unit * (1 / torch.sqrt((unit * unit).sum(-1, keepdim=True) + 1e-16))
    return (Rotation("plain", d).unrotate(unit) * _as_halves(norm)).to(dtype)


def encode_value(x: Tensor, bits: int) -> Tensor:
    """Return the bytes of values: (..., ceil(d bits / 8) + 4) uint8.

    Codes of 3 or 4 bits between each vector's minimum and maximum, chosen with the scale in
    float32; then scale and minimum, in float16.
    """
    wide = x.float()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    most = (1 << bits) - 1
    scale = ((high - low) / most).clamp(min=_SMALLEST_SCALE)
    codes = ((wide - low) / scale + 0.5).trunc().clamp(0, most).to(torch.uint8)
    return torch.cat((pack_bits(codes, bits), _as_bytes(scale), _as_bytes(low)), dim=-1)


def decode_value(slot: Tensor, d: int, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values (..., d) that `encode_value` stored."""
    size = packed_bytes(d, bits)
    codes = unpack_bits(slot[..., :size], bits, d).float()
    scale, low = _as_halves(slot[..., size : size + 2]), _as_halves(slot[..., size + 2 :])
    return (codes * scale + low).to(dtype)


def _cell_means(borders: Array, deviation: float) -> Array:
    """The mean of N(0, deviation²) in each cell."""
    at = np.linspace(borders[:-1], borders[1:], _INTERVALS + 1, axis=-1)
    density = np.exp(-(at**2) / (2 * deviation**2))
    density[:, [0, -1]] /= 2
    means: Array = (at * density).sum(-1) / density.sum(-1)
    return means


def _as_bytes(x: Tensor) -> Tensor:
    return x.to(torch.float16).contiguous().view(torch.uint8)


def _as_halves(x: Tensor) -> Tensor:
    # A slice may start at an odd byte, and halves must not.
    return x.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
