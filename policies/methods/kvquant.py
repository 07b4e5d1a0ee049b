"""KVQuant: keys before RoPE per channel, values per token, non-uniform levels, exact outliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from kvtune.errors import BadInput
from kvtune.kernels import outliers
from kvtune.kernels.packing import pack_bits, packed_bytes, unpack_bits
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
    Role,
    Saves,
    StoreMethod,
)
from kvtune.policies.plane import (
    Plane,
    PlaneContext,
    TokenCodec,
    TokenPlane,
    gather_tokens,
    tensor_bytes,
)
from kvtune.types import Harm, fingerprint_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import codebook, lloyd_max, topk
else:
    torch = lazy_import("torch")
    codebook = lazy_import("kvtune.kernels.codebook")
    lloyd_max = lazy_import("kvtune.kernels.lloyd_max")
    topk = lazy_import("kvtune.kernels.topk")

HALF_BYTES = 2
"""Ranges and levels are float16."""


class KVQuant(CalibratedMethod, StoreMethod):
    """Dense-and-sparse quantization to levels that were learned (KVQuant, 2401.18079).

    Vectors are brought to [-1, 1] by (x - middle) / reach and rounded to 2^bits levels. Keys have
    the range of their channel, learned as the percentiles that leave out `outlier_ratio`; values
    that of their token, without its outliers. The levels of a layer's keys or values come from
    k-means over the samples, weighted by squared gradients of the loss (Fisher information).
    `q_norm` shifts and stretches the levels that are read, so that mean and deviation over the
    samples stay as they were (the paper's Q-Norm, for 2 bits). The first `exact_tokens` tokens are
    in full precision: attention sinks. Where there are any, tokens are stored in two forms, and no
    other sequence can take them over.

    Outliers are stored as they are in fixed slots for each token and head: those keys' channels
    that lie farthest from their middle, and a value's smallest and largest. At least two slots
    where `outlier_ratio` is not 0, 3 % of a head of 64 channels and 1.6 % of one of 128. A key with
    more outliers loses the nearer ones to the outermost levels; a key with fewer stores others
    exactly.

    Bytes of a token and head of d channels, e bytes an element: ceil(d bits / 8), e + 1 for each
    slot (e + 2 above 256 channels), and 4 for the range of a value. The paper has one range for a
    value of all heads, indices into all heads, and row pointers; here each head stands alone, so
    that evictors may choose for each head. That costs 32 / d bits a value element instead of
    32 / (d heads).
    """

    name = "kvquant"
    title = "KVQuant"
    axis = Axis.BITS
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    needs = (Need.CALIBRATION, Need.KERNEL)
    paper = Paper(
        "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization",
        "2401.18079",
        2024,
    )
    summary = (
        "Rounds keys before RoPE and values to levels learned from the model, outliers apart: "
        "close to full precision at 3 bits, for a calibration with gradients and a rotation of "
        "all keys at every read."
    )
    key_space = "pre-rope"
    needs_gradients = True

    bits: int = Field(default=3, ge=1, le=8)
    outlier_ratio: float = Field(default=0.01, ge=0, le=1)
    exact_tokens: int = Field(default=1, ge=0)
    q_norm: bool = False
    kmeans_iterations: int = Field(default=50, ge=1)

    @property
    def calibration_key(self) -> str:
        """Everything but the first tokens shapes what is learned."""
        return fingerprint_of([self.name, self.model_dump(mode="json", exclude={"exact_tokens"})])

    def calibrate(self, samples: LayerSamples) -> Learned:
        """Learn float16 `levels` [2^bits], keys' `middle` and `reach` [Hk, d], `read_levels`.

        Raises:
            BadInput: the samples have no gradients.
        """
        if samples.gradients is None:
            raise BadInput("kvquant learns from gradients", fix="collect samples with gradients")
        x = samples.vectors.detach().float()
        learned: Learned = {}
        if samples.role == "key":
            middle, reach = self._channel_ranges(x)
            learned = {"middle": middle, "reach": reach}
            normal = _normal(x, middle.unsqueeze(1), reach.unsqueeze(1))
            inside = normal.abs() <= 1
        else:
            index, middle, reach = _token_ranges(x, self._slots(x.shape[-1]))
            normal = _normal(x, middle.unsqueeze(-1), reach.unsqueeze(-1))
            inside = torch.ones_like(x, dtype=torch.bool).scatter(-1, index, False)
        # Squares of small gradients vanish in float32.
        weights = samples.gradients.detach().double().square()[inside]
        if not bool(weights.any()):
            weights = torch.ones_like(weights)
        levels = self._levels(normal[inside], weights)
        learned["levels"] = levels
        if self.q_norm:
            learned["read_levels"] = _same_moments(normal[inside], levels)
        return learned

    @property
    def one_page_kind(self) -> bool:
        """Not when the first tokens are held apart, in full precision."""
        return not self.exact_tokens

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build a plane of exact first tokens and coded others.

        Raises:
            BadInput: what was learned is for other vectors than these.
        """
        codec = KVQuantCodec(ctx, self._tables(ctx), self.bits, self._slots(ctx.shape.width))
        return KVQuantPlane(codec, self.exact_tokens) if self.exact_tokens else TokenPlane(codec)

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """The first tokens in full, and slots of the others."""
        exact = min(held.tokens, self.exact_tokens)
        return shape.full_bytes(exact) + self._coded_bytes(shape, held.tokens - exact)

    def selected_bytes(self, shape: PlaneShape, held: History, tokens: int) -> int | None:
        """All of the first tokens, and a slot for each selected one."""
        if held.tokens <= self.exact_tokens:
            return None
        return shape.full_bytes(self.exact_tokens) + self._coded_bytes(shape, tokens)

    def constant_bytes(self, shape: PlaneShape) -> int:
        """Levels, and the ranges of keys' channels."""
        tables = (1 + self.q_norm) * (1 << self.bits)
        if shape.role == "key":
            tables += 2 * shape.heads * shape.width
        return tables * HALF_BYTES

    def _slots(self, width: int) -> tuple[int, int]:
        return outliers.outlier_counts(self.outlier_ratio, width)

    def _coded_bytes(self, shape: PlaneShape, tokens: int) -> int:
        outlier = shape.element_bytes + outliers.index_bytes(shape.width)
        slot = packed_bytes(shape.width, self.bits) + sum(self._slots(shape.width)) * outlier
        if shape.role == "value":
            slot += 2 * HALF_BYTES
        return shape.heads * tokens * slot

    def _channel_ranges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return middle and reach [Hk, d] of sampled keys [Hk, N, d], outliers left out."""
        tail = self.outlier_ratio / 2 if self.outlier_ratio < 1 else 0.0
        at = torch.tensor([tail, 1 - tail], device=x.device)
        # One head at a time: torch.quantile refuses more than 16 million values.
        low, high = torch.stack([torch.quantile(head, at, dim=0) for head in x], dim=1)
        return _range(low, high)

    def _levels(self, normal: Tensor, weights: Tensor) -> Tensor:
        count = 1 << self.bits
        if not normal.numel():
            return torch.linspace(-1, 1, count, device=normal.device).half()
        return codebook.weighted_kmeans(normal, weights, count, self.kmeans_iterations).half()

    def _tables(self, ctx: PlaneContext) -> Mapping[str, Tensor]:
        """What was learned, for the heads of this plane and on its device, once for an engine."""
        heads = slice(ctx.first_head, ctx.first_head + ctx.shape.heads)
        key = (self.calibration_key, ctx.shape.layer, ctx.shape.role, heads.start, heads.stop)
        learned = ctx.calibration[self.name]

        def make() -> Mapping[str, Tensor]:
            own = {
                name: (table[heads] if name in ("middle", "reach") else table).to(ctx.device)
                for name, table in learned.items()
            }
            expected = (ctx.shape.heads, ctx.shape.width)
            if "middle" in own and own["middle"].shape != expected:
                raise BadInput(
                    f"kvquant learned ranges of keys of {learned['middle'].shape[-1]} channels and "
                    f"cannot hold vectors of {ctx.shape.width}",
                    fix="do not put another format around kvquant",
                )
            return own

        return made_once(ctx.engine, key, learned, make)


class KVQuantCodec(TokenCodec):
    """Codes, outliers and (for values) ranges of each token and head."""

    def __init__(
        self, ctx: PlaneContext, tables: Mapping[str, Tensor], bits: int, slots: tuple[int, int]
    ) -> None:
        self.role: Role = ctx.shape.role
        self.width = ctx.shape.width
        self.dtype = ctx.dtype
        self.tables = tables
        self.bits = bits
        self.slots = slots

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Turn [heads, n, width] into codes, outliers and ranges."""
        held: dict[str, Tensor] = {}
        exact = x.float()
        if self.role == "key":
            normal = _normal(exact, *self._channel_range())
            index = topk.top_indices(normal.abs(), sum(self.slots))
        else:
            index, middle, reach = _token_ranges(exact, self.slots)
            normal = _normal(exact, middle.unsqueeze(-1), reach.unsqueeze(-1))
            held["range"] = torch.stack((middle, reach), dim=-1)
        held["codes"] = pack_bits(lloyd_max.nearest(normal, self.tables["levels"]), self.bits)
        if sum(self.slots):
            held["outlier_index"] = outliers.stored_index(index, self.width)
            held["outlier_value"] = x.gather(-1, index)
        return held

    def decode(self, held: Mapping[str, Tensor]) -> Tensor:
        """Look up levels, undo the normalisation, and put outliers in their places."""
        codes = unpack_bits(held["codes"], self.bits, self.width)
        levels = self.tables.get("read_levels", self.tables["levels"]).float()
        middle, reach = (
            self._channel_range()
            if self.role == "key"
            else held["range"].float().unsqueeze(-2).unbind(-1)
        )
        x = (levels[codes.long()] * reach + middle).to(self.dtype)
        if "outlier_index" in held:
            x = x.scatter(-1, held["outlier_index"].long(), held["outlier_value"])
        return x

    def constants(self) -> dict[str, Tensor]:
        """Levels, and ranges of channels."""
        return dict(self.tables)

    def _channel_range(self) -> tuple[Tensor, Tensor]:
        middle, reach = (self.tables[name].float().unsqueeze(1) for name in ("middle", "reach"))
        return middle, reach


class KVQuantPlane(Plane):
    """The first `exact_tokens` tokens in full precision before a plane of coded ones.

    After an eviction the first survivors take these places, as exact as they were stored.
    """

    def __init__(self, codec: KVQuantCodec, exact_tokens: int) -> None:
        super().__init__()
        self.exact_tokens = exact_tokens
        self.coded = TokenPlane(codec)
        self.constants = self.coded.constants

    @property
    def tokens(self) -> int:
        """How many tokens it holds for each head."""
        return self._first + self.coded.tokens

    @property
    def settled_tokens(self) -> int:
        """All: each token is stored by itself."""
        return self.tokens

    def append(self, x: Tensor) -> None:
        """Fill the exact places, and encode what comes after them."""
        room = self.exact_tokens - self._first
        self._append_first(x[:, :room])
        if x.shape[1] > room:
            self.coded.append(x[:, room:])

    def read(self) -> Tensor:
        """Return the exact tokens and the decoded ones."""
        parts = [self.held["first"]] if self._first else []
        if self.coded.tokens:
            parts.append(self.coded.read())
        return torch.cat(parts, dim=1)

    def select(self, index: Tensor) -> tuple[Tensor, int]:
        """Decode only the tokens at `index`; the exact ones are read whole."""
        first = self._first
        if not self.coded.tokens:
            return gather_tokens(self.held["first"], index), self.nbytes
        x, touched = self.coded.select((index - first).clamp(min=0))
        if not first:
            return x, touched
        exact = gather_tokens(self.held["first"], index.clamp(max=first - 1))
        whole = torch.where((index < first).unsqueeze(-1), exact, x)
        return whole, touched + tensor_bytes(self.held)

    def keep(self, index: Tensor) -> None:
        """Move the survivors' bytes; nothing is encoded again."""
        # As many survivors as there are exact places come first, so that the others have codes.
        first, _ = self.select(index[:, : self.exact_tokens])
        if self.coded.tokens:
            self.coded.keep(index[:, self.exact_tokens :] - self._first)
        self.held = {"first": first}

    def clear(self) -> None:
        """Drop every token."""
        self.held = {}
        self.coded.clear()

    def tensors(self) -> dict[str, Tensor]:
        """The exact tokens and what the coded ones are stored as."""
        return {**self.held, **self.coded.tensors()}

    @property
    def _first(self) -> int:
        return self.held["first"].shape[1] if self.held else 0

    def _append_first(self, x: Tensor) -> None:
        # A view of the prompt would keep all of it alive.
        self.held["first"] = torch.cat((self.held["first"], x), dim=1) if self.held else x.clone()


def _range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return middle and reach as stored, float16; a reach of 0 becomes 1."""
    largest = torch.finfo(torch.float16).max
    middle = ((high + low) / 2).clamp(-largest, largest).half()
    reach = ((high - low) / 2).clamp(max=largest).half()
    return middle, torch.where(reach == 0, torch.ones_like(reach), reach)


def _normal(x: Tensor, middle: Tensor, reach: Tensor) -> Tensor:
    return (x - middle.float()) / reach.float()


def _token_ranges(x: Tensor, slots: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return outliers' indices, and middle and reach [heads, n] of the rest of each token."""
    index = outliers.extremes(x, -1, *slots)
    if index.shape[-1] == x.shape[-1]:
        zeros = x.new_zeros(x.shape[:-1])
        return index, *_range(zeros, zeros)
    low = x.scatter(-1, index, float("inf")).amin(-1)
    high = x.scatter(-1, index, float("-inf")).amax(-1)
    return index, *_range(low, high)


def _same_moments(normal: Tensor, levels: Tensor) -> Tensor:
    """Return levels whose use over the samples has the samples' mean and deviation."""
    rounded = levels.float()[lloyd_max.nearest(normal, levels).long()]
    stretch = normal.std(correction=0) / rounded.std(correction=0)
    stretch = torch.where(stretch.isfinite(), stretch, torch.ones_like(stretch))
    return ((levels.float() - rounded.mean()) * stretch + normal.mean()).half()
