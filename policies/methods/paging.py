"""PagedAttention: caches in blocks of one pool, found through a table (arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from kvtune.errors import BadInput
from kvtune.policies.method import (
    REFERENCE,
    Axis,
    History,
    Paper,
    PlaneBytes,
    PlaneFactory,
    PlaneShape,
    Saves,
    SelectedBytes,
    Serving,
    StoreMethod,
)
from kvtune.policies.paged_plane import TABLE_ENTRY_BYTES, PagedPlane
from kvtune.policies.plane import Plane, PlaneContext, TokenPlane
from kvtune.types import Harm


class Paging(StoreMethod):
    """Hold tokens in blocks of `block_tokens`, so that a sequence wastes less than one block.

    Each plane (keys or values of one layer, all its heads) has its own block table, int32: servers
    share one among the layers of a group, but layers that evict by themselves need their own. The
    table counts with the plane, `ceil(T / B)` entries of 4 bytes; reference counts and the free
    list are bookkeeping of the host, as in vLLM. A block that several sequences share counts for
    each of them; `paged_plane.BlockPool.used_bytes` counts it once.
    """

    name = "paging"
    title = "PagedAttention"
    axis = Axis.PLACEMENT
    harm = Harm.LOSSLESS
    saves = (Saves.WASTE,)
    acts = "both"
    terminal = False
    serving = (
        REFERENCE,
        Serving("vllm", "always on; --block-size sets the tokens of a block", "0.32"),
    )
    paper = Paper(
        "Efficient Memory Management for Large Language Model Serving with PagedAttention",
        "2309.06180",
        2023,
    )
    summary = (
        "Places tokens in fixed blocks that sequences share until they write; costs the unused "
        "slots of each last block and a table."
    )

    block_tokens: int = Field(default=16, ge=1)

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """Where a token lies does not change what it is."""
        return "plain"

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build an empty paged store of the format inside.

        Raises:
            BadInput: that format keeps a window of tokens in another form.
        """
        inside = inner(ctx)
        if type(inside) is not TokenPlane:
            raise BadInput(
                f"a {type(inside).__name__} cannot be paged: tokens in two forms need two kinds of "
                "page",
                fix="use a format that stores each token by itself",
            )
        return PagedPlane(inside.codec, self.block_tokens, ctx.engine)

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Whole blocks in the format inside, and a table entry for each."""
        blocks = self.blocks(held.tokens)
        return inner(shape, History(blocks * self.block_tokens)) + blocks * TABLE_ENTRY_BYTES

    def selected_through(
        self, shape: PlaneShape, held: History, tokens: int, inner: SelectedBytes
    ) -> int | None:
        """What is read inside, and the table."""
        some = inner(shape, held, tokens)
        return None if some is None else some + self.blocks(held.tokens) * TABLE_ENTRY_BYTES

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def slack_tokens(self, tokens: int) -> int:
        """Slots of the last block that hold nothing."""
        return self.blocks(tokens) * self.block_tokens - tokens
