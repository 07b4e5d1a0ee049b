"""vLLM's own variant of TurboQuant, as its presets have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvtune.errors import BadInput
from kvtune.kernels.packing import packed_bytes
from kvtune.lazy import lazy_import
from kvtune.policies.method import (
    REFERENCE,
    Axis,
    History,
    Paper,
    PlaneBytes,
    PlaneFactory,
    PlaneShape,
    Saves,
    Serving,
    StoreMethod,
)
from kvtune.policies.plane import Plane, PlaneContext, TokenCodec, TokenPlane, full_plane
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import vllm_turboquant as kernel
else:
    torch = lazy_import("torch")
    kernel = lazy_import("kvtune.kernels.vllm_turboquant")

FP8 = 8
SMALLEST_WIDTH = 8


@dataclass(frozen=True, slots=True)
class Preset:
    """Bits a channel of keys (8: fp8) and of values, and whether keys are brought to length 1."""

    key_bits: int
    value_bits: int
    renormalise: bool


PRESETS: Mapping[str, Preset] = {
    "k8v4": Preset(FP8, 4, False),
    "4bit_nc": Preset(4, 4, True),
    "k3v4_nc": Preset(3, 4, True),
    "3bit_nc": Preset(3, 3, True),
}


class KeyCodec(TokenCodec):
    """`slot` [heads, n, bytes]: what vLLM writes for a key."""

    def __init__(self, preset: Preset, ctx: PlaneContext) -> None:
        self.preset = preset
        self.width = ctx.shape.width
        self.dtype = ctx.dtype
        self.device = ctx.device

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Rotate and quantize, or cast to fp8."""
        return {"slot": kernel.encode_key(x, self.preset.key_bits)}

    def decode(self, held: Mapping[str, Tensor]) -> Tensor:
        """Look up the levels and rotate back."""
        preset = self.preset
        return kernel.decode_key(
            held["slot"], self.width, preset.key_bits, preset.renormalise, self.dtype
        )

    def constants(self) -> dict[str, Tensor]:
        """The levels."""
        if self.preset.key_bits == FP8:
            return {}
        return {"levels": kernel.level_tensor(self.width, self.preset.key_bits, self.device)}


class ValueCodec(TokenCodec):
    """`slot` [heads, n, bytes]: what vLLM writes for a value, and the byte that evens a slot."""

    def __init__(self, preset: Preset, ctx: PlaneContext) -> None:
        self.bits = preset.value_bits
        self.padding_bytes = _padding_bytes(preset, ctx.shape.width)
        self.width = ctx.shape.width
        self.dtype = ctx.dtype

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Quantize between each vector's minimum and maximum."""
        stored = kernel.encode_value(x, self.bits)
        return {"slot": torch.nn.functional.pad(stored, (0, self.padding_bytes))}

    def decode(self, held: Mapping[str, Tensor]) -> Tensor:
        """Scale the codes back."""
        used = held["slot"].shape[-1] - self.padding_bytes
        return kernel.decode_value(held["slot"][..., :used], self.width, self.bits, self.dtype)


class VllmTurboQuant(StoreMethod):
    """Keys: levels of the rotated unit vector, or fp8; values: uniform codes of each vector.

    Differs from the paper: the rotation has no random signs (so that a key along one of its rows
    is not spread at all), values are not rotated, there is no second stage. The idea is older than
    the paper: DRIVE (2021), EDEN (2022), HIGGS (2411.17525).

    At 128 channels a slot of key and value takes 196 (k8v4), 134 (4bit_nc), 118 (k3v4_nc) or 102
    bytes (3bit_nc). A slot of an odd size is padded by one byte, counted with the values.
    `boundary_layers` at each end stay in full precision (at most half of all layers): vLLM takes 2,
    and 0 for a hybrid model. The presets "nc" need a head size that is a power of two. vLLM serves
    it on CUDA only, for 16-bit models without sliding windows; below compute capability 8.9 the
    keys of k8v4 are in another fp8 format (e4b15) than here. On a CPU it takes the option without
    a word, and turns prompts longer than one block to garbage.
    """

    name = "vllm-turboquant"
    title = "vLLM TurboQuant"
    axis = Axis.BITS
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    serving = (
        REFERENCE,
        Serving("vllm", "--kv-cache-dtype turboquant_<preset>", "0.32", ("cuda",)),
    )
    paper = Paper(
        "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
        "2504.19874",
        2025,
    )
    summary = (
        "Holds keys in 3, 4 or 8 bits after a rotation and values in 3 or 4: 2.6 to 5 times fewer "
        "bytes, for perplexity 1% to 21% higher by vLLM's own figures."
    )

    preset: Literal["k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"] = "4bit_nc"
    boundary_layers: int = Field(default=2, ge=0)

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build the empty store.

        Raises:
            BadInput: the preset does not work with this head size.
        """
        if self._in_full_precision(ctx.shape):
            return full_plane(ctx)
        preset = PRESETS[self.preset]
        width = ctx.shape.width
        if preset.key_bits != FP8 and (width < SMALLEST_WIDTH or width & (width - 1)):
            raise BadInput(
                f"{self.name} rotates {width} channels by a Hadamard transform, which needs a "
                f"power of two from {SMALLEST_WIDTH} on",
                fix="use preset=k8v4, or turboquant",
            )
        is_key = ctx.shape.role == "key"
        return TokenPlane(KeyCodec(preset, ctx) if is_key else ValueCodec(preset, ctx))

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """vLLM's slots, or full precision in boundary layers."""
        return self.selected_bytes(shape, held, held.tokens)

    def selected_bytes(self, shape: PlaneShape, held: History, tokens: int) -> int:
        """Tokens are read one by one."""
        if self._in_full_precision(shape):
            return shape.full_bytes(tokens)
        preset = PRESETS[self.preset]
        if shape.role == "key":
            return shape.heads * tokens * _key_bytes(preset, shape.width)
        value = _value_bytes(preset, shape.width) + _padding_bytes(preset, shape.width)
        return shape.heads * tokens * value

    def constants_bytes(self, shapes: Sequence[PlaneShape]) -> int:
        """The levels, one table for all layers with keys of one size."""
        bits = PRESETS[self.preset].key_bits
        if bits == FP8:
            return 0
        widths = {
            shape.width
            for shape in shapes
            if shape.role == "key" and not self._in_full_precision(shape)
        }
        return len(widths) * (4 << bits)

    def _in_full_precision(self, shape: PlaneShape) -> bool:
        count = min(self.boundary_layers, shape.layers // 2)
        return shape.layer < count or shape.layer >= shape.layers - count


def _key_bytes(preset: Preset, width: int) -> int:
    if preset.key_bits == FP8:
        return width
    return packed_bytes(width, preset.key_bits) + 2


def _value_bytes(preset: Preset, width: int) -> int:
    return packed_bytes(width, preset.value_bits) + 4


def _padding_bytes(preset: Preset, width: int) -> int:
    return (_key_bytes(preset, width) + _value_bytes(preset, width)) % 2
