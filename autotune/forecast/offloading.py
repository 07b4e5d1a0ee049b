"""The scheduler of an engine that copies blocks of prompts to a second, larger and slower tier.

As vLLM's native offloading does: full blocks of a prompt are copied when they are computed, and
the least recently used one gives way. A prompt that begins alike, or one that was preempted, loads
them in the place of computing them.
"""

from __future__ import annotations

from collections import OrderedDict

from kvtune.engines.simulated import scheduler as engine
from kvtune.engines.simulated.blocks import BlockPool


class OffloadingScheduler(engine.Scheduler):
    """`loaded_tokens` counts what came back from `tier_blocks` blocks; stores cost nothing."""

    def __init__(
        self, pool: BlockPool, block_tokens: int, limits: engine.Limits, tier_blocks: int
    ) -> None:
        super().__init__(pool, block_tokens, limits)
        self._tier_blocks = tier_blocks
        self._tier: OrderedDict[int, None] = OrderedDict()
        self.loaded_tokens = 0

    def _hits(self, sequence: engine.Sequence) -> list[int]:
        """Blocks of the cache, those that are loaded now included, if the sequence may start."""
        hits = super()._hits(sequence)
        if not self._limits.prefix_caching or self._blocks_for(sequence.known_tokens) > (
            self._pool.free
        ):
            return hits
        full_blocks = (sequence.known_tokens - 1) // self._block_tokens
        missing = sequence.hashes[len(hits) : full_blocks]
        if not missing or missing[0] not in self._tier:
            return hits
        # Held while others are loaded, so that these do not take their place.
        self._pool.hold(hits)
        loaded = []
        for value in missing:
            if value not in self._tier:
                break
            self._tier.move_to_end(value)
            (block,) = self._pool.take(1)
            self._pool.remember(block, value)
            loaded.append(block)
        self._pool.release([*hits, *loaded])
        self.loaded_tokens += len(loaded) * self._block_tokens
        return super()._hits(sequence)

    def _take(self, sequence: engine.Sequence, tokens: int) -> None:
        first = sequence.remembered_blocks
        super()._take(sequence, tokens)
        last = min(sequence.remembered_blocks, sequence.prompt_tokens // self._block_tokens)
        for index in range(first, last):
            self._tier[sequence.hash_of_block(index)] = None
            self._tier.move_to_end(sequence.hash_of_block(index))
        while len(self._tier) > self._tier_blocks:
            self._tier.popitem(last=False)
