"""Planes of two layers that share the directions of their vectors (MiniCache, 2405.14366)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtune.errors import BadInput
from kvtune.lazy import lazy_import
from kvtune.policies.plane import Plane, PlaneContext, gather_tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import slerp
else:
    torch = lazy_import("torch")
    slerp = lazy_import("kvtune.kernels.slerp")


@dataclass(frozen=True, slots=True)
class Pairing:
    """How a layer is merged with its `partner`.

    A token is `units` vectors, over the heads of each; `merge_t`, `retain_ratio` and `decode_merge`
    are those of the method.
    """

    partner: int
    units: int
    merge_t: float
    retain_ratio: float
    decode_merge: bool


class HalfPlane(Plane):
    """One layer's half of a pair: lengths, the vectors that stay, and what is not merged yet.

    The halves find each other in the dictionary that the planes of a sequence share.
    """

    def __init__(self, pairing: Pairing, ctx: PlaneContext) -> None:
        super().__init__()
        self.pairing = pairing
        self.shape = ctx.shape
        self.units = pairing.units
        self.dtype, self.device = ctx.dtype, ctx.device
        self.sequence = ctx.sequence
        self.sequence["half", ctx.shape.layer, ctx.shape.role] = self
        self.settled = 0

    @property
    def merged_tokens(self) -> int:
        """How many of the oldest tokens are merged."""
        return self.held["lengths"].shape[1] if "lengths" in self.held else 0

    @property
    def tail_tokens(self) -> int:
        """How many of the latest tokens are in full precision."""
        return self.held["tail"].shape[1] if "tail" in self.held else 0

    @property
    def tokens(self) -> int:
        """How many tokens it holds for each head."""
        return self.merged_tokens + self.tail_tokens

    @property
    def settled_tokens(self) -> int:
        """Those that were merged before the latest append."""
        return self.settled

    @property
    def other(self) -> HalfPlane | None:
        """The other half; None when its layer does not take part."""
        found = self.sequence.get(("half", self.pairing.partner, self.shape.role))
        return found if isinstance(found, HalfPlane) else None

    def add_to_tail(self, x: Tensor) -> None:
        """Hold token vectors [heads, n, width] in full precision."""
        tail = self.held.get("tail")
        # A view of the projections would keep all of them alive.
        self.held["tail"] = x.contiguous() if tail is None else torch.cat((tail, x), dim=1)

    def take_tail(self, count: int) -> Tensor:
        """Return the first `count` tokens of the tail as vectors [units, n, D], and drop them."""
        tail = self.held.pop("tail")
        if count < tail.shape[1]:
            self.held["tail"] = tail[:, count:].contiguous()
        return _split_units(tail[:, :count], self.units)

    def add_merged(self, x: Tensor, stays: Tensor) -> None:
        """Hold lengths of vectors [units, n, D], and those themselves where `stays` [units, n]."""
        lengths = x.float().norm(dim=-1).to(self.dtype)
        vectors = x.transpose(0, 1)[stays.T]
        if self.merged_tokens:
            lengths = torch.cat((self.held["lengths"], lengths), dim=1)
            vectors = torch.cat((self.held["retained"], vectors))
        self.held |= {"lengths": lengths, "retained": vectors}

    def keep_merged(self, index: Tensor, retained: Tensor) -> None:
        """Hold only merged tokens at `index` [units, m], and those at `retained` that stay."""
        self.held["lengths"] = self.held["lengths"].gather(1, index)
        self.held["retained"] = self.held["retained"][retained]

    def keep_tail(self, index: Tensor) -> None:
        """Hold only tail tokens at `index` [heads, m]."""
        self.held["tail"] = gather_tokens(self.held["tail"], index)

    def restore(self, lower: LowerPlane) -> Tensor:
        """Give the directions of `lower` this layer's lengths, and put back what stays."""
        parts = []
        if self.merged_tokens:
            directions = slerp.unit(_split_units(lower.inner.read(), self.units).float())
            vectors = (directions * self.held["lengths"].float().unsqueeze(-1)).to(self.dtype)
            vectors[lower.retained_at()] = self.held["retained"]
            parts.append(_join_units(vectors, self.shape.heads))
        if self.tail_tokens:
            parts.append(self.held["tail"])
        return torch.cat(parts, dim=1)

    def clear(self) -> None:
        """Drop every token."""
        self.held = {}
        self.settled = 0

    def facts(self) -> dict[str, int]:
        """How many tokens are merged, and how many vectors stay."""
        return {
            "merged": self.merged_tokens,
            "retained": len(self.held["retained"]) if self.merged_tokens else 0,
        }


class LowerPlane(HalfPlane):
    """The lower layer's half, which owns the directions and says which tokens stay.

    An eviction is carried out when the upper layer follows, which reads all directions until then;
    `leaving` [1 or heads, m] are the tokens that this layer still shows.
    """

    def __init__(self, pairing: Pairing, ctx: PlaneContext, inner: Plane) -> None:
        super().__init__(pairing, ctx)
        self.inner = inner
        self.constants = dict(inner.constants)

    @property
    def tokens(self) -> int:
        """How many tokens it holds for each head."""
        leaving = self.held.get("leaving")
        return super().tokens if leaving is None else leaving.shape[1]

    @property
    def settled_tokens(self) -> int:
        """Those that were merged before the latest append and do not change inside."""
        return min(self.settled, self.inner.settled_tokens)

    def append(self, x: Tensor) -> None:
        """Add token vectors; those of the step before are merged now.

        Raises:
            BadInput: the upper layer holds other tokens.
        """
        self.settled = self.merged_tokens
        upper = self.other
        if upper is not None and upper.tokens:
            if upper.tokens != self.tokens:
                raise BadInput(
                    f"merged layers hold {self.tokens} and {upper.tokens} tokens",
                    fix="both layers of a pair must keep the same tokens",
                )
            if self.pairing.decode_merge:
                self.merge(upper)
        self.add_to_tail(x)

    def merge(self, upper: HalfPlane) -> int:
        """Merge the tokens that both layers hold in full precision; return bytes freed here."""
        count = min(self.tail_tokens, upper.tail_tokens)
        if not count:
            return 0
        below, above = self.take_tail(count), upper.take_tail(count)
        u, w = slerp.unit(below.float()), slerp.unit(above.float())
        angles = slerp.angle(u, w)
        if "limits" not in self.held:
            low, high = angles.amin(-1), angles.amax(-1)
            self.held["limits"] = high - self.pairing.retain_ratio * (high - low)
        stays = angles > self.held["limits"].unsqueeze(-1)
        token, member = stays.T.nonzero(as_tuple=True)
        codes = (token + self.merged_tokens) * self.units + member
        self._hold_codes(torch.cat((self._codes(), codes)))
        self.add_merged(below, stays)
        upper.add_merged(above, stays)
        directions = slerp.slerp(u, w, self.pairing.merge_t).to(self.dtype)
        self.inner.append(_join_units(directions, self.shape.heads))
        return below.numel() * below.element_size()

    def read(self) -> Tensor:
        """Restore all token vectors."""
        x = self.restore(self)
        leaving = self.held.get("leaving")
        return x if leaving is None else gather_tokens(x, leaving)

    def keep(self, index: Tensor) -> None:
        """Show only the tokens at `index`, and drop the others when the upper layer does."""
        upper = self.other
        if upper is None or not upper.tokens:
            self.keep_tail(index.expand(self.shape.heads, -1))
        else:
            self.held["leaving"] = index

    def drop_with(self, upper: HalfPlane, index: Tensor) -> None:
        """Drop all tokens but those at `index` [1 or heads, m] in both layers.

        Raises:
            BadInput: the lower layer keeps others, or heads whose vectors are merged together do.
        """
        leaving = self.held.pop("leaving", None)
        if leaving is None or not torch.equal(leaving, index):
            raise BadInput(
                "merged layers were told to keep different tokens",
                fix="let the upper layer of a pair follow the lower one's choice",
            )
        rows = index.expand(self.shape.heads, -1)
        by_unit = rows.reshape(self.units, -1, rows.shape[1])
        if bool((by_unit != by_unit[:, :1]).any()):
            raise BadInput(
                "merged layers cannot follow an eviction that keeps other tokens in each head",
                fix="set per_head=true, or evict the same from all heads",
            )
        # Where heads keep different numbers of merged tokens, the surplus is restored.
        merged = int((rows < self.merged_tokens).sum(-1).min())
        tails = [gather_tokens(half.restore(self), rows[:, merged:]) for half in (self, upper)]
        if self.merged_tokens:
            own = by_unit[:, 0, :merged]
            lost = own.new_full((self.units, self.merged_tokens), -1)
            moved = lost.scatter(1, own, torch.arange(merged, device=own.device).expand_as(own))
            member, token = self.retained_at()
            place = moved[member, token]
            retained = place >= 0
            self._hold_codes((place * self.units + member)[retained])
            for half in (self, upper):
                half.keep_merged(own, retained)
            self.inner.keep(rows[:, :merged])
        for half, tail in zip((self, upper), tails, strict=True):
            half.held["tail"] = tail
            half.settled = 0

    def clear(self) -> None:
        """Drop every token."""
        super().clear()
        self.inner.clear()

    def facts(self) -> dict[str, int]:
        """Its own, and those of what holds the directions."""
        return self.inner.facts() | super().facts()

    def retained_at(self) -> tuple[Tensor, Tensor]:
        """Unit and token of each vector that stays."""
        codes = self._codes()
        return codes % self.units, codes // self.units

    def tensors(self) -> dict[str, Tensor]:
        """Its own, and those of what holds the directions."""
        inner = {f"inner.{name}": tensor for name, tensor in self.inner.tensors().items()}
        return super().tensors() | inner

    def _codes(self) -> Tensor:
        """What stays, as token * units + unit: so that 4 bytes name both."""
        codes = self.held.get("retained_at")
        if codes is None:
            return torch.zeros(0, dtype=torch.long, device=self.device)
        return codes.long()

    def _hold_codes(self, codes: Tensor) -> None:
        self.held["retained_at"] = codes.to(torch.int32)


class UpperPlane(HalfPlane):
    """The upper layer's half, which reads directions from the lower one."""

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of the directions."""
        lower = self.other
        return lower.inner.nbytes if isinstance(lower, LowerPlane) else 0

    def facts(self) -> dict[str, int]:
        """Its own, and those of what holds the directions."""
        lower = self.other
        inner = lower.inner.facts() if isinstance(lower, LowerPlane) else {}
        return inner | super().facts()

    def append(self, x: Tensor) -> None:
        """Add token vectors; a prompt is merged with the lower layer's at once."""
        self.settled = self.merged_tokens
        first = not self.tokens
        self.add_to_tail(x)
        lower = self.other
        self.freed_bytes = lower.merge(self) if first and isinstance(lower, LowerPlane) else 0

    def read(self) -> Tensor:
        """Restore all token vectors."""
        lower = self.other
        return self.restore(lower) if isinstance(lower, LowerPlane) else self.held["tail"]

    def keep(self, index: Tensor) -> None:
        """Hold only the tokens at `index`, in the lower layer too, which chose them."""
        lower = self.other
        if isinstance(lower, LowerPlane):
            lower.drop_with(self, index)
        else:
            self.keep_tail(index.expand(self.shape.heads, -1))


def _split_units(x: Tensor, units: int) -> Tensor:
    """Turn [heads, n, d] into [units, n, heads / units * d]."""
    heads, tokens, width = x.shape
    return x.reshape(units, heads // units, tokens, width).transpose(1, 2).flatten(2)


def _join_units(x: Tensor, heads: int) -> Tensor:
    """Undo `_split_units`."""
    units, tokens, _ = x.shape
    return x.reshape(units, tokens, heads // units, -1).transpose(1, 2).reshape(heads, tokens, -1)
