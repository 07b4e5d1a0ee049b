"""Pages that are still being written, and so cannot be quantized yet: which lies where.

A worker is told neither which request a row is nor when one ends. What it can tell a page by is its
number: a page that is not full belongs to one request, and a new owner begins at its first token.
So an open page is known by its number, in a slot of full precision beside the cache, until it is
full. What a request that ended left open stays until its number comes again, or until more than
`most` are open, which those of running requests alone cannot be. Then the page that was not touched
for longest is quantized as it is; should its request still run, it goes on from the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moves:
    """What a step does with slots, in this order. All of (slot, page), but `slots` and `fresh`.

    `early`: quantize, and give the slot away. `fresh`: slots to empty. `again`: read codes back.
    Then tokens are written, of each row to one of `slots`. `full`: quantize. `count`: slots in all.
    """

    early: list[tuple[int, int]]
    fresh: list[int]
    again: list[tuple[int, int]]
    slots: list[int]
    full: list[tuple[int, int]]
    count: int


class OpenPages:
    """The open pages of the requests of a worker; `most` of them outlast a step."""

    def __init__(self, most: int) -> None:
        self.most = most
        # In the order in which they were last written to.
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._count = 0
        self._closed: list[int] = []

    def step(self, pages: Sequence[int], begins: Sequence[bool], ends: Sequence[bool]) -> Moves:
        """Plan a step whose rows write to these `pages`, no page twice.

        `begins`: whether a row writes a page's first token; `ends`: whether its last.
        """
        for page in self._closed:
            self._free.append(self._slots.pop(page))
        early = self._crowded_out(pages)
        fresh: list[int] = []
        again: list[tuple[int, int]] = []
        slots: list[int] = []
        for page, is_new in zip(pages, begins, strict=True):
            slot = self._slots.pop(page, None)
            if slot is None:
                slot = self._taken()
                if not is_new:
                    again.append((slot, page))
            if is_new:
                fresh.append(slot)
            self._slots[page] = slot
            slots.append(slot)
        self._closed = [page for page, is_full in zip(pages, ends, strict=True) if is_full]
        full = [(self._slots[page], page) for page in self._closed]
        return Moves(early, fresh, again, slots, full, self._count)

    def _crowded_out(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        touched = set(pages)
        waiting = [page for page in self._slots if page not in touched]
        too_many = waiting[: max(0, len(waiting) - self.most)]
        early = [(self._slots.pop(page), page) for page in too_many]
        self._free += [slot for slot, _ in early]
        return early

    def _taken(self) -> int:
        if self._free:
            return self._free.pop()
        self._count += 1
        return self._count - 1
