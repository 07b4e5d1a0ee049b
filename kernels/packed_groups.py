"""Min/max groups as they are stored: packed codes, and a scale and minimum for each group.

`kernels.minmax` has the arithmetic. torch is imported only when something is encoded, so that
`nbytes` is usable where torch is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtune.kernels.packing import pack_bits, packed_bytes, unpack_bits
from kvtune.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import minmax
else:
    torch = lazy_import("torch")
    minmax = lazy_import("kvtune.kernels.minmax")

_RANGE_BYTES = 4
"""A group's scale and minimum, float16 both."""


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """A format of vectors [..., n, width]: groups along tokens or along channels.

    Attributes:
        bits: of a code, 1 to 8.
        along: `tokens` makes groups of one channel of several tokens, `channels` groups of several
            channels of one token.
        group: values per group; None is one group over the whole dimension. The last group may be
            shorter.
    """

    bits: int
    along: Literal["tokens", "channels"]
    group: int | None = None

    def nbytes(self, n: int, width: int) -> int:
        """Return the bytes of [n, width] vectors, ranges included."""
        per_token = packed_bytes(width, self.bits)
        if self.along == "tokens":
            return n * per_token + self._groups(n) * width * _RANGE_BYTES
        return n * (per_token + self._groups(width) * _RANGE_BYTES)

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Return codes [..., n, ceil(width * bits / 8)] uint8, and scale and minimum, float16.

        These are [..., groups, width] along tokens and [..., n, groups] along channels.

        Raises:
            ValueError: `bits` is not 1 to 8.
        """
        dim = self._dim
        size = x.shape[dim]
        group = self._group(size)
        # Repeating the last value leaves the range of a short group as it is.
        filled = torch.cat((x, *[x.narrow(dim, size - 1, 1)] * (-size % group)), dim)
        codes, scale, minimum = minmax.quantize(filled, self.bits, dim, group)
        own = codes.narrow(dim, 0, size)
        return {"codes": pack_bits(own, self.bits), "scale": scale, "minimum": minimum}

    def decode(self, held: Mapping[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """Return [..., n, width] in `dtype` of what `encode` made."""
        dim = self._dim
        codes = unpack_bits(held["codes"], self.bits, width)
        size = codes.shape[dim]
        group = self._group(size)
        filled = torch.cat((codes, *[codes.narrow(dim, size - 1, 1)] * (-size % group)), dim)
        x = minmax.dequantize(filled, held["scale"], held["minimum"], dim, group, dtype)
        return x.narrow(dim, 0, size)

    @property
    def _dim(self) -> int:
        return -2 if self.along == "tokens" else -1

    def _group(self, size: int) -> int:
        return self.group or max(size, 1)

    def _groups(self, size: int) -> int:
        return -(-size // self._group(size))
