"""Planes whose tokens lie in blocks of a pool that all sequences of an engine share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtune.lazy import lazy_import
from kvtune.policies.plane import Piece, Plane, TokenCodec

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

TABLE_ENTRY_BYTES = 4
FIRST_BLOCKS = 16
"""Blocks of a new pool; a full pool doubles."""


class BlockPool:
    """Blocks [blocks, heads, block_tokens, ...] for each named tensor of a format.

    All sequences of an engine draw from one pool for each format and number of heads. A full pool
    doubles, and copies itself for it: a server sizes it once, a reference cannot.
    """

    def __init__(self, block_tokens: int, like: Mapping[str, Tensor]) -> None:
        self.block_tokens = block_tokens
        self.references: list[int] = []
        self.copied_blocks = 0
        self._free: list[int] = []
        with torch.inference_mode():
            self.tensors = {
                name: x.new_zeros(0, x.shape[0], block_tokens, *x.shape[2:])
                for name, x in like.items()
            }

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all named tensors."""
        return sum(x.shape[1:].numel() * x.element_size() for x in self.tensors.values())

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody holds, each counted once."""
        return len(self.references) - len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of these blocks."""
        return self.used_blocks * self.block_bytes

    def take(self) -> int:
        """Return a free block, held once."""
        if not self._free:
            self._grow()
        block = self._free.pop()
        self.references[block] = 1
        return block

    def share(self, block: int) -> int:
        """Let one more hold a block."""
        self.references[block] += 1
        return block

    def release(self, blocks: list[int]) -> None:
        """Let one fewer hold each block; those that nobody holds are free again."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free.append(block)

    def copy(self, block: int) -> int:
        """Return a new block with the same content."""
        new = self.take()
        with torch.inference_mode():
            for tensor in self.tensors.values():
                tensor[new] = tensor[block]
        self.copied_blocks += 1
        return new

    def write(self, blocks: Tensor, slots: Tensor, new: Mapping[str, Tensor]) -> None:
        """Put tokens [heads, n, ...] into `slots` [n] of `blocks` [n]."""
        with torch.inference_mode():
            for name, tensor in self.tensors.items():
                tensor[blocks, :, slots] = new[name].transpose(0, 1)

    def _grow(self) -> None:
        old = len(self.references)
        more = max(old, FIRST_BLOCKS)
        with torch.inference_mode():
            self.tensors = {
                name: torch.cat((x, x.new_zeros(more, *x.shape[1:])))
                for name, x in self.tensors.items()
            }
        self.references.extend([0] * more)
        self._free.extend(range(old + more - 1, old - 1, -1))


@dataclass(frozen=True, slots=True)
class PagedPiece(Piece):
    """One full block of a pool, held until it is released."""

    pool: BlockPool = field(repr=False)
    block: int

    def release(self) -> None:
        """Let go of the block."""
        self.pool.release([self.block])


class PagedPlane(Plane):
    """A plane whose tokens lie in blocks of a shared pool, encoded as a codec says."""

    def __init__(self, codec: TokenCodec, block_tokens: int, pools: dict[Any, Any]) -> None:
        super().__init__()
        self.codec = codec
        self.constants = codec.constants()
        self.block_tokens = block_tokens
        self.blocks: list[int] = []
        self.pool: BlockPool | None = None
        self._pools = pools
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """How many tokens it holds for each head."""
        return self._tokens

    @property
    def settled_tokens(self) -> int:
        """All: each token is stored by itself."""
        return self._tokens

    @property
    def shares_tokens(self) -> bool:
        """Yes, full blocks without copying them."""
        return True

    def append(self, x: Tensor) -> None:
        """Encode and add token vectors; a shared last block is copied first."""
        self._write(self.codec.encode(x))

    def read(self) -> Tensor:
        """Decode all tokens, block by block of the table."""
        return self.codec.decode(self._stored())

    def select(self, index: Tensor) -> tuple[Tensor, int]:
        """Decode only the tokens at `index`."""
        some = self._gather(index)
        touched = Piece(some).nbytes + len(self.blocks) * TABLE_ENTRY_BYTES
        return self.codec.decode(some), touched

    def keep(self, index: Tensor) -> None:
        """Move the survivors together and free the blocks that this empties.

        Blocks before the first gap stay where they are, shared or not.
        """
        ranks = torch.arange(index.shape[1], device=index.device)
        before_gap = int((index == ranks).all(0).long().cumprod(0).sum())
        whole = before_gap // self.block_tokens
        moved = self._gather(index[:, whole * self.block_tokens :])
        self._truncate(whole)
        if next(iter(moved.values())).shape[1]:
            self._write(moved)

    def clear(self) -> None:
        """Free every block."""
        self._truncate(0)

    def tensors(self) -> dict[str, Tensor]:
        """The table, and each of its blocks as a view into the pool."""
        found = dict(self.held)
        if self.pool is not None:
            for number, block in enumerate(self.blocks):
                for name, tensor in self.pool.tensors.items():
                    found[f"{name}.{number}"] = tensor[block]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors()`."""
        if self.pool is None:
            return 0
        return len(self.blocks) * (self.pool.block_bytes + TABLE_ENTRY_BYTES)

    def share(self, start: int, end: int) -> Piece:
        """Hand out a full block itself, and a copy of any other tokens."""
        block, slot = divmod(start, self.block_tokens)
        if self.pool is None or slot or end - start != self.block_tokens:
            return Piece({name: x[:, start:end].clone() for name, x in self._stored().items()})
        number = self.pool.share(self.blocks[block])
        views = {name: tensor[number] for name, tensor in self.pool.tensors.items()}
        return PagedPiece(views, self.pool, number)

    def adopt(self, piece: Piece) -> None:
        """Hold a shared block as well where it fits; otherwise copy its tokens."""
        fits = self._tokens % self.block_tokens == 0
        if isinstance(piece, PagedPiece) and fits and self._pool(piece.tensors) is piece.pool:
            self.blocks.append(piece.pool.share(piece.block))
            self._tokens += self.block_tokens
            self._note_table()
        else:
            self._write(piece.tensors)

    def swap_out(self) -> dict[str, Tensor]:
        """Give away copies of the blocks [blocks, heads, B, ...] and the table, and free them."""
        if self.pool is None:
            return {}
        table = self.held["table"]
        content = {name: tensor[table] for name, tensor in self.pool.tensors.items()}
        tokens = self._tokens
        self._truncate(0)
        self._tokens = tokens
        return {**content, "table": table}

    def swap_in(self, held: Mapping[str, Tensor]) -> None:
        """Put the content into free blocks, which need not be those that it came from."""
        if self.pool is None:
            return
        tokens, self._tokens = self._tokens, 0
        content = {name: held[name].transpose(0, 1).flatten(1, 2) for name in self.pool.tensors}
        self._write(content)
        self._tokens = tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedPlane:
        twin = PagedPlane(self.codec, self.block_tokens, self._pools)
        memo[id(self)] = twin
        if self.pool is not None:
            twin._use(self.pool)
            twin.blocks.extend(self.pool.share(block) for block in self.blocks)
            twin._tokens = self._tokens
            twin._note_table()
        return twin

    def _write(self, new: Mapping[str, Tensor]) -> None:
        """Add encoded tokens [heads, n, ...]."""
        pool = self._pool(new)
        start = self._tokens
        count = next(iter(new.values())).shape[1]
        last, slot = divmod(start, self.block_tokens)
        if slot and pool.references[self.blocks[last]] > 1:
            shared = self.blocks[last]
            self.blocks[last] = pool.copy(shared)
            pool.release([shared])
        while len(self.blocks) * self.block_tokens < start + count:
            self.blocks.append(pool.take())
        self._tokens = start + count
        self._note_table()
        at = torch.arange(start, start + count, device=self.held["table"].device)
        pool.write(self.held["table"][at // self.block_tokens], at % self.block_tokens, new)

    def _truncate(self, blocks: int) -> None:
        if self.pool is None:
            return
        self.pool.release(self.blocks[blocks:])
        del self.blocks[blocks:]
        self._tokens = blocks * self.block_tokens
        self._note_table()

    def _gather(self, index: Tensor) -> dict[str, Tensor]:
        """Encoded tokens at `index` [heads or 1, m]: [heads, m, ...]."""
        assert self.pool is not None
        blocks = self.held["table"][index // self.block_tokens]
        slots = index % self.block_tokens
        some = {}
        for name, tensor in self.pool.tensors.items():
            heads = torch.arange(tensor.shape[1], device=tensor.device)[:, None]
            some[name] = tensor[blocks, heads, slots]
        return some

    def _stored(self) -> dict[str, Tensor]:
        """All encoded tokens, gathered."""
        assert self.pool is not None
        return {
            name: tensor[self.held["table"]].transpose(0, 1).flatten(1, 2)[:, : self._tokens]
            for name, tensor in self.pool.tensors.items()
        }

    def _note_table(self) -> None:
        assert self.pool is not None
        device = next(iter(self.pool.tensors.values())).device
        self.held["table"] = torch.tensor(self.blocks, dtype=torch.int32, device=device)

    def _pool(self, like: Mapping[str, Tensor]) -> BlockPool:
        """The pool for blocks of this form, which all planes of the engine share."""
        if self.pool is None:
            # Tensors that come from a file are in another order than those of a codec.
            form = tuple(
                (name, x.dtype, x.shape[0], x.shape[2:]) for name, x in sorted(like.items())
            )
            device = next(iter(like.values())).device
            key = ("paging", self.block_tokens, form, device)
            pool = self._pools.get(key) or BlockPool(self.block_tokens, like)
            self._use(self._pools.setdefault(key, pool))
        assert self.pool is not None
        return self.pool

    def _use(self, pool: BlockPool) -> None:
        """Draw from a pool, and give everything back when nobody uses this plane any more."""
        self.pool = pool
        weakref.finalize(self, pool.release, self.blocks).atexit = False
