"""What the engine process and the worker tell each other about evictions. Plain values.

Sets of pages are numbers: bit p is page p of a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Choice:
    """Take `count` of the pages `among`, those of the least worth, once a step is computed."""

    among: int
    count: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Let the row's queries in places [first, past) score what they attend to.

    `ticket` is the request's number, which is never used again as names of requests are.
    """

    ticket: int
    first: int
    past: int
    choice: Choice | None = None


@dataclass(frozen=True, slots=True)
class Eviction:
    """Tokens from place `first_token` on do not see the pages of `mask`.

    All of these pages are full, and before `first_token`.
    """

    first_token: int
    mask: int


def mask_of(pages: Iterable[int]) -> int:
    """The pages as bits of a number."""
    return sum(1 << page for page in pages)


def runs(mask: int) -> list[tuple[int, int]]:
    """Neighbouring pages of `mask`, as [first, end)."""
    found, start = [], 0
    while mask:
        gap = (mask & -mask).bit_length() - 1
        mask >>= gap
        length = (~mask & (mask + 1)).bit_length() - 1
        found.append((start + gap, start + gap + length))
        mask >>= length
        start += gap + length
    return found


@dataclass(frozen=True, slots=True)
class Orders:
    """What a step's rows, named by their tails, have to do and to leave out.

    Of evictions that follow one another, each hides what those before it hide too.
    """

    asks: dict[int, Ask] = field(default_factory=dict)
    evictions: dict[int, tuple[Eviction, ...]] = field(default_factory=dict)
    over: tuple[int, ...] = ()
    """Tickets of which nothing has to be remembered any more."""
