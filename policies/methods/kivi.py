"""KIVI: keys quantized per channel, values per token, the latest tokens in full precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from kvtune.kernels.packed_groups import PackedGroups
from kvtune.lazy import lazy_import
from kvtune.policies.method import (
    REFERENCE,
    Axis,
    History,
    Need,
    Paper,
    PlaneBytes,
    PlaneFactory,
    PlaneShape,
    Role,
    Saves,
    Serving,
    StoreMethod,
)
from kvtune.policies.plane import Plane, PlaneContext, gather_tokens
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


class Kivi(StoreMethod):
    """Asymmetric min/max quantization after RoPE (KIVI, 2402.02750).

    x is stored as q = round((x - min) / s), s = (max - min) / (2^bits - 1), both float16. A key
    channel's outliers stay in its own groups: keys are grouped along tokens, values along channels.
    With R = residual_tokens, keys wait in full precision until R of them are quantized at once
    (T mod R wait); of the values always the last min(T, R) are in full precision.

    Bytes of one head with n quantized tokens: keys n ceil(d bits / 8) + 4 d n / group, values
    n (ceil(d bits / 8) + 4 ceil(d / group)), the rest d elements a token.

    After an eviction, keys are dequantized and quantized in new groups; an evictor that drops a
    token in every step repeats that in every step. Values keep their codes. Values wider than a
    multiple of the group have a shorter last group.
    """

    name = "kivi"
    title = "KIVI"
    axis = Axis.BITS
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    needs = (Need.KERNEL,)
    serving = (
        REFERENCE,
        Serving(
            "kvtune-plugin",
            "vLLM 0.32, --additional-config.kvtune.store.format kivi",
            platforms=("cpu",),
        ),
    )
    paper = Paper(
        "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", "2402.02750", 2024
    )
    summary = (
        "Stores old keys per channel and old values per token in a few bits; "
        "2 bits can hurt models with few KV heads and long retrieval."
    )

    bits: int = Field(default=2, ge=1, le=8)
    key_group_tokens: int = Field(default=32, ge=1)
    value_group_channels: int = Field(default=32, ge=1)
    residual_tokens: int = Field(default=128, ge=1)

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        if self.residual_tokens % self.key_group_tokens:
            raise ValueError(
                f"residual_tokens must be a multiple of key_group_tokens "
                f"({self.key_group_tokens}) but is {self.residual_tokens}"
            )
        return self

    @property
    def each_token_alone(self) -> bool:
        """No: tokens are stored with others."""
        return False

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build a plane that quantizes what leaves its full-precision tail."""
        kind = KeyPlane if ctx.shape.role == "key" else ValuePlane
        return kind(ctx, self.format(ctx.shape.role), self.residual_tokens)

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Codes and ranges of quantized tokens, and the tail. How tokens came does not matter."""
        kind = KeyPlane if shape.role == "key" else ValuePlane
        coded = kind.coded_of(held.tokens, self.residual_tokens)
        codes = shape.heads * self.format(shape.role).nbytes(coded, shape.width)
        return codes + shape.full_bytes(held.tokens - coded)

    def format(self, role: Role) -> PackedGroups:
        """How quantized tokens are stored."""
        if role == "key":
            return PackedGroups(self.bits, "tokens", self.key_group_tokens)
        return PackedGroups(self.bits, "channels", self.value_group_channels)


class KeyPlane(Plane):
    """Whole blocks of `residual_tokens` keys are quantized, the others wait."""

    def __init__(self, ctx: PlaneContext, fmt: PackedGroups, residual_tokens: int) -> None:
        super().__init__()
        self.width = ctx.shape.width
        self.dtype = ctx.dtype
        self.format = fmt
        self.residual_tokens = residual_tokens

    @staticmethod
    def coded_of(tokens: int, residual_tokens: int) -> int:
        """How many of `tokens` tokens are quantized."""
        return tokens // residual_tokens * residual_tokens

    @property
    def coded(self) -> int:
        """Tokens that are quantized."""
        return self.held["codes"].shape[1] if "codes" in self.held else 0

    @property
    def settled_tokens(self) -> int:
        """Quantized tokens; one in the tail reads back otherwise once it is quantized."""
        return self.coded

    @property
    def tokens(self) -> int:
        """How many tokens it holds for each head."""
        return self.coded + self.held["tail"].shape[1] if self.held else 0

    def append(self, x: Tensor) -> None:
        """Add token vectors to the tail, and quantize what then leaves it."""
        tail = torch.cat((self.held["tail"], x), dim=1) if self.held else x
        coded = self.coded
        leaving = self.coded_of(coded + tail.shape[1], self.residual_tokens) - coded
        if leaving:
            for name, new in self.format.encode(tail[:, :leaving]).items():
                self.held[name] = torch.cat((self.held[name], new), dim=1) if coded else new
        # A view would keep what was quantized alive.
        self.held["tail"] = tail[:, leaving:].clone()

    def read(self) -> Tensor:
        """Dequantize, and add the tail."""
        if not self.coded:
            return self.held["tail"]
        return torch.cat(
            (self.format.decode(self.held, self.width, self.dtype), self.held["tail"]), dim=1
        )

    def clear(self) -> None:
        """Drop every token."""
        self.held = {}


class ValuePlane(KeyPlane):
    """The last `residual_tokens` values wait; what is older is quantized token by token."""

    @staticmethod
    def coded_of(tokens: int, residual_tokens: int) -> int:
        """How many of `tokens` tokens are quantized."""
        return max(tokens - residual_tokens, 0)

    def keep(self, index: Tensor) -> None:
        """Move the codes of old survivors; the last `residual_tokens` of them make the tail."""
        # At most residual_tokens survivors come from the tail, so that the older ones have codes.
        coded = self.coded_of(index.shape[1], self.residual_tokens)
        tail = gather_tokens(self.read(), index[:, coded:])
        codes = {name: x for name, x in self.held.items() if name != "tail"} if coded else {}
        self.held = {name: gather_tokens(x, index[:, :coded]) for name, x in codes.items()}
        self.held["tail"] = tail
