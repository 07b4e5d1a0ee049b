"""Palu: keys before RoPE and values as low-rank latents of groups of heads (2407.21118)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from kvtune.errors import BadInput
from kvtune.lazy import lazy_import
from kvtune.policies.calibration import CalibratedMethod, LayerSamples, Learned, made_once
from kvtune.policies.method import (
    Axis,
    History,
    Need,
    Paper,
    PlaneBytes,
    PlaneFactory,
    PlaneShape,
    Saves,
    SelectedBytes,
    StoreMethod,
)
from kvtune.policies.plane import Piece, Plane, PlaneContext, gather_tokens
from kvtune.types import Harm, fingerprint_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import rotation
else:
    torch = lazy_import("torch")
    rotation = lazy_import("kvtune.kernels.rotation")

RANK_STEP = 32
"""Ranks are multiples of this, which GPU tiles like; of less for groups under 128 channels."""
SMALLEST_SIGMA = 1e-6
"""Singular values below this share of the largest scale like it: their latents carry nothing."""
FLOAT32_BYTES = 4


class Palu(CalibratedMethod, StoreMethod):
    """Project the vectors of a group of heads on the directions that matter most to the model.

    Palu factors a projection W [g d, hidden] of `group_heads` heads by the SVD of the whitened
    weight, W S = U Σ Vᵀ with S Sᵀ = E[x xᵀ] over calibration text, into L = U √Σ and
    R = √Σ Vᵀ S⁻¹, caches h = R x and reads L h. As R = Σ^-1/2 Uᵀ W, the same latents come from the
    projected vector k = W x itself: h = Σ^-1/2 Uᵀ k, and U, Σ² are the eigenvectors and eigenvalues
    of W S Sᵀ Wᵀ = E[k kᵀ]. So a cache that is handed k needs no other weights, and models that
    normalise keys after the projection work alike. A projection's bias is taken off before and put
    on again after. All ranks of one group are learned at once: the calibration serves every
    `keep_ratio`. The paper's search for a rank per layer (`fisher_uniform`) is not here: every
    group gets the same.

    Heads of one group share latents, so their tokens should be the same. Behind an evictor that
    chooses for each head, the vectors at equal slots are projected together, at some loss, and an
    eviction while decoding projects the rest anew; with group_heads=1 neither happens.

    Attributes:
        keep_ratio: latent channels over channels, rounded to multiples of 32; 1 keeps everything.
        group_heads: KV heads that share latents; the largest divisor of the model's KV heads up to
            this.
        rotate_latents: fuse a random rotation into L and R, so that the latents' channels are alike
            for the quantizer that follows.
        rotation_seed: of that rotation.
    """

    name = "palu"
    title = "Palu"
    axis = Axis.DIM
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    needs = (Need.CALIBRATION,)
    paper = Paper("Palu: Compressing KV-Cache with Low-Rank Projection", "2407.21118", 2024)
    summary = (
        "Stores low-rank latents of groups of heads and rebuilds keys and values from them: half "
        "the bytes at half the rank, for a calibration, matrix products at every read, and what "
        "the dropped directions carried."
    )
    key_space = "pre-rope"
    terminal = False

    keep_ratio: float = Field(default=0.5, gt=0, le=1)
    group_heads: int = Field(default=4, ge=1)
    rotate_latents: bool = False
    rotation_seed: int = 0

    @property
    def calibration_key(self) -> str:
        """Only the grouping shapes what is learned."""
        return fingerprint_of([self.name, self.group_heads])

    @property
    def joins_heads(self) -> bool:
        """Groups share latents."""
        return self.group_heads > 1

    @property
    def apart_variants(self) -> tuple[StoreMethod, ...]:
        """Groups of one head."""
        return (self.model_copy(update={"group_heads": 1}),) if self.joins_heads else ()

    def groups(self, heads: int) -> int:
        """How many groups `heads` KV heads form."""
        sizes = range(min(self.group_heads, heads), 0, -1)
        return heads // next(size for size in sizes if heads % size == 0)

    def rank(self, channels: int) -> int:
        """Latent channels of a group with `channels` channels."""
        if self.keep_ratio == 1:
            return channels
        step = RANK_STEP
        while step > 1 and 4 * step > channels:
            step //= 2
        return min(channels, max(step, step * int(self.keep_ratio * channels / step + 0.5)))

    def calibrate(self, samples: LayerSamples) -> Learned:
        """Learn `basis` [G, D, D] and `sigma` [G, D], best first, and `bias` [Hk, d]; float32."""
        heads, _, width = samples.vectors.shape
        bias = torch.zeros(heads, width, dtype=torch.float64)
        if samples.bias is not None:
            bias = samples.bias.detach().cpu().double().reshape(heads, width)
        centred = samples.vectors.detach().cpu().double() - bias.unsqueeze(1)
        grouped = _grouped(centred, self.groups(heads))
        moment = grouped.mT @ grouped / grouped.shape[1]
        eigenvalues, vectors = torch.linalg.eigh(moment)
        return {
            "basis": vectors.flip(-1).float().contiguous(),
            "sigma": eigenvalues.flip(-1).clamp(min=0).sqrt().float(),
            "bias": bias.float(),
        }

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build latents [groups, n, rank] in `inner`.

        Raises:
            BadInput: the heads of a group are not held together.
        """
        shape = ctx.shape
        groups = self.groups(shape.heads)
        rank = self.rank(shape.heads // groups * shape.width)
        projector = self._projector(ctx, rank)
        return PaluPlane(projector, inner(ctx.resized(groups, rank)), ctx.dtype)

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Bytes of the latents as `inner` holds them."""
        return inner(self.inner_shape(shape), held)

    def inner_shape(self, shape: PlaneShape) -> PlaneShape:
        """The latents [groups, n, rank]."""
        groups = self.groups(shape.heads)
        return shape.resized(groups, self.rank(shape.heads // groups * shape.width))

    def selected_through(
        self, shape: PlaneShape, held: History, tokens: int, inner: SelectedBytes
    ) -> int | None:
        """Bytes of latents: each head of a group fetches those of its own tokens."""
        size = shape.heads // self.groups(shape.heads)
        if size * tokens >= held.tokens:
            return None
        some = inner(self.inner_shape(shape), held, tokens)
        return None if some is None else size * some

    def constant_bytes(self, shape: PlaneShape) -> int:
        """Bytes of both projections and the bias, float32."""
        latents = self.inner_shape(shape)
        channels = shape.heads * shape.width
        return FLOAT32_BYTES * (2 * channels * latents.width + channels)

    def _projector(self, ctx: PlaneContext, rank: int) -> Projector:
        learned = ctx.calibration[self.name]
        heads = range(ctx.first_head, ctx.first_head + ctx.shape.heads)
        key = (self.name, self.fingerprint, ctx.shape.layer, ctx.shape.role, heads)
        return made_once(
            ctx.engine,
            key,
            learned,
            lambda: self._make_projector(learned, heads, rank, ctx.device),
        )

    def _make_projector(
        self, learned: Mapping[str, Tensor], heads: range, rank: int, device: torch.device
    ) -> Projector:
        size = len(learned["bias"]) // len(learned["basis"])
        if len(heads) % size:
            raise BadInput(
                f"palu's groups of {size} heads cannot be held where each head keeps a number of "
                "tokens of its own",
                fix="set group_heads=1, or use an evictor with one budget for all heads",
            )
        own = slice(heads.start // size, heads.stop // size)
        sigma = learned["sigma"][own]
        largest = sigma[:, :1]
        useful = torch.where(sigma > SMALLEST_SIGMA * largest, sigma, largest)
        root = torch.where(useful > 0, useful, 1.0)[:, None, :rank].sqrt()
        basis = learned["basis"][own, :, :rank]
        encode, decode = basis / root, basis * root
        if self.rotate_latents:
            turn = rotation.Rotation("hadamard", rank, seed=self.rotation_seed)
            encode, decode = turn.rotate(encode), turn.rotate(decode)
        bias = learned["bias"][heads.start : heads.stop]
        return Projector(*(x.contiguous().to(device) for x in (encode, decode, bias)))


@dataclass(frozen=True, slots=True)
class Projector:
    """What turns vectors into latents and back: encode, decode [G, D, r], and a bias [heads, d]."""

    encode: Tensor
    decode: Tensor
    bias: Tensor

    def latents(self, x: Tensor) -> Tensor:
        """Turn [heads, n, d] into [G, n, r] float32."""
        centred = x.float() - self.bias.unsqueeze(1)
        return _grouped(centred, len(self.encode)) @ self.encode

    def rebuild(self, latents: Tensor) -> Tensor:
        """Turn [G, n, r] into [heads, n, d] float32."""
        heads, width = self.bias.shape
        flat = latents.float() @ self.decode.mT
        groups, tokens, _ = flat.shape
        split = flat.reshape(groups, tokens, heads // groups, width).transpose(1, 2)
        return split.reshape(heads, tokens, width) + self.bias.unsqueeze(1)


class PaluPlane(Plane):
    """Latents of one layer's keys or values."""

    def __init__(self, projector: Projector, inner: Plane, dtype: torch.dtype) -> None:
        super().__init__()
        self.projector = projector
        self.inner = inner
        self.dtype = dtype
        self.constants = {
            "encode": projector.encode,
            "decode": projector.decode,
            "bias": projector.bias,
        } | {f"inner.{name}": tensor for name, tensor in inner.constants.items()}

    @property
    def tokens(self) -> int:
        """How many tokens it holds for each head."""
        return self.inner.tokens

    @property
    def settled_tokens(self) -> int:
        """Those whose latents are settled: the projection is fixed."""
        return self.inner.settled_tokens

    def append(self, x: Tensor) -> None:
        """Project and add token vectors."""
        self.inner.append(self.projector.latents(x).to(self.dtype))

    def read(self) -> Tensor:
        """Rebuild all token vectors."""
        return self.projector.rebuild(self.inner.read()).to(self.dtype)

    def select(self, index: Tensor) -> tuple[Tensor, int]:
        """Fetch latents for each head of a group, or all where that is no more."""
        heads, groups = len(self.projector.bias), len(self.projector.encode)
        size = heads // groups
        if size * index.shape[-1] >= self.tokens:
            return super().select(index)
        rows = index.expand(heads, -1).reshape(groups, size, -1)
        found = [self.inner.select(rows[:, member]) for member in range(size)]
        own = [
            self.projector.rebuild(latents)[member::size]
            for member, (latents, _) in enumerate(found)
        ]
        touched = sum(count for _, count in found)
        return torch.stack(own, dim=1).flatten(0, 1).to(self.dtype), touched

    def keep(self, index: Tensor) -> None:
        """Move latents where the heads of each group keep the same; else project anew."""
        heads = len(self.projector.bias)
        rows = index.expand(heads, -1).reshape(len(self.projector.encode), -1, index.shape[-1])
        if bool((rows == rows[:, :1]).all()):
            self.inner.keep(rows[:, 0])
            return
        kept = gather_tokens(self.read(), index)
        self.clear()
        self.append(kept)

    def clear(self) -> None:
        """Drop every token."""
        self.inner.clear()

    @property
    def shares_tokens(self) -> bool:
        """Where latents are stored one by one."""
        return self.inner.shares_tokens

    def share(self, start: int, end: int) -> Piece:
        """Share latents: the projection is the same for all sequences."""
        return self.inner.share(start, end)

    def adopt(self, piece: Piece) -> None:
        """Add shared latents."""
        self.inner.adopt(piece)

    def facts(self) -> dict[str, int]:
        """Those of what holds the latents."""
        return self.inner.facts()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of what holds the latents."""
        return {f"inner.{name}": tensor for name, tensor in self.inner.tensors().items()}


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Turn [heads, n, d] into [groups, n, heads / groups * d]."""
    heads, tokens, width = x.shape
    return x.reshape(groups, heads // groups, tokens, width).transpose(1, 2).flatten(2)
