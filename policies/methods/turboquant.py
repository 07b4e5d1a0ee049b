"""TurboQuant: keys and values as norms and levels of rotated channels, with nothing to learn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

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
    Role,
    Saves,
    Serving,
    StoreMethod,
)
from kvtune.policies.plane import (
    Plane,
    PlaneContext,
    TokenCodec,
    TokenPlane,
    full_plane,
    tensor_bytes,
)
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import packing, rotation, topk
    from kvtune.kernels import turboquant as kernel
else:
    torch = lazy_import("torch")
    packing = lazy_import("kvtune.kernels.packing")
    rotation = lazy_import("kvtune.kernels.rotation")
    topk = lazy_import("kvtune.kernels.topk")
    kernel = lazy_import("kvtune.kernels.turboquant")

HALF_BYTES = 2
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Channels that are quantized together: how many, at how many bits, and in which mode."""

    width: int
    bits: int
    mode: Literal["mse", "prod"]

    @property
    def level_bits(self) -> int:
        """Bits for the levels; `prod` spends one on signs."""
        return self.bits - (self.mode == "prod")

    @property
    def token_bytes(self) -> int:
        """Codes and a norm; signs and the residual's norm too in `prod`."""
        size = packed_bytes(self.width, self.level_bits) + HALF_BYTES
        if self.mode == "prod":
            size += packed_bytes(self.width, 1) + HALF_BYTES
        return size


class TurboCodec(TokenCodec):
    """`codes`, `norm`, and in `prod` `signs` and `residual`, of [heads, n, ...]."""

    def __init__(
        self, quantizer: kernel.VectorQuantizer, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.quantizer = quantizer
        self.dtype = dtype
        self.device = device

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Quantize each vector by itself."""
        return self.quantizer.encode(x)

    def decode(self, held: Mapping[str, Tensor]) -> Tensor:
        """Look up the levels and rotate back."""
        return self.quantizer.decode(held).to(self.dtype)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate as vectors are before they are coded."""
        return self.quantizer.rotation.rotate(x)

    def unrotate(self, x: Tensor) -> Tensor:
        """Rotate back."""
        return self.quantizer.rotation.unrotate(x)

    def decode_rotated(self, held: Mapping[str, Tensor]) -> Tensor:
        """Look up the levels."""
        return self.quantizer.decode_rotated(held).to(self.dtype)

    def constants(self) -> dict[str, Tensor]:
        """Levels and rotations."""
        return self.quantizer.tables(self.device)


class LearnedPlane(Plane):
    """A plane that learns a mean and outlier channels of each head from the prompt.

    Holds `mean` [heads, width] in the compute dtype, `outliers` [heads, ceil(width / 8)] with one
    bit a channel, or both, and stores tokens through one plane for the regular channels and one for
    the outliers. What was learned from the first append stays until the plane is cleared, through
    evictions too.
    """

    def __init__(
        self,
        ctx: PlaneContext,
        regular: TokenPlane,
        outlier: TokenPlane | None,
        outlier_channels: int,
        centred: bool,
    ) -> None:
        super().__init__()
        self.width = ctx.shape.width
        self.dtype = ctx.dtype
        self.centred = centred
        self.regular = regular
        self.outlier = outlier
        self.outlier_channels = outlier_channels
        self.constants = {
            f"{number}.{name}": table
            for number, part in enumerate(self._parts)
            for name, table in part.constants.items()
        }

    @property
    def tokens(self) -> int:
        """How many tokens it holds for each head."""
        return self.regular.tokens

    @property
    def settled_tokens(self) -> int:
        """All: what was learned does not change."""
        return self.tokens

    def append(self, x: Tensor) -> None:
        """Add token vectors; learn from the first ones before."""
        if not self.held:
            self._learn(x)
        wide = x.float()
        if self.centred:
            wide = wide - self.held["mean"].float().unsqueeze(1)
        if self.outlier is None:
            self.regular.append(wide)
            return
        moved = wide.gather(2, self._order().expand_as(wide))
        self.outlier.append(moved[..., : self.outlier_channels])
        self.regular.append(moved[..., self.outlier_channels :])

    def read(self) -> Tensor:
        """Decode all tokens."""
        return self._joined([part.read() for part in self._parts])

    def select(self, index: Tensor) -> tuple[Tensor, int]:
        """Decode only the tokens at `index`."""
        found = [part.select(index) for part in self._parts]
        touched = tensor_bytes(self.held) + sum(count for _, count in found)
        return self._joined([x for x, _ in found]), touched

    def keep(self, index: Tensor) -> None:
        """Move the survivors' bytes; nothing is encoded or learned again."""
        for part in self._parts:
            part.keep(index)

    def clear(self) -> None:
        """Drop every token and what was learned."""
        self.held = {}
        for part in self._parts:
            part.clear()

    def tensors(self) -> dict[str, Tensor]:
        """What was learned, and the tensors of both parts."""
        inside = {
            f"{number}.{name}": tensor
            for number, part in enumerate(self._parts)
            for name, tensor in part.tensors().items()
        }
        return {**self.held, **inside}

    @property
    def _parts(self) -> list[TokenPlane]:
        """Outliers first."""
        return [self.regular] if self.outlier is None else [self.outlier, self.regular]

    def _learn(self, x: Tensor) -> None:
        wide = x.float()
        if self.centred:
            self.held["mean"] = wide.mean(1).to(self.dtype)
            wide = wide - self.held["mean"].float().unsqueeze(1)
        if self.outlier is not None:
            power = wide.square().mean(1)
            chosen = topk.top_indices(power, self.outlier_channels)
            mask = torch.zeros_like(power, dtype=torch.uint8).scatter_(1, chosen, 1)
            self.held["outliers"] = packing.pack_bits(mask, 1)

    def _order(self) -> Tensor:
        """Channels of each head, outliers first: [heads, 1, width]."""
        mask = packing.unpack_bits(self.held["outliers"], 1, self.width)
        return mask.argsort(dim=1, descending=True, stable=True).unsqueeze(1)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        x = parts[0]
        if self.outlier is not None:
            moved = torch.cat(parts, dim=2)
            x = torch.empty_like(moved).scatter_(2, self._order().expand_as(moved), moved)
        if self.centred:
            x = x + self.held["mean"].float().unsqueeze(1)
        return x.to(self.dtype)


class TurboQuant(StoreMethod):
    """Rotate, quantize each channel to the best levels for a rotated vector, keep the norm.

    Keys are stored after RoPE; generated tokens are quantized at once, like the prompt's. With
    `mode_key` "prod" keys spend one of their bits on signs that make inner products right on
    average; users report that the variance costs attention more than the bias did, so "mse" is the
    default. Values are always "mse".

    `rounds` of signed Hadamard transforms: two spread every vector, one leaves unit vectors flat. A
    width that is no power of two is rotated by a dense matrix ("haar") instead. `seed` fixes the
    rotation, the same one for all layers.

    With `outlier_channels`, the channels with the largest RMS of each head (over the prompt; the
    paper leaves the choice open) get `outlier_extra_bits` more, as a quantizer of their own with
    its own norm. 32 of 128 channels at 3 bits and 96 at 2 are 2.25 bits a channel, 2.5 with the
    norms: see `stored_bits`. `center_keys` subtracts the prompt's mean key of each head before and
    adds it after; a kernel may leave out the addition, because q·mean shifts all scores alike.
    Both make a stored token depend on the whole prompt, so that no other request may use it, and
    cannot lie in shared pages. Prompts that are stored in chunks learn from the first chunk.

    Bytes of a vector of d channels: ceil(d b / 8) + 2; "prod" ceil(d (b - 1) / 8) + ceil(d / 8) +
    4; the sum of both parts with outliers, and ceil(d / 8) once for each head. Shared by all
    sequences: levels, and signs (or a matrix) for each width.
    """

    name = "turboquant"
    title = "TurboQuant"
    axis = Axis.BITS
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    serving = (
        REFERENCE,
        Serving(
            "kvtune-plugin",
            "vLLM 0.32, --additional-config.kvtune.store.format turboquant",
            platforms=("cpu",),
        ),
    )
    paper = Paper(
        "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
        "2504.19874",
        2025,
    )
    summary = (
        "Holds rotated keys and values in a few bits a channel with no calibration and no window: "
        "12% of the energy of a vector is lost at 2 bits, 1% at 4."
    )

    bits_key: int = Field(default=4, ge=1, le=8)
    bits_value: int = Field(default=4, ge=1, le=8)
    mode_key: Literal["mse", "prod"] = "mse"
    rotation: Literal["hadamard", "haar"] = "hadamard"
    rounds: int = Field(default=2, ge=1, le=8)
    seed: int = Field(default=0, ge=0)
    outlier_channels: int = Field(default=0, ge=0)
    outlier_extra_bits: int = Field(default=1, ge=1, le=7)
    center_keys: bool = False
    protected_layers: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _bits_go_together(self) -> Self:
        if self.mode_key == "prod" and self.bits_key < 2:
            raise ValueError("mode_key=prod spends a bit on signs: bits_key must be at least 2")
        most = max(self.bits_key, self.bits_value) + self.outlier_extra_bits
        if self.outlier_channels and most > 8:
            raise ValueError(f"outliers would get {most} bits, and 8 is the most")
        return self

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """Each token is stored alone, unless something is learned from the prompt."""
        return "never" if self.outlier_channels or self.center_keys else "fingerprint"

    @property
    def one_page_kind(self) -> bool:
        """Not when masks or means of the prompt belong to the whole sequence."""
        return not (self.outlier_channels or self.center_keys)

    def stored_bits(self, role: Role, width: int) -> float:
        """Bits a channel that a token takes in a plane of `width` channels, norms included."""
        return 8 * self._token_bytes(role, width) / width

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build the empty store.

        Raises:
            BadInput: there are not more channels than outliers.
        """
        shape = ctx.shape
        if self._in_full_precision(shape):
            return full_plane(ctx)
        if self.outlier_channels >= shape.width:
            raise BadInput(
                f"outlier_channels={self.outlier_channels} leaves none of {shape.width} channels",
                fix=f"give at most {shape.width - 1}",
            )
        centred = self._centres(shape.role)
        learns = centred or self.outlier_channels > 0
        dtype = torch.float32 if learns else ctx.dtype
        regular, *outlier = [
            TokenPlane(TurboCodec(self._quantizer(part), dtype, ctx.device))
            for part in self._parts(shape.role, shape.width)
        ]
        if not learns:
            return regular
        rest = outlier[0] if outlier else None
        return LearnedPlane(ctx, regular, rest, self.outlier_channels, centred)

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Codes and norms, and what each head learned."""
        return self.selected_bytes(shape, held, held.tokens)

    def selected_bytes(self, shape: PlaneShape, held: History, tokens: int) -> int:
        """Tokens are read one by one; what each head learned is read once."""
        if self._in_full_precision(shape):
            return shape.full_bytes(tokens)
        learned = shape.width * shape.element_bytes if self._centres(shape.role) else 0
        if self.outlier_channels:
            learned += packed_bytes(shape.width, 1)
        return shape.heads * (tokens * self._token_bytes(shape.role, shape.width) + learned)

    def constants_bytes(self, shapes: Sequence[PlaneShape]) -> int:
        """Tables, once for all planes that use the same ones."""
        parts = {
            part
            for shape in shapes
            if not self._in_full_precision(shape)
            for part in self._parts(shape.role, shape.width)
        }
        levels = {(part.width, part.level_bits) for part in parts}
        rotated = [{part.width for part in parts}]
        rotated.append({part.width for part in parts if part.mode == "prod"})
        return sum(FLOAT_BYTES << bits for _, bits in levels) + sum(
            self._rotation_bytes(width) for widths in rotated for width in widths
        )

    def _parts(self, role: Role, width: int) -> Iterator[Part]:
        """The regular channels, then the outliers."""
        bits, mode = (self.bits_key, self.mode_key) if role == "key" else (self.bits_value, "mse")
        yield Part(width - self.outlier_channels, bits, mode)
        if self.outlier_channels:
            yield Part(self.outlier_channels, bits + self.outlier_extra_bits, mode)

    def _token_bytes(self, role: Role, width: int) -> int:
        return sum(part.token_bytes for part in self._parts(role, width))

    def _quantizer(self, part: Part) -> kernel.VectorQuantizer:
        first, second = (
            rotation.Rotation(self.rotation, part.width, self.rounds, self.seed + more)
            for more in (0, 1)
        )
        return kernel.VectorQuantizer(part.bits, part.mode, first, second)

    def _rotation_bytes(self, width: int) -> int:
        is_hadamard = self.rotation == "hadamard" and width & (width - 1) == 0
        return FLOAT_BYTES * width * (self.rounds if is_hadamard else width)

    def _centres(self, role: Role) -> bool:
        return self.center_keys and role == "key"

    def _in_full_precision(self, shape: PlaneShape) -> bool:
        last = shape.layers - self.protected_layers
        return shape.layer < self.protected_layers or shape.layer >= last
