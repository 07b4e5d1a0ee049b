"""What a server's prefix cache serves of what it could: read from counters, traps included.

Lookups are counted in tokens. Some versions of vLLM count a request again when it is looked up
again, because it waited for blocks or was preempted; the tokens it finds then are its own and no
reuse (vllm issue 25780). A cache with blocks larger than the shared prefixes serves nothing,
whatever its size (vllm issue 54607).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvtune.profilers.window import CACHED, GENERATED, HITS, PROMPTS, QUERIES, Window

IDLE = "vllm:kv_block_idle_before_evict_seconds"
REUSE_GAP = "vllm:kv_block_reuse_gap_seconds"

GROWTHS_LEAST = 4
"""Fewer readings with new lookups in a half of the window compare single requests."""


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """Shares of prompt tokens, and what happened to the blocks that hold them; `None` is unknown.

    `hits` were served from the cache; unknown where lookups were repeated and only they tell of
    hits. `lookups_per_prompt` are tokens looked up a prompt token. `reusable` is what an unbounded
    cache with the engine's blocks would have served of this workload, less a block a prompt;
    `missed` is by how much hits fall short of it, `beyond` by how much they exceed all that can be
    reuse, and `below_blocks` what only smaller blocks could serve. `turnover` is how often the
    tokens stored in the window fill the cache. `fall` is by how much hits fell from the first half
    of the lookups to the second. `idle_per_gap` compares how long blocks lay idle before they were
    evicted with the time between two uses of a block.
    """

    hits: float | None
    lookups_per_prompt: float | None
    reusable: float | None
    missed: float | None
    beyond: float | None
    below_blocks: float | None
    turnover: float | None
    fall: float | None
    idle_per_gap: float | None

    @property
    def avoidable(self) -> float | None:
        """Of the prompt tokens that were computed, the share that a larger cache would spare."""
        if self.missed is None or self.hits is None or self.hits >= 1:
            return None
        return self.missed / (1 - self.hits)


def prefix_use(window: Window) -> PrefixUse:
    """Read a window's prefix counters."""
    hits = window.prefix_hits
    most = _reusable_share(window)
    reusable = _reusable_again(window, most)
    is_on = window.effective is None or window.effective.enable_prefix_caching is not False
    return PrefixUse(
        hits=hits,
        lookups_per_prompt=window.lookups_per_prompt,
        reusable=reusable,
        missed=None if hits is None or reusable is None or not is_on else max(0.0, reusable - hits),
        beyond=None if hits is None or most is None else max(0.0, hits - most),
        below_blocks=_below_blocks(window),
        turnover=_turnover(window),
        fall=_fall(window),
        idle_per_gap=_idle_per_gap(window),
    )


def _reusable_share(window: Window) -> float | None:
    """A block size that is a multiple of the engine's serves no more than the engine's could."""
    block_tokens = window.effective.block_size_tokens if window.effective is not None else None
    fitting = [
        share
        for size_tokens, share in window.reusable_prefix_share.items()
        if block_tokens and size_tokens % block_tokens == 0
    ]
    return max(fitting, default=None)


def _reusable_again(window: Window, share: float | None) -> float | None:
    """Less one block a prompt: of a prompt that came before, the last block is computed again."""
    block_tokens = window.effective.block_size_tokens if window.effective is not None else None
    prompt_tokens = window.prompt_tokens_per_request
    if share is None or not block_tokens or not prompt_tokens:
        return None
    return max(0.0, share - block_tokens / prompt_tokens)


def _below_blocks(window: Window) -> float | None:
    """What the smallest known block size could serve beyond the largest that the engine's covers.

    A lower bound: larger blocks serve no more.
    """
    block_tokens = window.effective.block_size_tokens if window.effective is not None else None
    known = window.reusable_prefix_share
    within = [size_tokens for size_tokens in known if size_tokens <= (block_tokens or 0)]
    return max(0.0, known[min(known)] - known[max(within)]) if within else None


def _turnover(window: Window) -> float | None:
    size = window.effective.kv_cache_size_tokens if window.effective is not None else None
    computed, generated = window.computed_prompt_tokens, window.counters.get(GENERATED)
    if not size or computed is None or generated is None:
        return None
    return (computed + generated) / (size * window.engines)


def _fall(window: Window) -> float | None:
    for asked, served in ((PROMPTS, CACHED), (QUERIES, HITS)):
        queries = [value for _, value in window.gauges.get(asked, ())]
        hits = [value for _, value in window.gauges.get(served, ())]
        if len(queries) == len(hits) and (fall := _fall_between(queries, hits)) is not None:
            return fall
    return None


def _fall_between(queries: Sequence[float], hits: Sequence[float]) -> float | None:
    """How much lower the share of hits is in the second half of the lookups."""
    if not queries or any(now < before for before, now in pairwise(queries)):
        return None
    halfway = (queries[0] + queries[-1]) / 2
    middle = next(index for index, value in enumerate(queries) if value >= halfway)
    halves = []
    for start, end in ((0, middle), (middle, len(queries) - 1)):
        growths = sum(now > before for before, now in pairwise(queries[start : end + 1]))
        if growths < GROWTHS_LEAST:
            return None
        halves.append((hits[end] - hits[start]) / (queries[end] - queries[start]))
    return halves[0] - halves[1]


def _idle_per_gap(window: Window) -> float | None:
    idle_s, gap_s = (_mean(window, name) for name in (IDLE, REUSE_GAP))
    return idle_s / gap_s if idle_s is not None and gap_s else None


def _mean(window: Window, histogram: str) -> float | None:
    total, count = (window.counters.get(f"{histogram}_{part}") for part in ("sum", "count"))
    return total / count if total is not None and count else None
