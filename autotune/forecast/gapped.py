"""The scheduler of an engine whose sequences free pages in their middle while they run."""

from __future__ import annotations

from abc import abstractmethod

from kvtune.engines.simulated import scheduler as engine


class GappedScheduler(engine.Scheduler):
    """Frees a sequence's gap before each of its steps, as kvtune's plugin for vLLM does.

    Which pages of the gap are gone is not told apart: they are its first ones.
    """

    @abstractmethod
    def _gap(self, sequence: engine.Sequence) -> tuple[int, int]:
        """The pages [first, end) that a sequence does without, as it stands now."""

    @abstractmethod
    def _exact_tokens(self, sequence: engine.Sequence) -> int:
        """How many first tokens of a sequence were computed with all before them.

        Others may use the blocks of these.
        """

    @abstractmethod
    def _most_blocks(self, sequence: engine.Sequence) -> int | None:
        """The most blocks that a sequence is admitted by; None: as many as its tokens fill."""

    def _grow(self, sequence: engine.Sequence, tokens: int) -> bool:
        self._let_go(sequence)
        wanted = sequence.computed_tokens + tokens
        if self._missing(sequence, wanted) > self._pool.free:
            return False
        self._take(sequence, wanted)
        return True

    def _start(self, sequence: engine.Sequence, hits: list[int], tokens: int) -> bool:
        reserved = sequence.known_tokens if self._limits.reserve_full_prompt else tokens
        needed = self._blocks_for(max(tokens, reserved))
        if (most := self._most_blocks(sequence)) is not None:
            needed = min(needed, most)
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
        exact = min(tokens, self._exact_tokens(sequence)) // self._block_tokens
        for index in range(sequence.remembered_blocks, exact):
            self._pool.remember(sequence.blocks[index], sequence.hash_of_block(index))
            sequence.remembered_blocks = index + 1

    def _missing(self, sequence: engine.Sequence, tokens: int) -> int:
        """Blocks that a sequence needs to hold so many tokens without what it let go."""
        first, end = self._gap(sequence)
        return self._blocks_for(tokens) - (end - first) - len(sequence.blocks)

    def _let_go(self, sequence: engine.Sequence) -> None:
        """Free the blocks that the next step does without."""
        first, end = self._gap(sequence)
        excess = len(sequence.blocks) + (end - first) - self._blocks_for(sequence.computed_tokens)
        if excess > 0:
            self._pool.release(sequence.blocks[first : first + excess])
            del sequence.blocks[first : first + excess]
