"""What the engine process and the worker tell each other about evictions. Plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Ask:
    """Let the row's queries within the window of its prompt score the prompt's keys.

    `ticket` is the request's number, which is never used again as names of requests are. `begins`:
    the row has all of the window that there was so far. `ends`: it has the rest.
    """

    ticket: int
    prompt_tokens: int
    begins: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class Eviction:
    """Tokens from place `first_token` on do not see the pages of `mask`; bit p is page p.

    All of these pages are full, and before `first_token`.
    """

    first_token: int
    mask: int

    @property
    def pages(self) -> int:
        """How many pages are gone."""
        return self.mask.bit_count()

    def runs(self) -> list[tuple[int, int]]:
        """Neighbouring pages that are gone, as [first, end)."""
        runs, mask, start = [], self.mask, 0
        while mask:
            gap = (mask & -mask).bit_length() - 1
            mask >>= gap
            length = (~mask & (mask + 1)).bit_length() - 1
            runs.append((start + gap, start + gap + length))
            mask >>= length
            start += gap + length
        return runs


def mask_of(pages: Iterable[int]) -> int:
    """The pages as bits of a number."""
    return sum(1 << page for page in pages)


@dataclass(frozen=True, slots=True)
class Orders:
    """What a step's rows, named by their tails, have to do and to leave out."""

    asks: dict[int, Ask] = field(default_factory=dict)
    evictions: dict[int, Eviction] = field(default_factory=dict)
    over: tuple[int, ...] = ()
    """Tickets of which nothing has to be remembered any more."""
