"""What a probe of decode steps sends: few sequences and many, short contexts and long ones.

Batches vary at a fixed context and contexts at a fixed batch, so that what a sequence costs can be
told from what a resident token costs. All of it stays within the model's context, the sequence
slots and the KV pool, so that nothing is preempted, and within a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvtune.types import EffectiveConfig

BATCHES = (1, 2, 4, 8, 16, 32)
SHORT_TOKENS = 64
OUTPUT_TOKENS = 24
LONG_BATCH = 4
LONGEST_TOKENS = 8192
SMALLEST_LONG_TOKENS = 4 * SHORT_TOKENS
MAX_ROUNDS = 4

POOL_SHARE = 0.8
"""Share of the KV pool that a cell may fill."""

FIRST_ROUND_SHARE = 0.6
"""Share of the time for the first round, in which all prompts are computed; later ones find them in
the prefix cache and show what the machine's noise is."""

PILOT = ((256, 8), (256, 8))
"""Prompt and answer of the two requests that find out how fast the server is; the first one takes
what a server does once."""

UNKNOWN_CONTEXT_TOKENS = 2048
UNKNOWN_POOL_TOKENS = 8192
UNKNOWN_BLOCK_TOKENS = 128

BATCH_SLOWDOWN = 8
"""Sequences that double the time of a step: a guess, for plans only."""


class ProbeCell(NamedTuple):
    """Sequences that decode together, each after a prompt of this length."""

    sequences: int
    input_tokens: int


class Speed(NamedTuple):
    """How fast a server was with one request."""

    prefill_tokens_per_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """Cells of one round, and how many rounds at most; `problem` says why there are none.

    `notes` say what had to be assumed.
    """

    cells: tuple[ProbeCell, ...]
    rounds: int
    budget_s: float
    notes: tuple[str, ...] = ()
    problem: str = ""
    output_tokens: int = OUTPUT_TOKENS

    @property
    def requests(self) -> int:
        """The most requests that are sent, the pilot's included."""
        return self.rounds * sum(cell.sequences for cell in self.cells) + len(PILOT)

    @property
    def input_tokens(self) -> int:
        """The most prompt tokens that are sent; a prefix cache spares the server most of them."""
        cells = sum(cell.sequences * cell.input_tokens for cell in self.cells)
        return self.rounds * cells + sum(inputs for inputs, _ in PILOT)

    @property
    def generated_tokens(self) -> int:
        """The most tokens that are generated."""
        cells = sum(cell.sequences * self.output_tokens for cell in self.cells)
        return self.rounds * cells + sum(outputs for _, outputs in PILOT)

    def cost(self) -> str:
        """The cost in words, for whoever pays it."""
        return (
            f"at most {self.budget_s:g} s, {self.requests} requests, {self.input_tokens:,} prompt "
            f"tokens (most of them cached prefixes after the first round), "
            f"{self.generated_tokens:,} generated tokens"
        )


def plan_probe(
    effective: EffectiveConfig | None, *, budget_s: float, speed: Speed | None = None
) -> ProbePlan:
    """Plan a probe of a server that runs with `effective` and is otherwise idle.

    Without `speed` this is the most that may be sent; with it, what fits into `budget_s`.
    """
    effective = effective or EffectiveConfig()
    notes = []
    context_tokens = effective.max_model_len_tokens
    if context_tokens is None:
        context_tokens = UNKNOWN_CONTEXT_TOKENS
        notes.append(f"the model's context is not known: {context_tokens} tokens are assumed")
    pool_tokens = effective.kv_cache_size_tokens
    if pool_tokens is None:
        pool_tokens = UNKNOWN_POOL_TOKENS
        notes.append(f"the size of the KV pool is not known: {pool_tokens} tokens are assumed")
    block_tokens = effective.block_size_tokens or UNKNOWN_BLOCK_TOKENS
    pool_blocks = int(POOL_SHARE * pool_tokens) // block_tokens
    short_blocks = -(-(SHORT_TOKENS + OUTPUT_TOKENS) // block_tokens)
    limits = (effective.max_num_seqs, effective.max_num_active_seqs, pool_blocks // short_blocks)
    slots = min(limit for limit in limits if limit is not None)
    batches = [batch for batch in BATCHES if batch <= slots]
    problem = ""
    if len(batches) < 2:
        problem = f"only {slots} sequences fit at once, so that batches cannot vary"
        return ProbePlan((), 0, budget_s, tuple(notes), problem)
    long_batch = min(LONG_BATCH, batches[-1])
    held_tokens = pool_blocks // long_batch * block_tokens
    longest = min(LONGEST_TOKENS, held_tokens - OUTPUT_TOKENS, context_tokens - OUTPUT_TOKENS)
    if longest < SMALLEST_LONG_TOKENS:
        problem = (
            f"{long_batch} sequences have room for {max(0, longest)} tokens of context each, so "
            f"that contexts cannot vary: {SMALLEST_LONG_TOKENS} are needed"
        )
        return ProbePlan((), 0, budget_s, tuple(notes), problem)
    cells = _cells(batches, long_batch, longest)
    rounds = MAX_ROUNDS
    if speed is not None:
        cells = _fitted(batches, long_batch, longest, budget_s, speed)
        rest_s = budget_s - _round_s(cells, speed)
        rounds = 1 + max(0, min(MAX_ROUNDS - 1, int(rest_s / _round_s(cells, speed, cached=True))))
    return ProbePlan(cells, rounds, budget_s, tuple(notes))


def _cells(batches: list[int], long_batch: int, longest: int) -> tuple[ProbeCell, ...]:
    contexts = sorted({longest // 4, longest // 2, longest} - {SHORT_TOKENS})
    return (
        *(ProbeCell(batch, SHORT_TOKENS) for batch in batches),
        *(ProbeCell(long_batch, context) for context in contexts),
        ProbeCell(1, longest),
    )


def _fitted(
    batches: list[int], long_batch: int, longest: int, budget_s: float, speed: Speed
) -> tuple[ProbeCell, ...]:
    """The widest and longest cells whose first round fits; the smallest ones if none does."""
    while True:
        cells = _cells(batches, long_batch, longest)
        if _round_s(cells, speed) <= FIRST_ROUND_SHARE * budget_s:
            return cells
        long_s = long_batch * longest / speed.prefill_tokens_per_s
        can_shorten = longest // 2 >= SMALLEST_LONG_TOKENS
        can_narrow = batches[-1] > long_batch
        if can_shorten and (not can_narrow or long_s > _decode_s(batches[-1], speed)):
            longest //= 2
        elif can_narrow:
            batches = batches[:-1]
        else:
            return cells


def _round_s(cells: tuple[ProbeCell, ...], speed: Speed, *, cached: bool = False) -> float:
    """Seconds that a round takes, or one whose prompts are `cached`."""
    decode_s = sum(_decode_s(cell.sequences, speed) for cell in cells)
    if cached:
        return decode_s
    longest: dict[int, int] = {}
    for cell in cells:
        for sequence in range(cell.sequences):
            longest[sequence] = max(longest.get(sequence, 0), cell.input_tokens)
    return decode_s + sum(longest.values()) / speed.prefill_tokens_per_s


def _decode_s(sequences: int, speed: Speed) -> float:
    return OUTPUT_TOKENS * speed.step_s * (1 + sequences / BATCH_SLOWDOWN)
