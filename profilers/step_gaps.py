"""What a client's token times say about an engine's decode steps.

Each time that passes between two messages of an answer is about one step of the engine. How many
other answers were under way then, and how long they were, is known from their own token times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.types import RequestRecord

SAME_MESSAGE_S = 1e-4
"""Tokens closer than this came together: they share a message, or one read of the socket."""

PAUSE_STEPS = 10
"""A silence this many times the median is no decode step: the sequence was preempted, or a long
prefill held everybody up."""

JITTER_SHARE = 0.25
"""How far into the next gap a first token may seem to fall, as tokens of one step are sent one
after the other."""

LOAD_BLOCKS = 40
"""Stretches of time into which a run is cut: requests that decode together share their steps, so
only stretches of time are independent of each other."""

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Observations:
    """Decode steps as requests saw them, one row a message; all arrays are (observations,).

    `step_s` is the time since the message before, divided by the tokens that the message brought.
    `sequences` decoded meanwhile and attended to `resident_tokens` together. `is_clear` says that
    no request waited for its first token, so that no prefill can have been part of the step.
    Rows of one `group` share what disturbed them; groups are independent of each other.
    """

    step_s: Floats
    sequences: Counts
    resident_tokens: Floats
    is_clear: Flags
    group: Counts

    def __len__(self) -> int:
        return len(self.step_s)

    def where(self, chosen: Flags) -> Observations:
        """The rows for which `chosen`, (observations,), is true."""
        return Observations(
            self.step_s[chosen],
            self.sequences[chosen],
            self.resident_tokens[chosen],
            self.is_clear[chosen],
            self.group[chosen],
        )


def join(parts: Sequence[Observations]) -> Observations:
    """All rows of `parts`, whose groups stay apart."""
    groups, first = [], 0
    for part in (parts := (_none(), *parts)):
        groups.append(part.group + first)
        first += int(part.group.max(initial=-1)) + 1
    return Observations(
        np.concatenate([part.step_s for part in parts]),
        np.concatenate([part.sequences for part in parts]),
        np.concatenate([part.resident_tokens for part in parts]),
        np.concatenate([part.is_clear for part in parts]),
        np.concatenate(groups),
    )


def _none() -> Observations:
    integers = np.empty(0, np.int64)
    return Observations(np.empty(0), integers, np.empty(0), np.empty(0, np.bool_), integers)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The messages of one answer: when they came, and how many tokens each brought."""

    at_s: Floats
    tokens: Counts
    input_tokens: int | None
    first_token_s: float

    @property
    def step_s(self) -> Floats:
        """Time a token of every message after the first, (messages - 1,)."""
        return np.diff(self.at_s) / self.tokens[1:]

    def runs(self, pause_s: float) -> Iterator[tuple[int, int]]:
        """First and last message of each stretch without a pause."""
        breaks = np.flatnonzero(np.diff(self.at_s) > pause_s)
        yield from zip((0, *(breaks + 1)), (*breaks, len(self.at_s) - 1), strict=True)


def observations(records: Sequence[RequestRecord], *, blocks: int = LOAD_BLOCKS) -> Observations:
    """Every decode step that the requests of one run saw, without those that hold a prefill.

    A prefill shows as the first token of another request, or the first one after a pause. Requests
    that failed count as long as they sent tokens. Steps during which the length of a sequence was
    unknown are left out. `blocks` groups of equal length are made of the run.
    """
    answers = [
        _read(record, record.first_token_s)
        for record in records
        if record.first_token_s is not None
    ]
    steps = [answer.step_s for answer in answers]
    if not any(map(len, steps)):
        return _none()
    pause_s = PAUSE_STEPS * float(np.median(np.concatenate(steps)))
    crowd = _Crowd(records, answers, pause_s)
    before = np.concatenate([answer.at_s[:-1] for answer in answers])
    after = np.concatenate([answer.at_s[1:] for answer in answers])
    own_first = np.repeat([answer.first_token_s for answer in answers], [*map(len, steps)])
    middle = (before + after) / 2
    margin = JITTER_SHARE * (after - before)
    others = crowd.starts_within(before - margin, after + margin) - (own_first > before - margin)
    usable = (after - before <= pause_s) & (others == 0) & (crowd.unknown(middle) == 0)
    start_s, end_s = float(before.min()), float(after.max())
    return Observations(
        step_s=np.concatenate(steps),
        sequences=crowd.sequences(middle),
        resident_tokens=crowd.resident_tokens(middle),
        is_clear=crowd.waiting(middle) == 0,
        group=((middle - start_s) / (end_s - start_s) * blocks).astype(np.int64),
    ).where(usable)


def _read(record: RequestRecord, first_s: float) -> _Answer:
    """Put tokens that came together into messages; `first_s` is when the first one came."""
    at_s = first_s + np.concatenate(([0.0], np.cumsum(record.gaps_s)))
    begins = np.concatenate(([0], 1 + np.flatnonzero(np.asarray(record.gaps_s) > SAME_MESSAGE_S)))
    tokens = np.diff(np.append(begins, len(at_s)))
    return _Answer(at_s[begins], tokens, record.input_tokens, first_s)


class _Crowd:
    """Who was in the server at a moment. A question takes and gives arrays of one shape."""

    def __init__(
        self, records: Sequence[RequestRecord], answers: Sequence[_Answer], pause_s: float
    ) -> None:
        starts: list[tuple[float, int, bool]] = []
        ends: list[tuple[float, int, bool]] = []
        grown_s: list[Floats] = []
        grown: list[Counts] = []
        for answer in answers:
            is_unknown = answer.input_tokens is None
            length = (answer.input_tokens or 0) + np.cumsum(answer.tokens)
            for first, last in answer.runs(pause_s):
                starts.append((answer.at_s[first], length[first], is_unknown))
                ends.append((answer.at_s[last], length[last], is_unknown))
                grown_s.append(answer.at_s[first + 1 : last + 1])
                grown.append(answer.tokens[first + 1 : last + 1])
        self._starts, self._ends = _Steps(starts), _Steps(ends)
        when, count = np.concatenate(grown_s), np.concatenate(grown)
        self._grown = _Steps([(at, tokens, False) for at, tokens in zip(when, count, strict=True)])
        self._sent_s = np.sort([record.sent_s for record in records])
        self._served_s = np.sort(
            [
                record.end_s if record.first_token_s is None else record.first_token_s
                for record in records
            ]
        )

    def sequences(self, at_s: Floats) -> Counts:
        """How many sequences decoded."""
        return self._starts.count(at_s) - self._ends.count(at_s)

    def resident_tokens(self, at_s: Floats) -> Floats:
        """Length of all of them together: prompts and what was generated so far."""
        return self._starts.sum(at_s) - self._ends.sum(at_s) + self._grown.sum(at_s)

    def unknown(self, at_s: Floats) -> Counts:
        """How many of them have a prompt of unknown length."""
        return self._starts.unknown(at_s) - self._ends.unknown(at_s)

    def waiting(self, at_s: Floats) -> Counts:
        """How many requests had been sent and had no token yet."""
        sent: Counts = np.searchsorted(self._sent_s, at_s, "right")
        served: Counts = np.searchsorted(self._served_s, at_s, "right")
        return sent - served

    def starts_within(self, after_s: Floats, until_s: Floats) -> Counts:
        """How many sequences began to decode in a stretch of time."""
        return self._starts.count(until_s) - self._starts.count(after_s)


class _Steps:
    """Running totals of events, each a time, an amount, and whether it is of an unknown length."""

    def __init__(self, events: Sequence[tuple[float, int, bool]]) -> None:
        table = np.array(sorted(events), dtype=np.float64).reshape(-1, 3)
        self._at_s: Floats = table[:, 0]
        self._sums: Floats = np.concatenate((np.zeros((1, 2)), np.cumsum(table[:, 1:], axis=0)))

    def count(self, at_s: Floats) -> Counts:
        place: Counts = np.searchsorted(self._at_s, at_s, "right")
        return place

    def sum(self, at_s: Floats) -> Floats:
        total: Floats = self._sums[self.count(at_s), 0]
        return total

    def unknown(self, at_s: Floats) -> Counts:
        count: Counts = self._sums[self.count(at_s), 1].astype(np.int64)
        return count
