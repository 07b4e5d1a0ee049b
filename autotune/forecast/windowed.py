"""The scheduler of an engine whose sequences keep their first and latest tokens (StreamingLLM)."""

from __future__ import annotations

from kvtune.engines.simulated import scheduler as engine
from kvtune.engines.simulated.blocks import BlockPool
from kvtune.policies.sink_window import SinkWindow


class WindowedScheduler(engine.Scheduler):
    """Frees the pages between before each step of a sequence, as kvtune's plugin for vLLM does.

    A prompt is admitted by the most pages that it holds at a time. Others may use the blocks of a
    sequence's first tokens, up to those that were computed with something missing.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        limits: engine.Limits,
        sink_window: SinkWindow,
        in_flight_tokens: int,
    ) -> None:
        super().__init__(pool, block_tokens, limits)
        self._kept = sink_window
        self._most_blocks = sink_window.blocks_per_request(in_flight_tokens)

    def _grow(self, sequence: engine.Sequence, tokens: int) -> bool:
        self._let_go(sequence)
        wanted = sequence.computed_tokens + tokens
        if self._missing(sequence, wanted) > self._pool.free:
            return False
        self._take(sequence, wanted)
        return True

    def _start(self, sequence: engine.Sequence, hits: list[int], tokens: int) -> bool:
        reserved = sequence.known_tokens if self._limits.reserve_full_prompt else tokens
        needed = min(self._blocks_for(max(tokens, reserved)), self._most_blocks)
        needed += self._pool.idle(hits) - len(hits)
        if self.running:
            needed += self._watermark_blocks
        if needed > self._pool.free:
            return False
        self._pool.hold(hits)
        sequence.blocks = list(hits)
        sequence.remembered_blocks = len(hits)
        sequence.computed_tokens = len(hits) * self._block_tokens
        self._let_go(sequence)
        self._take(sequence, tokens)
        return True

    def _take(self, sequence: engine.Sequence, tokens: int) -> None:
        sequence.blocks += self._pool.take(max(self._missing(sequence, tokens), 0))
        if not self._limits.prefix_caching:
            return
        exact = min(tokens, self._kept.exact_tokens) // self._block_tokens
        for index in range(sequence.remembered_blocks, exact):
            self._pool.remember(sequence.blocks[index], sequence.hash_of_block(index))
            sequence.remembered_blocks = index + 1

    def _missing(self, sequence: engine.Sequence, tokens: int) -> int:
        """Blocks that a sequence needs to hold so many tokens without what it let go."""
        first, end = self._kept.dropped_blocks(sequence.computed_tokens)
        return self._blocks_for(tokens) - (end - first) - len(sequence.blocks)

    def _let_go(self, sequence: engine.Sequence) -> None:
        """Free the blocks that the next step does without."""
        first, end = self._kept.dropped_blocks(sequence.computed_tokens)
        excess = len(sequence.blocks) + (end - first) - self._blocks_for(sequence.computed_tokens)
        if excess > 0:
            self._pool.release(sequence.blocks[first : first + excess])
            del sequence.blocks[first : first + excess]
