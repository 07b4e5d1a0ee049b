"""The paged KV cache: which blocks are held, which are free, and which free ones can be reused."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

NULL_BLOCK = 0
"""Never holds a token, as in vLLM: a cache of n blocks has room for n - 1."""


def prefix_hashes(tokens: Sequence[int], block_tokens: int, salt: str | None = None) -> list[int]:
    """Hash every full block of `tokens` together with all that stands before it.

    Equal hashes mean equal tokens from the start, under an equal `salt`.
    """
    digest = hashlib.sha256((salt or "").encode()).digest()
    parent = int.from_bytes(digest[:8], "big")
    hashes = []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        # Python randomises hashes of text, not those of integers.
        parent = hash((parent, tuple(tokens[end - block_tokens : end])))
        hashes.append(parent)
    return hashes


class BlockPool:
    """`total` blocks, block 0 never used. A block is held by any number of sequences, or free.

    A free block keeps its content until it is taken again, the one released longest ago first;
    until then a prompt that starts with the same tokens finds it.
    """

    def __init__(self, total: int, *, caching: bool) -> None:
        self.total = total
        self._caching = caching
        self._holders = [0] * total
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, total))
        self._by_hash: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}

    @property
    def free(self) -> int:
        """How many blocks can be taken."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many blocks are held."""
        return self.total - 1 - len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are held."""
        return self.used / max(1, self.total - 1)

    def find(self, hashes: Sequence[int]) -> list[int]:
        """The blocks that hold the longest known start of `hashes`."""
        found = []
        for value in hashes:
            block = self._by_hash.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are free at the moment."""
        return sum(self._holders[block] == 0 for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Take one more hold on blocks that `find` returned."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks and forget what was in them; there must be as many."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._holders[block] = 1
            self._forget(block)
            taken.append(block)
        return taken

    def remember(self, block: int, value: int) -> None:
        """Let later prompts find `block` by the hash of what is in it."""
        if self._caching and value not in self._by_hash:
            self._by_hash[value] = block
            self._hash_of[block] = value

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a sequence's blocks, in its order: the end of a prompt is reused first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def reset_cache(self) -> bool:
        """Forget all content; refused (False) while any block is held."""
        if self.used:
            return False
        self._by_hash.clear()
        self._hash_of.clear()
        return True

    def _forget(self, block: int) -> None:
        value = self._hash_of.pop(block, None)
        if value is not None:
            del self._by_hash[value]
