"""A scheduler with a pool, driven by hand."""

from __future__ import annotations

import random

from kvtune.engines.simulated.blocks import BlockPool, prefix_hashes
from kvtune.engines.simulated.scheduler import Limits, Scheduler, Sequence

WIDE = Limits(token_budget=2048, max_active=64)


class Bench:
    """A scheduler with a pool, and what a test wants to ask of the two."""

    def __init__(self, blocks: int, block_tokens: int, limits: Limits = WIDE) -> None:
        self.block_tokens = block_tokens
        self.pool = BlockPool(blocks, caching=limits.prefix_caching)
        self.scheduler = Scheduler(self.pool, block_tokens, limits)
        self.sequences: list[Sequence] = []
        self.steps = 0

    def add(self, prompt: list[int], output_tokens: int, salt: str | None = None) -> Sequence:
        sequence = Sequence(
            number=len(self.sequences) + 1,
            prompt_tokens=len(prompt),
            output_tokens=output_tokens,
            hashes=prefix_hashes(prompt, self.block_tokens, salt),
        )
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int]]:
        """Run a step; return each number with the tokens it computed."""
        step = self.scheduler.schedule(float(self.steps))
        self.steps += 1
        self.scheduler.complete(step, float(self.steps))
        return [(sequence.number, tokens) for sequence, tokens in step.chunks]

    def run(self, limit: int = 100_000) -> None:
        while not self.scheduler.is_idle:
            self.step()
            assert self.steps < limit, "a request starves"

    def check_blocks(self) -> None:
        held = {block for sequence in self.sequences for block in sequence.blocks}
        assert 0 not in held
        assert self.pool.used == len(held)
        assert self.pool.free + self.pool.used == self.pool.total - 1


def tokens_of(seed: int, count: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(40_000) for _ in range(count)]
