"""The base of vLLM's formats that keep one scale for each (token, KV head)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from kvtune.errors import BadInput
from kvtune.kernels.packing import packed_bytes
from kvtune.lazy import lazy_import
from kvtune.policies.method import (
    Axis,
    History,
    Paper,
    PlaneBytes,
    PlaneFactory,
    PlaneShape,
    Saves,
    StoreMethod,
)
from kvtune.policies.plane import Plane, PlaneContext, TokenCodec, TokenPlane

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import token_head
else:
    torch = lazy_import("torch")
    token_head = lazy_import("kvtune.kernels.token_head")

SCALE_BYTES = 4
SIGN_BYTES = 4
BITS: Mapping[str, int] = {"int8": 8, "fp8": 8, "int4": 4}


class TokenHeadCodec(TokenCodec):
    """`data` [heads, n, width] (or two channels a byte) and a float32 `scale` [heads, n]."""

    def __init__(self, fmt: token_head.TokenHeadFormat, ctx: PlaneContext) -> None:
        self.fmt = fmt
        self.width = ctx.shape.width
        self.dtype = ctx.dtype
        self.device = ctx.device

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Quantize each vector by itself."""
        data, scale = token_head.quantize_token_head(x, self.fmt)
        return {"data": data, "scale": scale}

    def decode(self, held: Mapping[str, Tensor]) -> Tensor:
        """Read vectors back as vLLM's attention does."""
        return token_head.dequantize_token_head(held["data"], held["scale"], self.fmt, self.dtype)

    def rotate(self, x: Tensor) -> Tensor:
        """Turn into the axes of int4's codes."""
        return token_head.int4_rotate(x) if self.fmt == "int4" else x

    def unrotate(self, x: Tensor) -> Tensor:
        """Turn back."""
        return token_head.int4_unrotate(x) if self.fmt == "int4" else x

    def decode_rotated(self, held: Mapping[str, Tensor]) -> Tensor:
        """Read int4's codes as they are."""
        if self.fmt != "int4":
            return self.decode(held)
        return token_head.dequantize_int4_rotated(held["data"], held["scale"], self.dtype)

    def constants(self) -> dict[str, Tensor]:
        """The signs of int4's rotation."""
        if self.fmt != "int4":
            return {}
        return {"signs": token_head.int4_signs(self.width, self.device)}


class TokenHeadMethod(StoreMethod):
    """One float32 scale for each (token, KV head), for keys and for values.

    Keys are stored after RoPE. A slot takes `width * bits / 8 + 4` bytes in each plane: at 128
    channels 264 (8 bits) or 136 (4 bits) for key and value, scales included, as
    `TritonAttentionBackend.customize_spec` of vLLM 0.32 reserves. int4 has 4 bytes for each sign of
    its rotation, once for all sequences. The prompt attends to itself in full precision, as in
    vLLM. vLLM also rounds probabilities that it multiplied with the values' scales to the model's
    dtype; that is not reproduced.
    """

    axis = Axis.BITS
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    paper = Paper("vLLM's quantized KV cache, one scale a token and head", "vLLM 0.32", 2026)

    fmt: ClassVar[Literal["int8", "int4", "fp8"]]

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build the empty store.

        Raises:
            BadInput: two channels share a byte, and their number is odd.
        """
        if BITS[self.fmt] < 8 and ctx.shape.width % 2:
            raise BadInput(
                f"{self.name} stores two channels a byte, and there are {ctx.shape.width}",
                fix="use a format of 8 bits",
            )
        return TokenPlane(TokenHeadCodec(self.fmt, ctx))

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Codes and a scale for each token."""
        return self._tokens_bytes(shape, held.tokens)

    def constants_bytes(self, shapes: Sequence[PlaneShape]) -> int:
        """The signs of int4's rotation, one table for all planes with blocks of one size."""
        if self.fmt != "int4":
            return 0
        return sum(SIGN_BYTES * block for block in {shape.width & -shape.width for shape in shapes})

    def selected_bytes(self, shape: PlaneShape, held: History, tokens: int) -> int:
        """Tokens are read one by one."""
        return self._tokens_bytes(shape, tokens)

    def _tokens_bytes(self, shape: PlaneShape, tokens: int) -> int:
        return shape.heads * tokens * (packed_bytes(shape.width, BITS[self.fmt]) + SCALE_BYTES)
