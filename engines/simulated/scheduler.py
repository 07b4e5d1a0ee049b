"""Which sequences compute how many tokens in the next step, with blocks for all of them.

The rules are those of vLLM's V1 scheduler: running sequences first and in order, each up to its
missing tokens; when blocks run out the last one that runs loses all of its blocks and starts over;
waiting sequences are admitted in order while there are tokens, slots and blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvtune.engines.simulated.blocks import BlockPool


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine. Times are on the engine's clock.

    `hashes` are those of the prompt's full blocks and grow with the output, which is unlike any
    other. `known_tokens` are prompt and output so far; `computed_tokens` of them have their KV.
    `gap_s` is the time between its last two tokens, `None` after the first.
    """

    number: int
    prompt_tokens: int
    output_tokens: int
    hashes: list[int]
    arrived_s: float = 0.0
    known_tokens: int = 0
    computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    remembered_blocks: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    gap_s: float | None = None
    done: bool = False

    def __post_init__(self) -> None:
        self.known_tokens = self.prompt_tokens

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far."""
        return self.known_tokens - self.prompt_tokens

    def hash_of_block(self, index: int) -> int:
        """The hash of a full block; of output blocks, one that no other sequence has."""
        while index >= len(self.hashes):
            parent = self.hashes[-1] if self.hashes else 0
            self.hashes.append(hash((parent, self.number, len(self.hashes))))
        return self.hashes[index]


def is_decode(sequence: Sequence, tokens: int) -> bool:
    """Whether `tokens` more of a sequence are its next output token, and not a part of a prompt."""
    return tokens == 1 and sequence.computed_tokens >= sequence.prompt_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may do. `long_prefill_tokens` of 0 is no cap on a prompt's chunk."""

    token_budget: int
    max_active: int
    long_prefill_tokens: int = 0
    long_prefill_adaptive: bool = False
    chunked_prefill: bool = True
    reserve_full_prompt: bool = True
    watermark_ratio: float = 0.0
    prefix_caching: bool = True


@dataclass(slots=True)
class Step:
    """Work of one step: each sequence with the tokens it computes, and who was thrown out."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return sum(tokens for _, tokens in self.chunks)

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV is read, a shared one once for each that reads it."""
        return sum(sequence.computed_tokens + tokens for sequence, tokens in self.chunks)


class Scheduler:
    """The queue of waiting sequences, those that run, and counters over the engine's life."""

    def __init__(self, pool: BlockPool, block_tokens: int, limits: Limits) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self.set_limits(limits)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0

    def set_limits(self, limits: Limits) -> None:
        """Go by other limits from the next step on."""
        self._limits = limits
        self._watermark_blocks = int(limits.watermark_ratio * self._pool.total)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that nobody waits for any more, in whatever state it is."""
        if sequence.done:
            return
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._end(sequence)

    def schedule(self, now_s: float = 0.0) -> Step:
        """Plan the step that starts at `now_s`, and take the blocks for it."""
        step = Step()
        left = self._limits.token_budget
        cap = self._chunk_cap()
        index = 0
        while index < len(self.running) and left > 0:
            sequence = self.running[index]
            tokens = min(sequence.known_tokens - sequence.computed_tokens, cap, left)
            while not self._grow(sequence, tokens):
                victim = self.running.pop()
                self._preempt(victim)
                step.preempted.append(victim)
                if victim is sequence:
                    break
            if step.preempted and step.preempted[-1] is sequence:
                break
            step.chunks.append((sequence, tokens))
            left -= tokens
            index += 1
        if not step.preempted:
            self._admit(step, left, cap, now_s)
        return step

    def complete(self, step: Step, now_s: float) -> list[Sequence]:
        """Book the results of a step that ended at `now_s`; return the sequences with a new token.

        A sequence that has all of its output is `done` and gives its blocks back.
        """
        served = []
        for sequence, tokens in step.chunks:
            if sequence.done:
                continue
            sequence.computed_tokens += tokens
            if sequence.computed_tokens < sequence.known_tokens:
                continue
            sequence.known_tokens += 1
            if sequence.last_token_s is None:
                sequence.first_token_s = now_s
            else:
                sequence.gap_s = now_s - sequence.last_token_s
            sequence.last_token_s = now_s
            served.append(sequence)
            if sequence.generated_tokens >= sequence.output_tokens:
                self.running.remove(sequence)
                self._end(sequence)
        return served

    def _chunk_cap(self) -> int:
        """The most tokens one sequence may compute: a lone one has nobody to hold up."""
        sequences = len(self.running) + len(self.waiting)
        cap = self._limits.long_prefill_tokens if sequences > 1 else 0
        if cap and self._limits.long_prefill_adaptive:
            cap = max(cap, self._limits.token_budget // sequences)
        return cap or self._limits.token_budget

    def _admit(self, step: Step, left: int, cap: int, now_s: float) -> None:
        while self.waiting and left > 0 and len(self.running) < self._limits.max_active:
            sequence = self.waiting[0]
            hits = self._hits(sequence)
            hit_tokens = len(hits) * self._block_tokens
            wanted = min(sequence.known_tokens - hit_tokens, cap)
            if wanted > left and not self._limits.chunked_prefill:
                return
            tokens = min(wanted, left)
            if not self._start(sequence, hits, hit_tokens + tokens):
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.computed_tokens = hit_tokens
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now_s
            self._count_hits(sequence, hit_tokens)
            step.chunks.append((sequence, tokens))
            left -= tokens

    def _hits(self, sequence: Sequence) -> list[int]:
        """Blocks of the cache to start from; at least one token is always left to compute."""
        if not self._limits.prefix_caching:
            return []
        full_blocks = (sequence.known_tokens - 1) // self._block_tokens
        return self._pool.find(sequence.hashes[:full_blocks])

    def _count_hits(self, sequence: Sequence, hit_tokens: int) -> None:
        if sequence.preemptions or not self._limits.prefix_caching:
            return
        sequence.cached_tokens = hit_tokens
        self.prefix_queries_tokens += sequence.known_tokens
        self.prefix_hits_tokens += hit_tokens

    def _start(self, sequence: Sequence, hits: list[int], tokens: int) -> bool:
        """Give a waiting sequence its cached blocks and room for its first `tokens` tokens."""
        reserved = sequence.known_tokens if self._limits.reserve_full_prompt else tokens
        needed = self._blocks_for(max(tokens, reserved)) - len(hits) + self._pool.idle(hits)
        if self.running:
            needed += self._watermark_blocks
        if needed > self._pool.free:
            return False
        self._pool.hold(hits)
        sequence.blocks = list(hits)
        sequence.remembered_blocks = len(hits)
        self._take(sequence, tokens)
        return True

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give a running sequence room for `tokens` more, if there is any."""
        wanted = sequence.computed_tokens + tokens
        if self._blocks_for(wanted) - len(sequence.blocks) > self._pool.free:
            return False
        self._take(sequence, wanted)
        return True

    def _take(self, sequence: Sequence, tokens: int) -> None:
        missing = self._blocks_for(tokens) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self._pool.take(missing)
        # Known to others at once, as in vLLM: whoever is planned later in a step computes later.
        if self._limits.prefix_caching:
            for index in range(sequence.remembered_blocks, tokens // self._block_tokens):
                self._pool.remember(sequence.blocks[index], sequence.hash_of_block(index))
                sequence.remembered_blocks = index + 1

    def _preempt(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed_tokens = sequence.remembered_blocks = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.done = True
        self._pool.release(sequence.blocks)
        sequence.blocks = []

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)
