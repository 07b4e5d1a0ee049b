"""Automatic prefix caching: keep the blocks of a prompt for later ones that start alike."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal, TypeVar

from pydantic import Field

from kvtune.policies.method import REFERENCE, Axis, Method, Paper, Saves, Serving
from kvtune.types import Harm

TOKEN_BYTES = 4

Content = TypeVar("Content")


class PrefixCaching(Method):
    """Compute only what follows the longest cached prefix, in whole blocks of `block_tokens`.

    A block's key hashes the key of the block before it and its own tokens; the first one hashes
    `salt` (one for each tenant, or timing tells tenants what others asked), `lora`, the model's
    weights, and the parameters of every method that changes what is stored. One token is always
    computed, so that there are logits: at most floor((T - 1) / B) blocks of a prompt of T tokens
    are found.

    Blocks of a paged cache are shared as they are. Of other caches that store each token by itself
    they are copied: `capacity_blocks` (None: no limit) bounds how many are held; the least
    recently used go first, later blocks of a prompt before earlier ones. Stacks with an evictor
    stay private (its choice depends on later tokens, and it must see the whole prompt), as do
    stores that keep tokens in groups. Under a lossy store the tokens after a found prefix attend
    to what is stored of it, as on a server; without a hit they attend to the exact prompt.
    """

    name = "prefix-caching"
    title = "automatic prefix caching"
    axis = Axis.REUSE
    harm = Harm.LOSSLESS
    saves = (Saves.PREFILL, Saves.CAPACITY)
    acts = "prefill"
    serving = (
        REFERENCE,
        Serving("vllm", "--enable-prefix-caching (default on), cache_salt in a request", "0.32"),
    )
    paper = Paper("vLLM: automatic prefix caching", "vllm-project/vllm", 2024)
    summary = (
        "Reuses the blocks of prompts that start alike, which saves their prefill; costs a hash a "
        "block and the memory of blocks that nobody asks for again."
    )

    block_tokens: int = Field(default=16, ge=1)
    capacity_blocks: int | None = Field(default=None, ge=1)
    salt: str = ""
    lora: str = ""

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """Nothing is stored in another way."""
        return "plain"

    def root(self, model_hash: str, policy: str) -> bytes:
        """Return what stands for the parent of the first block: 32 bytes.

        `policy` identifies the methods that change what is stored; empty for the full cache.
        """
        extra = {"salt": self.salt, "lora": self.lora, "model": model_hash, "policy": policy}
        return hashlib.sha256(json.dumps(extra, sort_keys=True).encode()).digest()

    def keys(self, tokens: Sequence[int], root: bytes) -> list[bytes]:
        """Return the key of each full block: SHA-256 over parent and tokens (4 bytes each, LE)."""
        found, parent = [], root
        size = self.block_tokens
        for start in range(0, len(tokens) - size + 1, size):
            own = b"".join(t.to_bytes(TOKEN_BYTES, "little") for t in tokens[start : start + size])
            parent = hashlib.sha256(parent + own).digest()
            found.append(parent)
        return found

    def most_blocks(self, prompt_tokens: int) -> int:
        """Blocks of a prompt that may be taken from the cache, so that a token is left."""
        return max(prompt_tokens - 1, 0) // self.block_tokens


class BlockMap(Generic[Content]):
    """Blocks by key, at most `capacity_blocks`; the least recently used ones go to `evicted`."""

    def __init__(
        self,
        capacity_blocks: int | None = None,
        evicted: Callable[[bytes, Content], None] | None = None,
    ) -> None:
        self.capacity_blocks = capacity_blocks
        self._evicted = evicted
        self._blocks: OrderedDict[bytes, Content] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def blocks(self) -> Mapping[bytes, Content]:
        """All blocks, the next one to go first."""
        return self._blocks

    def match(self, keys: Sequence[bytes]) -> list[Content]:
        """Return the blocks of the longest prefix that is there, and note that they were used."""
        count = next((n for n, key in enumerate(keys) if key not in self._blocks), len(keys))
        found = [self._blocks[key] for key in keys[:count]]
        # A block is useless without those before it: they are to stay longer.
        for key in reversed(keys[:count]):
            self._blocks.move_to_end(key)
        return found

    def add(self, new: Mapping[bytes, Content]) -> None:
        """Put in the blocks of one sequence, in their order; those that are there are left alone.

        Of a sequence longer than the capacity the first blocks stay.
        """
        for key, content in reversed(list(new.items())):
            self._blocks.setdefault(key, content)
            self._blocks.move_to_end(key)
        while self.capacity_blocks is not None and len(self._blocks) > self.capacity_blocks:
            key, content = self._blocks.popitem(last=False)
            if self._evicted is not None:
                self._evicted(key, content)
