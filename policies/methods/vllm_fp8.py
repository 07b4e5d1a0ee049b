"""vLLM's fp8 cache with one fixed scale for keys and one for values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

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
from kvtune.policies.plane import Plane, PlaneContext, TokenCodec, TokenPlane
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import token_head
else:
    torch = lazy_import("torch")
    token_head = lazy_import("kvtune.kernels.token_head")


class Fp8Codec(TokenCodec):
    """`data` [heads, n, width] in float8_e4m3fn."""

    def __init__(self, scale: float, dtype: torch.dtype) -> None:
        self.scale = scale
        self.dtype = dtype

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Divide by the scale and cast; beyond ±448 saturates."""
        return {"data": token_head.quantize_fp8_tensor(x, self.scale)}

    def decode(self, held: Mapping[str, Tensor]) -> Tensor:
        """Cast back and multiply."""
        return token_head.dequantize_fp8_tensor(held["data"], self.scale, self.dtype)


class VllmFp8(StoreMethod):
    """fp8 (e4m3) with a fixed scale: one byte a number and nothing else.

    vLLM 0.32 takes the scales from the checkpoint and else 1.0, as here. Its FlashAttention 3
    backend also rounds queries and probabilities to fp8; this measures the loss of the cache alone.
    On a CPU it needs AVX-512 or AMX and a head size that is a multiple of 32.
    """

    name = "vllm-fp8"
    title = "vLLM fp8"
    axis = Axis.BITS
    harm = Harm.NEAR_LOSSLESS
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    serving = (REFERENCE, Serving("vllm", "--kv-cache-dtype fp8", "0.32"))
    paper = Paper("FP8 Formats for Deep Learning", "2209.05433", 2022)
    summary = (
        "Holds keys and values in 8-bit floats: half the bytes, at 3 mantissa bits and a cut at "
        "448 times the scale."
    )

    key_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    value_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build the empty store."""
        scale = self.key_scale if ctx.shape.role == "key" else self.value_scale
        return TokenPlane(Fp8Codec(scale, ctx.dtype))

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """One byte a number."""
        return shape.heads * held.tokens * shape.width

    def selected_bytes(self, shape: PlaneShape, held: History, tokens: int) -> int:
        """Tokens are read one by one."""
        return shape.heads * tokens * shape.width
