"""MiniCache: adjacent deep layers share the directions of their keys and values (2405.14366)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvtune.policies.layer_pair import LowerPlane, Pairing, UpperPlane
from kvtune.policies.method import (
    Axis,
    History,
    Paper,
    PlaneBytes,
    PlaneFactory,
    PlaneShape,
    Saves,
    SelectedBytes,
    StoreMethod,
)
from kvtune.types import Harm

if TYPE_CHECKING:
    from kvtune.policies.plane import Plane, PlaneContext

INT32_BYTES = 4
FLOAT32_BYTES = 4


class MiniCache(StoreMethod):
    """Merge layers l-1 and l, pairwise from the middle upward, into one direction per token.

    A token's vectors x, y of both layers (keys and values separately) become their lengths and one
    unit vector e between their directions u, w at the angle Ω,
    e = sin((1-t) Ω) / sin Ω · u + sin(t Ω) / sin Ω · w, and are read as |x| e and |y| e. Tokens
    whose directions differ most, Ω > Ωmax - γ (Ωmax - Ωmin) over the prompt, stay as they are in
    both layers (some circulating code has the sign the other way round and keeps the most similar).
    Merging commutes with RoPE, because both layers turn a position by the same angle.

    The lower layer holds e in what follows in the stack, and the tokens that stay; the upper layer
    reads e from there. So alone this saves at most a quarter of the bytes and nothing of what a
    step reads: bandwidth is won by quantizing e. Until the upper layer has stored the same tokens
    the lower one holds them in full precision. Generated tokens (and later prompts) are merged when
    the next one arrives (`decode_merge`), judged by the prompt's angles, or never.

    Both layers of a pair hold the same tokens: under an evictor the upper one follows the lower
    one's choice. The vector over all heads needs evictors that keep the same tokens in each head
    (`per_head` does not). A layer whose partner is not there (it has a window of its own) stays in
    full precision.

    Besides the paper's lengths, e, and 4 bytes and two vectors for each token that stays, the lower
    layer counts the Ω from which tokens stay: 4 bytes for each of the vectors that make up a token.

    Attributes:
        start_ratio: share of the layers, from the first, that are left alone; 1 merges none.
        merge_t: where e lies between the lower (0) and the upper (1) layer's direction.
        retain_ratio: γ, the share of the range of angles whose tokens stay; 0 merges all.
        per_head: one direction, two lengths and one angle for each head, not for all together.
        decode_merge: whether generated tokens are merged too.
    """

    name = "minicache"
    title = "MiniCache"
    axis = Axis.LAYER
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY,)
    acts = "both"
    paper = Paper(
        "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models",
        "2405.14366",
        2024,
    )
    summary = (
        "Stores one direction for two adjacent deep layers: up to a quarter less memory alone, "
        "more with quantized directions, at the price of what tells the layers apart."
    )
    terminal = False

    start_ratio: float = Field(default=0.5, ge=0, le=1)
    merge_t: float = Field(default=0.6, ge=0, le=1)
    retain_ratio: float = Field(default=0.05, ge=0, le=1)
    per_head: bool = False
    decode_merge: bool = False

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """Which tokens stay depends on the whole prompt, unless none do."""
        return "never" if self.retain_ratio else "fingerprint"

    @property
    def joins_heads(self) -> bool:
        """A token is one vector over all heads unless each is merged by itself."""
        return not self.per_head

    @property
    def apart_variants(self) -> tuple[StoreMethod, ...]:
        """Each head merged by itself."""
        return (self.model_copy(update={"per_head": True}),) if self.joins_heads else ()

    def partner(self, layer: int, layers: int) -> int | None:
        """The layer that `layer` of `layers` is merged with."""
        first = int(self.start_ratio * layers)
        if layer < first:
            return None
        other = layer + 1 if (layer - first) % 2 == 0 else layer - 1
        return other if other < layers else None

    def leader(self, layer: int, layers: int) -> int | None:
        """The lower layer of a pair, for the upper one."""
        other = self.partner(layer, layers)
        return other if other is not None and other < layer else None

    @property
    def each_token_alone(self) -> bool:
        """No: tokens are stored with others."""
        return False

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build one layer's half of a pair; a layer without a partner is left to `inner`."""
        shape = ctx.shape
        partner = self.partner(shape.layer, shape.layers)
        if partner is None:
            return inner(ctx)
        pairing = Pairing(
            partner, self.units(shape.heads), self.merge_t, self.retain_ratio, self.decode_merge
        )
        if partner > shape.layer:
            return LowerPlane(pairing, ctx, inner(ctx))
        return UpperPlane(pairing, ctx)

    def units(self, heads: int) -> int:
        """Vectors that a token of `heads` heads consists of."""
        return heads if self.per_head else 1

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Bytes of this layer's half.

        Without `observed`, `retain_ratio` of the tokens are taken to stay; how many really do
        depends on how angles are spread.
        """
        if self.partner(shape.layer, shape.layers) is None:
            return inner(shape, held)
        merged = self._merged(held, observed)
        units = self.units(shape.heads)
        total = units * merged.tokens * shape.element_bytes
        total += shape.full_bytes(held.tokens - merged.tokens)
        if observed is None:
            retained = units * round(self.retain_ratio * merged.tokens)
        else:
            retained = observed["retained"]
        vector_bytes = shape.heads // units * shape.width * shape.element_bytes
        total += retained * vector_bytes
        if self.leader(shape.layer, shape.layers) is None and merged.tokens:
            total += inner(shape, merged) + retained * INT32_BYTES
            total += units * FLOAT32_BYTES
        return total

    def borrowed_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """The directions, which the upper layer reads from the lower one."""
        leader = self.leader(shape.layer, shape.layers)
        if leader is None:
            return 0
        return inner(replace(shape, layer=leader), self._merged(held, observed))

    def inner_shape(self, shape: PlaneShape) -> PlaneShape | None:
        """The directions, which the lower layer holds for both."""
        return shape if self.leader(shape.layer, shape.layers) is None else None

    def selected_through(
        self, shape: PlaneShape, held: History, tokens: int, inner: SelectedBytes
    ) -> int | None:
        """A merged layer is read whole, one without a partner as `inner` is."""
        if self.partner(shape.layer, shape.layers) is None:
            return inner(shape, held, tokens)
        return None

    def passing_bytes(self, shape: PlaneShape, held: History, own_bytes: int) -> int:
        """Full precision in the lower layer until the upper one has stored its prompt as well."""
        if self.partner(shape.layer, shape.layers) is None:
            return 0
        full = shape.full_bytes(held.tokens)
        return full - own_bytes if self.leader(shape.layer, shape.layers) is None else full

    def _merged(self, held: History, observed: Mapping[str, int] | None) -> History:
        """The merged ones of the held tokens; the latest generated one never is."""
        appended = max(held.appended - 1, 0) if self.decode_merge else 0
        if observed is None:
            return History(held.at_once, appended)
        count = min(observed["merged"], held.at_once + appended)
        return History(min(count, held.at_once), max(count - held.at_once, 0))
