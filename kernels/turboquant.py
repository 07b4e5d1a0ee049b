"""TurboQuant: vectors as a norm and the nearest levels of their rotated channels (2504.19874).

A random rotation makes the channels of every unit vector follow one known distribution, whose best
levels (Lloyd-Max) fit all vectors: nothing is learned, and each vector is stored by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kvtune.kernels.lloyd_max import SMALLEST_SPHERE_DIM, lloyd_max, nearest
from kvtune.kernels.packing import look_up, pack_bits, table_of_fours, unpack_bits
from kvtune.kernels.rotation import Rotation

Mode = Literal["mse", "prod"]

_HALF_MAX = torch.finfo(torch.float16).max
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class VectorQuantizer:
    """A quantizer for vectors of `rotation.dim` channels.

    Attributes:
        bits: stored for each channel: 1 to 8 for `mse`, 2 to 8 for `prod`.
        mode: `mse` has the least squared error, and inner products that are too small by its
            distortion D(bits). `prod` has one bit less for the levels and spends it on the signs of
            the rotated residual (a QJL sketch): inner products are right on average, with a mean
            squared error of (pi/2 - 1) D(bits - 1) |x|² |y|² / d.
        rotation: of the vector.
        sketch: the second, independent rotation of `prod`; unused in `mse`. The paper draws a
            Gaussian matrix, whose error is pi/2 instead of pi/2 - 1 times that.
    """

    bits: int
    mode: Mode
    rotation: Rotation
    sketch: Rotation

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Quantize vectors.

        Args:
            x: (..., d), any float dtype.

        Returns:
            codes: (..., ceil(d level_bits / 8)) uint8, packed; level_bits is bits, or bits - 1.
            norm: (...) float16, at most 65504.
            signs: (..., ceil(d / 8)) uint8 and residual: (...) float16, of `prod` only.
        """
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1)
        unit = wide / norm.clamp(min=_TINY)[..., None]
        levels = self._levels(x.device)
        codes = nearest(self.rotation.rotate(unit), levels)
        stored = {"codes": pack_bits(codes, self._level_bits), "norm": _half(norm)}
        if self.mode == "prod":
            rest = unit - self.rotation.unrotate(levels[codes.long()])
            positive = (self.sketch.rotate(rest) >= 0).to(torch.uint8)
            stored["signs"] = pack_bits(positive, 1)
            stored["residual"] = _half(torch.linalg.vector_norm(rest, dim=-1))
        return stored

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return (..., d) float32 of what `encode` made."""
        unit = self.rotation.unrotate(self._looked_up(stored["codes"]))
        if self.mode == "prod":
            unit = unit + self._residual(stored)
        return unit * stored["norm"].float()[..., None]

    def decode_rotated(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return `rotation.rotate(decode(stored))`, but for rounding, without turning anything.

        Inner products with it are those of rotated vectors, which there may be fewer of.
        """
        unit = self._looked_up(stored["codes"])
        if self.mode == "prod":
            unit = unit + self.rotation.rotate(self._residual(stored))
        return unit.mul_(stored["norm"].float()[..., None])

    def tables(self, device: torch.device) -> dict[str, Tensor]:
        """Return what it reads besides stored vectors, the same tensors for equal quantizers."""
        found = {"levels": self._levels(device), "rotation": self.rotation.table(device)}
        if self.mode == "prod":
            found["sketch"] = self.sketch.table(device)
        return found

    @property
    def _level_bits(self) -> int:
        return self.bits - (self.mode == "prod")

    def _looked_up(self, packed: Tensor) -> Tensor:
        """The levels of packed codes, (..., d) float32."""
        bits, d = self._level_bits, self.rotation.dim
        if bits > 4 or d % 8:
            return self._levels(packed.device)[unpack_bits(packed, bits, d).long()]
        return look_up(packed, bits, d, _levels_of_fours(bits, d, packed.device))

    def _residual(self, stored: Mapping[str, Tensor]) -> Tensor:
        """What `prod` adds to the unit vector, (..., d) float32."""
        d = self.rotation.dim
        signs = unpack_bits(stored["signs"], 1, d).float() * 2 - 1
        length = stored["residual"].float() * _sketch_gain(d)
        return self.sketch.unrotate(signs) * length[..., None]

    def _levels(self, device: torch.device) -> Tensor:
        return _level_tensor(self._level_bits, self.rotation.dim, device)


@lru_cache
def _level_tensor(bits: int, dim: int, device: torch.device) -> Tensor:
    sphere = dim if dim >= SMALLEST_SPHERE_DIM else None
    return lloyd_max(bits, sphere).tensor(device, 1 / math.sqrt(dim))


@lru_cache
def _levels_of_fours(bits: int, dim: int, device: torch.device) -> Tensor:
    return table_of_fours(_level_tensor(bits, dim, device), bits)


def _sketch_gain(dim: int) -> float:
    """1 / (dim E|s|) for a coordinate s of a uniform unit vector: about sqrt(pi / (2 dim))."""
    return math.sqrt(math.pi) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2)) / dim


def _half(x: Tensor) -> Tensor:
    return x.clamp(max=_HALF_MAX).to(torch.float16)
