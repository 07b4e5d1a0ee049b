"""Keys and values as the bytes of a cell: what the cache keeps of one token of one KV head.

The codecs are those of the reference engine's methods, so that both engines store the same codes.
A cell is the key's tensors and then the value's, each in the order in which its codec names them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.policies.method import PlaneShape, StoreMethod
from kvtune.policies.methods.turboquant import TurboQuant
from kvtune.policies.methods.vllm_int4_per_token_head import VllmInt4PerTokenHead
from kvtune.policies.methods.vllm_int8_per_token_head import VllmInt8PerTokenHead
from kvtune.policies.plane import PlaneContext, TokenCodec, TokenPlane, full_plane
from kvtune.policies.plugin_config import StoreConfig


@dataclass(frozen=True, slots=True)
class Field:
    """Where a tensor of a codec lies within a cell: `end - start` bytes of `shape` numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class Part:
    """The key or the value of a cell, from byte `start` on."""

    def __init__(self, codec: TokenCodec, width: int, start: int) -> None:
        self.codec = codec
        self.fields: list[Field] = []
        for name, one in codec.encode(torch.zeros(1, 1, width)).items():
            shape = tuple(one.shape[2:])
            end = start + math.prod(shape) * one.element_size()
            self.fields.append(Field(name, one.dtype, shape, start, end))
            start = end
        self.end = start

    def write(self, x: Tensor, cells: Tensor) -> None:
        """Encode `x` [heads, n, width] into its bytes of `cells` [heads, n, bytes]."""
        for (name, encoded), field in zip(self.codec.encode(x).items(), self.fields, strict=True):
            assert name == field.name
            numbers = encoded.reshape(*encoded.shape[:2], math.prod(field.shape))
            cells[..., field.start : field.end] = numbers.view(torch.uint8)

    def read(self, cells: Tensor) -> Tensor:
        """Decode `cells` [heads, n, bytes]: [heads, n, width], in the codec's own axes."""
        return self.codec.decode_rotated(
            {
                field.name: _bytes_of(field, cells)
                .view(field.dtype)
                .view(*cells.shape[:2], *field.shape)
                for field in self.fields
            }
        )


def _bytes_of(field: Field, cells: Tensor) -> Tensor:
    """The bytes of a field in cells [heads, n, bytes]; copied only if its numbers need that."""
    held = cells[..., field.start : field.end]
    return held if field.dtype.itemsize == 1 else held.contiguous()


class Cells:
    """A format of cells for heads of `width` channels; vectors are read in `dtype`."""

    def __init__(self, method: StoreMethod, width: int, dtype: torch.dtype) -> None:
        self.width = width
        self.key = Part(_codec(method, "key", width, dtype), width, 0)
        self.value = Part(_codec(method, "value", width, dtype), width, self.key.end)

    @property
    def nbytes(self) -> int:
        """Bytes of a cell."""
        return self.value.end

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return the cells [heads, n, nbytes] uint8 of keys and values [heads, n, width]."""
        cells = torch.empty(*keys.shape[:2], self.nbytes, dtype=torch.uint8, device=keys.device)
        self.key.write(keys, cells)
        self.value.write(values, cells)
        return cells

    def decode(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [heads, n, width] of cells [heads, n, nbytes], or pages of them.

        They are in axes of their own: `queries` in these get the same scores, and of what attention
        makes `outputs` are meant. It spares turning every key and value back.
        """
        return self.key.read(cells), self.value.read(cells)

    def keys(self, cells: Tensor) -> Tensor:
        """Return the keys [heads, n, width] of cells [heads, n, nbytes], in the model's axes."""
        keys = self.key.read(cells)
        return self.key.codec.unrotate(keys).to(keys.dtype)

    def queries(self, queries: Tensor) -> Tensor:
        """Queries [..., width] in the axes of the keys."""
        return self.key.codec.rotate(queries).to(queries.dtype)

    def outputs(self, attended: Tensor) -> Tensor:
        """What was `attended` [..., width] in the axes of the values, in those of the model."""
        return self.value.codec.unrotate(attended).to(attended.dtype)


@functools.cache
def cells_of(asked: StoreConfig, width: int, dtype: torch.dtype) -> Cells:
    """The cells of the format that is `asked` for.

    Raises:
        BadInput: the format does not go with heads of `width` channels.
    """
    return Cells(_method(asked), width, dtype)


def _method(asked: StoreConfig) -> StoreMethod:
    if asked.format == "int8":
        return VllmInt8PerTokenHead()
    if asked.format == "int4":
        return VllmInt4PerTokenHead()
    return TurboQuant(bits_key=asked.bits_key, bits_value=asked.bits_value)


def _codec(method: StoreMethod, role: str, width: int, dtype: torch.dtype) -> TokenCodec:
    shape = PlaneShape(
        role="key" if role == "key" else "value",
        heads=1,
        width=width,
        element_bytes=dtype.itemsize,
        layer=0,
        layers=1,
    )
    plane = method.plane(PlaneContext(shape, dtype, torch.device("cpu")), full_plane)
    assert isinstance(plane, TokenPlane)
    return plane.codec
