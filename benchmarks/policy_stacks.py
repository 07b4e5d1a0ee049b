"""The stacks that the method benchmarks run: each method at several strengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A stack, under the name of the method that it is about."""

    method: str
    stack: str


FULL = Entry("full cache", "full")
STACKS: tuple[Entry, ...] = ()
