"""OjaKV: low-rank latents in a basis that each sequence adapts to itself (2509.21623)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

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
    StoreMethod,
)
from kvtune.policies.plane import Plane, PlaneContext, gather_tokens
from kvtune.types import Harm, fingerprint_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import oja
else:
    torch = lazy_import("torch")
    oja = lazy_import("kvtune.kernels.oja")

FLOAT32_BYTES = 4


class OjaKV(CalibratedMethod, StoreMethod):
    """Keep the first and the recent tokens, and of those between only z = Uᵀ x for each head.

    U [d, r] starts as the leading directions of calibration vectors (keys before RoPE; values). A
    prompt turns it block by block with Oja's rule, U <- qr(U + η Xᵀ X U / m), before anything is
    projected; generated tokens do so every `update_tokens`, with the recent ones, and what was
    stored is re-expressed at once: z <- (U_newᵀ U_old) z. Its error is what has left the subspace
    meanwhile. Tokens are projected when they leave the recent ones, in the basis of that moment.

    The basis belongs to the sequence and is counted, in float32: at half rank and 16-bit vectors it
    takes what 2 d latents save. The one that all sequences start from counts once, as a constant.
    Where an eviction moves tokens between the parts, full precision follows the slots: the first
    and the recent of those that are left.

    How often and how fast to update, how many tokens stay whole, and what happens to stored latents
    are choices made here, not the paper's. Rates of 0.05 hardly move a basis within a prompt; on
    real text of a kind that the calibration had not seen, 2 came much closer to the full cache.

    Attributes:
        keep_ratio: latent channels over channels of a head; 1 loses nothing.
        first_tokens: held whole for good; they cover the attention sinks.
        recent_tokens: held whole until newer ones come.
        update_tokens: vectors in one update, and generated tokens between two.
        prefill_rate: η of the prompt's updates times the largest eigenvalue of Xᵀ X / m.
        decode_rate: the same while decoding; 0 freezes the prompt's basis.
    """

    name = "ojakv"
    title = "OjaKV"
    axis = Axis.DIM
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    needs = (Need.CALIBRATION,)
    paper = Paper(
        "OjaKV: Context-Aware Online Low-Rank KV Cache Compression with Oja's Rule",
        "2509.21623",
        2025,
    )
    summary = (
        "Stores the middle of a sequence in a low-rank basis that follows its content: half the "
        "bytes of long contexts, for a calibration, a basis for each sequence, and updates."
    )
    key_space = "pre-rope"
    terminal = False
    rebases = True

    keep_ratio: float = Field(default=0.5, gt=0, le=1)
    first_tokens: int = Field(default=32, ge=0)
    recent_tokens: int = Field(default=128, ge=1)
    update_tokens: int = Field(default=128, ge=1)
    prefill_rate: float = Field(default=2.0, ge=0)
    decode_rate: float = Field(default=0.2, ge=0)

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """The basis is the sequence's own."""
        return "never"

    @property
    def calibration_key(self) -> str:
        """No parameter shapes what is learned."""
        return fingerprint_of([self.name])

    @property
    def whole_tokens(self) -> int:
        """Tokens in full precision in a long sequence."""
        return self.first_tokens + self.recent_tokens

    def rank(self, channels: int) -> int:
        """Latent channels of a head with `channels` channels."""
        return max(1, int(self.keep_ratio * channels + 0.5))

    def calibrate(self, samples: LayerSamples) -> Learned:
        """Learn `basis` [Hk, d, d] in float32: orthonormal columns, most energy first."""
        vectors = samples.vectors.detach().cpu().double()
        _, found = torch.linalg.eigh(vectors.mT @ vectors / vectors.shape[1])
        return {"basis": found.flip(-1).float().contiguous()}

    @property
    def each_token_alone(self) -> bool:
        """No: tokens are stored with others."""
        return False

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build whole tokens around latents [heads, n, rank] in `inner`."""
        shape, rank = ctx.shape, self.rank(ctx.shape.width)
        heads = slice(ctx.first_head, ctx.first_head + shape.heads)
        key = (self.name, rank, shape.layer, shape.role, heads.start, heads.stop)
        learned = ctx.calibration[self.name]
        basis = made_once(
            ctx.engine,
            key,
            learned,
            lambda: learned["basis"][heads, :, :rank].contiguous().to(ctx.device),
        )
        return OjaPlane(self, basis, inner(ctx.resized(shape.heads, rank)), ctx.dtype)

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Bytes of whole tokens, of latents as `inner` holds them, and of the basis."""
        if not held.tokens:
            return 0
        latents = max(held.tokens - self.whole_tokens, 0)
        at_once = min(latents, max(held.at_once - self.whole_tokens, 0))
        total = shape.full_bytes(held.tokens - latents)
        if latents:
            total += inner(self.inner_shape(shape), History(at_once, latents - at_once))
        return total + self._basis_bytes(shape)

    def constant_bytes(self, shape: PlaneShape) -> int:
        """The basis that sequences start from."""
        return self._basis_bytes(shape)

    def inner_shape(self, shape: PlaneShape) -> PlaneShape:
        """The latents [heads, n, rank]."""
        return shape.resized(shape.heads, self.rank(shape.width))

    def _basis_bytes(self, shape: PlaneShape) -> int:
        return shape.heads * shape.width * self.rank(shape.width) * FLOAT32_BYTES


class OjaPlane(Plane):
    """First tokens, latents of the middle ones, recent tokens, and the basis of the latents."""

    def __init__(self, method: OjaKV, basis: Tensor, inner: Plane, dtype: torch.dtype) -> None:
        super().__init__()
        self.method = method
        self.initial = basis
        self.inner = inner
        self.dtype = dtype
        self.generated = 0
        self.constants = {"basis": basis} | {
            f"inner.{name}": tensor for name, tensor in inner.constants.items()
        }

    @property
    def tokens(self) -> int:
        """How many tokens it holds for each head."""
        if not self.held:
            return 0
        return self.held["first"].shape[1] + self.inner.tokens + self.held["recent"].shape[1]

    @property
    def settled_tokens(self) -> int:
        """The first ones."""
        return self.held["first"].shape[1] if self.held else 0

    def append(self, x: Tensor) -> None:
        """Add a prompt, or generated tokens, which update the basis every so often."""
        if not self.held:
            self._start(x)
            return
        method = self.method
        while x.shape[1]:
            room = method.update_tokens - self.generated % method.update_tokens
            now, x = x[:, :room], x[:, room:]
            self.generated += now.shape[1]
            self._lay_out(torch.cat((self.held["recent"], now), dim=1))
            if now.shape[1] == room and method.decode_rate:
                self._update(self.held["recent"][:, -method.update_tokens :])

    def read(self) -> Tensor:
        """Return whole tokens, and the middle ones rebuilt from latents."""
        parts = [self.held["first"], self.held["recent"]]
        if self.inner.tokens:
            parts.insert(1, self._rebuild(self.inner.read()))
        return torch.cat(parts, dim=1)

    def keep(self, index: Tensor) -> None:
        """Hold only the tokens at `index`; the basis stays.

        Latents move as they are if all that fall in the middle were there before; else they are
        made again, which loses no more than rounding where they were latents already.
        """
        heads = len(self.initial)
        rows = index.expand(heads, -1)
        kept = gather_tokens(self.read(), rows)
        first, count = self.method.first_tokens, rows.shape[1]
        end = max(count - self.method.recent_tokens, min(first, count))
        middle = rows[:, first:end] - self.held["first"].shape[1]
        if not middle.shape[1]:
            self.inner.clear()
        elif bool(((middle >= 0) & (middle < self.inner.tokens)).all()):
            self.inner.keep(middle)
        else:
            self.inner.clear()
            self.inner.append(self._latents(kept[:, first:end]))
        self.held["first"] = kept[:, :first].contiguous()
        self.held["recent"] = kept[:, end:].contiguous()

    def clear(self) -> None:
        """Drop every token and the basis."""
        self.held = {}
        self.generated = 0
        self.inner.clear()

    def facts(self) -> dict[str, int]:
        """Those of what holds the latents."""
        return self.inner.facts()

    def tensors(self) -> dict[str, Tensor]:
        """Its own, and those of what holds the latents."""
        inner = {f"inner.{name}": tensor for name, tensor in self.inner.tensors().items()}
        return super().tensors() | inner

    def _start(self, x: Tensor) -> None:
        method = self.method
        basis = self.initial.clone()
        if x.shape[1] > method.whole_tokens and method.prefill_rate:
            for start in range(method.first_tokens, x.shape[1], method.update_tokens):
                block = x[:, start : start + method.update_tokens]
                basis = _turned(basis, block, method.prefill_rate)
        self.held["basis"] = basis
        self.held["first"] = x[:, :0].clone()
        self._lay_out(x)

    def _lay_out(self, x: Tensor) -> None:
        """Hold recent and newer tokens: fill the first ones, project what is not recent."""
        first = self.held["first"]
        missing = self.method.first_tokens - first.shape[1]
        # Views of the projections would keep all of them alive.
        self.held["first"] = torch.cat((first, x[:, :missing]), dim=1)
        x = x[:, missing:]
        old = max(x.shape[1] - self.method.recent_tokens, 0)
        if old:
            self.inner.append(self._latents(x[:, :old]))
        self.held["recent"] = x[:, old:].clone()

    def _update(self, x: Tensor) -> None:
        """Turn the basis with vectors [heads, m, d], and re-express the latents in it."""
        before = self.held["basis"]
        after = _turned(before, x, self.method.decode_rate)
        self.held["basis"] = after
        if self.inner.tokens:
            moved = self.inner.read().float() @ (before.mT @ after)
            self.inner.clear()
            self.inner.append(moved.to(self.dtype))

    def _latents(self, x: Tensor) -> Tensor:
        return (x.float() @ self.held["basis"]).to(self.dtype)

    def _rebuild(self, latents: Tensor) -> Tensor:
        return (latents.float() @ self.held["basis"].mT).to(self.dtype)


def _turned(basis: Tensor, x: Tensor, rate: float) -> Tensor:
    """One step of Oja's rule whose rate is relative to the block's largest energy."""
    energy = oja.largest_energy(x)
    return oja.oja_update(basis, x, rate / torch.where(energy > 0, energy, 1.0))
