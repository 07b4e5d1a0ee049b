"""How much of a stream of prompts an unbounded prefix cache would serve, in bounded memory.

A prompt is a chain of blocks: the key of a block hashes everything before it too, so two prompts
have equal keys exactly as far as their tokens are equal. If the longest prefix that a prompt shares
with any earlier prompt is c tokens long, a cache with blocks of b tokens serves floor(c / b) * b of
them: the earlier prompt has those blocks in full. So one chain serves every block size.

Up to a limit all keys are kept, and the result is exact. Then, each time the limit is reached, the
sample is halved: a key stays if its next hash bit is 0, and what is found with it counts double,
which keeps the expected result unchanged. The keys that were found most often always stay, with
the weight that they had: a system prompt that every request shares must not be left to a coin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import gcd

from kvtune.profilers.common_prefix import CommonPrefix

TRACKED_BLOCKS = 1_000_000
_SAMPLE_BITS_FROM = 20
_HIT = 1 << 6
_HASHED_BLOCKS, _TOKENS = 1, 2


class PrefixReuse:
    """Counts reusable prompt tokens for each of `block_sizes` (tokens).

    Prompts come in order through `add_blocks` or `add_tokens`. `sampled` says whether the result is
    an estimate. A whole prompt that was seen before counts up to its last full block, although a
    server computes its last token again.
    """

    def __init__(self, block_sizes: Sequence[int], tracked_blocks: int = TRACKED_BLOCKS) -> None:
        self._block_sizes = tuple(block_sizes)
        self._limit = tracked_blocks
        self._step = gcd(*block_sizes)
        # Key -> hits * _HIT + level at which the key was sampled: one integer, because there are
        # a million of them.
        self._seen: dict[int, int] = {}
        self._level = 0
        self._reused_tokens = [0] * len(self._block_sizes)
        self._tokens = 0
        self._common = CommonPrefix()

    @property
    def sampled(self) -> bool:
        """Whether there were too many blocks to keep all."""
        return self._level > 0

    @property
    def common_tokens(self) -> int | None:
        """How long a beginning most prompts have in common with others; None if unknown."""
        return self._common.tokens

    def add_blocks(self, blocks: Sequence[int], block_tokens: int, input_tokens: int) -> None:
        """Add a prompt of `input_tokens` that begins with blocks named by hash ids.

        A last block that the prompt does not fill is equal only to one of the same id and the same
        number of tokens. Tokens after the last block are taken to be unlike any others.
        """
        full = min(len(blocks), input_tokens // block_tokens)
        key = hash((_HASHED_BLOCKS, block_tokens))
        keys = []
        for block in blocks[:full]:
            key = hash((key, block))
            keys.append(key)
        ends = list(range(block_tokens, full * block_tokens + 1, block_tokens))
        rest = input_tokens - full * block_tokens
        if len(blocks) > full and rest:
            keys.append(hash((key, blocks[full], rest)))
            ends.append(input_tokens)
        self._add(keys, ends, input_tokens)

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Add a prompt whose tokens are known."""
        step = self._step
        key = hash((_TOKENS, step))
        keys = []
        ends = range(step, len(token_ids) + 1, step)
        for end in ends:
            key = hash((key, *token_ids[end - step : end]))
            keys.append(key)
        self._add(keys, ends, len(token_ids))

    def shares(self) -> dict[int, float]:
        """Share of all prompt tokens that a cache would serve, by block size; empty if unknown."""
        if not self._tokens:
            return {}
        return {
            size: min(1.0, reused / self._tokens)
            for size, reused in zip(self._block_sizes, self._reused_tokens, strict=True)
        }

    def _add(self, keys: Sequence[int], ends: Sequence[int], input_tokens: int) -> None:
        self._tokens += input_tokens
        self._common.add(keys, ends)
        seen = self._seen
        mask = self._mask()
        start = run_start = run_end = run_weight = 0
        for key, end in zip(keys, ends, strict=True):
            state = seen.get(key)
            if state is None:
                if not (key >> _SAMPLE_BITS_FROM) & mask:
                    seen[key] = self._level
            else:
                seen[key] = state + _HIT
                weight = 1 << (state % _HIT)
                if run_end != start or run_weight != weight:
                    self._count(run_start, run_end, run_weight)
                    run_start, run_weight = start, weight
                run_end = end
            start = end
        self._count(run_start, run_end, run_weight)
        while len(seen) > self._limit:
            self._halve()

    def _count(self, start: int, end: int, weight: int) -> None:
        """Count the blocks that are complete at `end` and were not at `start`."""
        if end > start:
            for index, size in enumerate(self._block_sizes):
                self._reused_tokens[index] += weight * (end // size - start // size) * size

    def _mask(self) -> int:
        return (1 << self._level) - 1

    def _halve(self) -> None:
        self._level += 1
        mask = self._mask()
        hot = self._hot_hits() * _HIT
        dropped = []
        for key, state in self._seen.items():
            if state >= hot:
                continue
            if (key >> _SAMPLE_BITS_FROM) & mask:
                dropped.append(key)
            else:
                self._seen[key] = state - state % _HIT + self._level
        for key in dropped:
            del self._seen[key]

    def _hot_hits(self) -> int:
        """The number of hits from which a key always stays: for at most a quarter of the limit."""
        keys_by_hits = Counter(state // _HIT for state in self._seen.values())
        kept = 0
        least = max(keys_by_hits) + 1
        for hits in sorted(keys_by_hits, reverse=True):
            kept += keys_by_hits[hits]
            if kept > self._limit // 4 or hits == 0:
                break
            least = hits
        return least
