"""GEAR: a quantized backbone, a few exact outliers, and a low-rank correction of what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvtune.kernels import outliers
from kvtune.kernels.packed_groups import PackedGroups
from kvtune.lazy import lazy_import
from kvtune.policies.method import (
    Axis,
    History,
    Need,
    Paper,
    PlaneBytes,
    PlaneFactory,
    PlaneShape,
    Role,
    Saves,
    StoreMethod,
)
from kvtune.policies.plane import Plane, PlaneContext
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import lowrank
else:
    torch = lazy_import("torch")
    lowrank = lazy_import("kvtune.kernels.lowrank")


class Gear(StoreMethod):
    """X ~ D + L + S: codes, a low-rank part of the residual, exact outliers (GEAR, 2403.05527).

    Outliers are the smallest and largest of each vector, a channel's tokens for keys and a token's
    channels for values; the vector's mean stands for them in the codes. `backbone` is `kivi`
    (groups of `group_values`) or `kcvt` (whole channels of keys, whole tokens of values; meant for
    4 bits). Per head, the residual is approximated by power iteration. At an outlier the
    correction is left out, so that the exact value stays exact.

    The prompt is compressed as one block with rank `prompt_rank`, except its last
    T mod `buffer_tokens` tokens. These and generated tokens wait in a full-precision buffer and
    are compressed `buffer_tokens` at once with rank `generated_rank`.

    Bytes of a head's block of n tokens, e bytes an element: the backbone's, e r (n + d) for the
    low rank, and (e + i) for each outlier, i being 1, 2 or 4 bytes, the least that holds the index
    (GEAR counts 2). At least one outlier an end is kept where `outlier_ratio` is not 0: of vectors
    below 100 values that is more than 2 %. After an eviction all survivors are compressed anew, as
    one block; an evictor that acts in every step makes this the cost of every step.
    """

    name = "gear"
    title = "GEAR"
    axis = Axis.BITS
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    needs = (Need.KERNEL,)
    paper = Paper(
        "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference "
        "of LLM",
        "2403.05527",
        2024,
    )
    summary = (
        "Adds a low-rank correction and exact outliers to quantized keys and values; "
        "closest to the full cache of the low-bit formats, and the slowest to write and read."
    )

    backbone: Literal["kivi", "kcvt"] = "kivi"
    bits: int = Field(default=2, ge=1, le=8)
    group_values: int = Field(default=64, ge=1)
    outlier_ratio: float = Field(default=0.02, ge=0, le=1)
    prompt_rank: int = Field(default=4, ge=0)
    generated_rank: int = Field(default=2, ge=0)
    buffer_tokens: int = Field(default=64, ge=1)
    power_loops: int = Field(default=3, ge=1)
    seed: int = 0

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """A token's codes depend on the tokens after it: outliers and ranks are the block's."""
        return "never"

    @property
    def each_token_alone(self) -> bool:
        """No: tokens are stored with others."""
        return False

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build a plane of compressed blocks and a buffer."""
        return GearPlane(ctx, self, self.block_format(ctx.shape.role))

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """One block of the prompt, blocks of generated tokens, and the buffer."""
        waited = held.at_once % self.buffer_tokens
        prompt = held.at_once - waited
        blocks, buffered = divmod(waited + held.appended, self.buffer_tokens)
        fmt = self.block_format(shape.role)
        total = blocks * fmt.nbytes(self.buffer_tokens, shape, self.generated_rank)
        if prompt:
            total += fmt.nbytes(prompt, shape, self.prompt_rank)
        return shape.heads * total + shape.full_bytes(buffered)

    def block_format(self, role: Role) -> BlockFormat:
        """How a block is stored."""
        along: Literal["tokens", "channels"] = "tokens" if role == "key" else "channels"
        group = self.group_values if self.backbone == "kivi" else None
        codes = PackedGroups(self.bits, along, group)
        return BlockFormat(codes, self.outlier_ratio, self.power_loops, self.seed)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Blocks [..., n, width] of tokens, each compressed by itself."""

    codes: PackedGroups
    outlier_ratio: float
    power_loops: int
    seed: int

    def nbytes(self, n: int, shape: PlaneShape, rank: int) -> int:
        """Bytes of one block of `n` tokens of one head."""
        width, element = shape.width, shape.element_bytes
        size, vectors = (n, width) if self.codes.along == "tokens" else (width, n)
        slots = vectors * sum(outliers.outlier_counts(self.outlier_ratio, size))
        return (
            self.codes.nbytes(n, width)
            + slots * (element + outliers.index_bytes(size))
            + min(rank, n, width) * (n + width) * element
        )

    def encode(self, x: Tensor, rank: int) -> dict[str, Tensor]:
        """Return named tensors of blocks [..., n, width]; what takes no bytes is absent."""
        exact = x.float()
        low, high = outliers.outlier_counts(self.outlier_ratio, x.shape[self._dim])
        index = outliers.extremes(exact, self._dim, low, high)
        mean = exact.mean(self._dim, keepdim=True).expand(index.shape)
        held = self.codes.encode(exact.scatter(self._dim, index, mean))
        if low + high:
            held["outlier_index"] = outliers.stored_index(index, x.shape[self._dim])
            held["outlier_value"] = x.gather(self._dim, index)
        rank = min(rank, *x.shape[-2:])
        if rank:
            rough = self.codes.decode(held, x.shape[-1], torch.float32)
            residual = (exact - rough).scatter(self._dim, index, 0.0)
            left, right = lowrank.power_iteration(
                residual, rank, loops=self.power_loops, seed=self.seed
            )
            held["left"], held["right"] = left.to(x.dtype), right.to(x.dtype)
        return held

    def decode(self, held: Mapping[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """Return the blocks [..., n, width]."""
        x = self.codes.decode(held, width, torch.float32)
        if "left" in held:
            x = x + held["left"].float() @ held["right"].float().transpose(-1, -2)
        x = x.to(dtype)
        if "outlier_index" in held:
            x = x.scatter(self._dim, held["outlier_index"].long(), held["outlier_value"])
        return x

    @property
    def _dim(self) -> int:
        return -2 if self.codes.along == "tokens" else -1


PARTS = ("prompt", "later")


class GearPlane(Plane):
    """Blocks [heads, blocks, n, ...]: one of the prompt, later ones of generated tokens."""

    def __init__(self, ctx: PlaneContext, method: Gear, fmt: BlockFormat) -> None:
        super().__init__()
        self.width = ctx.shape.width
        self.dtype = ctx.dtype
        self.method = method
        self.format = fmt

    @property
    def settled_tokens(self) -> int:
        """Tokens in blocks."""
        codes = (self.held.get(f"{part}.codes") for part in PARTS)
        return sum(x.shape[1] * x.shape[2] for x in codes if x is not None)

    @property
    def tokens(self) -> int:
        """How many tokens it holds for each head."""
        return self.settled_tokens + self.held["buffer"].shape[1] if self.held else 0

    def append(self, x: Tensor) -> None:
        """Add token vectors to the buffer, and compress the blocks that are full."""
        part, rank = PARTS[bool(self.held)], self.method.generated_rank
        buffer = torch.cat((self.held["buffer"], x), dim=1) if self.held else x
        size = self.method.buffer_tokens
        full = buffer.shape[1] // size * size
        if full:
            blocks = buffer[:, :full].reshape(buffer.shape[0], -1, size, self.width)
            if part == "prompt":
                blocks, rank = buffer[:, None, :full], self.method.prompt_rank
            for name, new in self.format.encode(blocks, rank).items():
                old = self.held.get(f"{part}.{name}")
                self.held[f"{part}.{name}"] = new if old is None else torch.cat((old, new), dim=1)
        # A view would keep what was compressed alive.
        self.held["buffer"] = buffer[:, full:].clone()

    def read(self) -> Tensor:
        """Decompress all blocks, and add the buffer."""
        found = []
        for part in PARTS:
            own = {
                name.removeprefix(f"{part}."): x
                for name, x in self.held.items()
                if name.startswith(f"{part}.")
            }
            if own:
                found.append(self.format.decode(own, self.width, self.dtype).flatten(1, 2))
        return torch.cat((*found, self.held["buffer"]), dim=1)

    def clear(self) -> None:
        """Drop every token."""
        self.held = {}
