"""How long a beginning prompts have in common: a system prompt, or the same few examples.

What turns of one conversation share, or what is sent twice, is common to few of all prompts and
does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

SAMPLED_PROMPTS = 1000
"""So many prompts are looked at: enough to tell what half of all do."""

LONGEST_BLOCKS = 256
"""So many blocks of each."""

COMMON_SHARE = 0.1
"""A beginning is common from this share of prompts on, and from two: a load may have a few of them,
one for each of its tasks."""


class CommonPrefix:
    """The longest beginning that half of the prompts have in common with others.

    A prompt comes as the keys of its blocks, each of which names all that precedes it too, and
    where these end, in tokens.
    """

    def __init__(self) -> None:
        self._prompts = 0
        self._begun: Counter[tuple[int, int]] = Counter()

    def add(self, keys: Sequence[int], ends: Sequence[int]) -> None:
        """Add a prompt; those beyond `SAMPLED_PROMPTS` are not looked at."""
        if self._prompts < SAMPLED_PROMPTS:
            self._prompts += 1
            self._begun.update(zip(keys[:LONGEST_BLOCKS], ends[:LONGEST_BLOCKS], strict=True))

    @property
    def tokens(self) -> int | None:
        """Its length in whole blocks; 0 without any, None of no prompts."""
        if not self._prompts:
            return None
        least = max(2, ceil(self._prompts * COMMON_SHARE))
        prompts: Counter[int] = Counter()
        for (_, end), count in self._begun.items():
            if count >= least:
                prompts[end] += count
        return max((end for end, count in prompts.items() if 2 * count >= self._prompts), default=0)
