"""The scheduler of an engine whose sequences drop tokens: all of a prompt first, then a part."""

from __future__ import annotations

import math

from kvtune.engines.simulated import scheduler as engine
from kvtune.engines.simulated.blocks import BlockPool


class EvictingScheduler(engine.Scheduler):
    """A sequence holds every token until its prompt is computed, and `kept_ratio` of them after.

    A prompt that is computed again after a preemption takes its full size again.
    """

    def __init__(
        self, pool: BlockPool, block_tokens: int, limits: engine.Limits, kept_ratio: float
    ) -> None:
        super().__init__(pool, block_tokens, limits)
        self._kept_ratio = kept_ratio

    def complete(self, step: engine.Step, now_s: float) -> list[engine.Sequence]:
        """As for any engine, and let go of what a computed prompt does not keep."""
        served = super().complete(step, now_s)
        for sequence in served:
            if not sequence.done:
                kept = self._kept_blocks(sequence.computed_tokens)
                self._pool.release(sequence.blocks[kept:])
                del sequence.blocks[kept:]
        return served

    def _grow(self, sequence: engine.Sequence, tokens: int) -> bool:
        if not engine.is_decode(sequence, tokens):
            return super()._grow(sequence, tokens)
        missing = self._kept_blocks(sequence.computed_tokens + tokens) - len(sequence.blocks)
        if missing > self._pool.free:
            return False
        sequence.blocks += self._pool.take(max(missing, 0))
        return True

    def _kept_blocks(self, tokens: int) -> int:
        return self._blocks_for(math.ceil(tokens * self._kept_ratio))
