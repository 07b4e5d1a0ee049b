"""The points of one space that are told apart, what is foretold of them, and how alike they are."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from pydantic import JsonValue

from kvtune.autotune.explore.candidates import (
    Candidate,
    beyond,
    candidate,
    candidates,
    is_enumerated,
    is_ordered,
    key_of,
    neighbours,
    options_of,
    place,
    size_of,
    values_of,
)
from kvtune.autotune.explore.likeness import Field, Floats, field_over
from kvtune.autotune.explore.prior import Foretold, Prior
from kvtune.autotune.space import SearchSpace, infeasible_reason, stack_from
from kvtune.policies.base import Context

FORETOLD_FIRST = 200
"""Points that are simulated before the first trial: 20 seconds."""

SOUGHT_SHARE = 0.7
"""Part of these that lie around the best; the rest is drawn from everywhere."""

DRAWN = 400
"""Points of a large space that are looked at where no simulation is at hand."""

GROWN = 20
"""Points that are added around each of the best before a trial: 2 seconds of simulation."""


class Region:
    """Points of a space. Those with equal simulated runs are one point: the simplest of them.

    It is empty until it was asked to `look`, which may be ended when it has taken too long.
    `score` ranks what is foretold, higher is better.
    """

    def __init__(
        self,
        space: SearchSpace,
        ctx: Context,
        prior: Prior,
        score: Callable[[Foretold], float],
        seed: int,
    ) -> None:
        self.space, self.ctx = space, ctx
        self.points: list[Candidate] = []
        self._prior, self._score = prior, score
        self._rows: dict[str, int] = {}
        self._courses: dict[object, int] = {}
        self._surrounded: set[int] = set()
        self._rng = random.Random(seed)
        self._fields: dict[tuple[str, ...], Field] = {}
        self._ahead = self._first()

    def row_of(self, arguments: Mapping[str, JsonValue]) -> int | None:
        """Which point these arguments serve; None if none of this region's."""
        return self._rows.get(key_of(arguments))

    @property
    def extent(self) -> str:
        """How much of the space is known, in words."""
        looked, of = len(self._rows), size_of(self.space)
        if looked == of:
            return f"all {of:,} configurations"
        return f"the {looked:,} configurations looked at, of {of:,}"

    def look(self, until_s: float = math.inf) -> None:
        """Add the points that are to be looked at from the start.

        It ends at `until_s` of the monotonic clock, with at least one point more, and goes on from
        there when it is called again.
        """
        for one in self._ahead:
            self._add(one)
            if time.monotonic() >= until_s:
                return

    def include(self, arguments: Mapping[str, JsonValue]) -> None:
        """Add the point that these arguments serve, if the space has it."""
        if self.row_of(arguments) is not None or beyond(self.space, arguments):
            return
        one = candidate(self.space, values_of(self.space, arguments), self.ctx)
        if one is not None and one.key == key_of(arguments):
            self._add(one)

    def grow(self, around: Sequence[int], until_s: float = math.inf) -> None:
        """Add points next to these, as far as there are any, and as far as time goes."""
        for row in dict.fromkeys(around):
            if row in self._surrounded:
                continue
            found = [one for one in self._near(row) if one.key not in self._rows]
            self._rng.shuffle(found)
            for one in found[:GROWN]:
                if time.monotonic() >= until_s:
                    return
                self._add(one)
            if len(found) <= GROWN:
                self._surrounded.add(row)

    def left_out(self) -> dict[str, str]:
        """Map a knob, or `knob=value`, to why it is tried only in stacks where it matters.

        The simulated runs of a value are equal to those of another one, or nothing starts with it,
        both beside the defaults and beside the best point that is foretold. Nothing is said of what
        was not looked at yet.
        """
        best = self._best()
        centres = (
            [self.space.defaults]
            if best is None
            else [self.space.defaults, self.points[best].values]
        )
        found: dict[str, str] = {}
        for entry in self.space.knobs:
            name, default = entry.knob.name, entry.knob.default
            others = [value for value in options_of(entry) if value != default]
            alike: dict[tuple[int, ...], list[JsonValue]] = {}
            for value in [default, *others]:
                points = [candidate(self.space, {**one, name: value}, self.ctx) for one in centres]
                able = [one for one in points if one is not None]
                rows = [row for one in able if (row := self._rows.get(one.key)) is not None]
                if len(rows) == len(centres):
                    alike.setdefault(tuple(rows), []).append(value)
                elif not able:
                    found[f"{name}={value}"] = self._refused({**self.space.defaults, name: value})
            if [len(group) for group in alike.values()] == [1 + len(others)]:
                found[name] = "no value of it changes the simulated run"
                continue
            for first, *same in alike.values():
                for value in same:
                    found[f"{name}={value}"] = f"runs as {first}"
        return found

    def _refused(self, values: Mapping[str, JsonValue]) -> str:
        """Why the point at `values` cannot start."""
        return infeasible_reason(stack_from(self.space, values, self.ctx), self.ctx) or ""

    def _near(self, row: int) -> list[Candidate]:
        return neighbours(self.space, self.points[row].values, self.ctx)

    def places(self, outside: Sequence[Mapping[str, JsonValue]]) -> tuple[Floats, list[bool]]:
        """Where each point lies in each knob, and whether places of the knob have an order.

        After the points come arguments that lie outside of the space; what they set beyond it is
        one knob more.
        """
        own = [[place(k, one.values[k.knob.name]) for k in self.space.knobs] for one in self.points]
        ordered = [is_ordered(entry) for entry in self.space.knobs]
        if not outside:
            # A space without knobs has one point.
            return (np.array(own), ordered) if ordered else (np.zeros((len(own), 1)), [True])
        kinds = [key_of(beyond(self.space, arguments)) for arguments in outside]
        code = {kind: float(at) for at, kind in enumerate(["{}", *sorted({*kinds} - {"{}"})])}
        rows = [[*row, 0.0] for row in own]
        for arguments, kind in zip(outside, kinds, strict=True):
            values = values_of(self.space, arguments)
            rows.append([*(place(k, values[k.knob.name]) for k in self.space.knobs), code[kind]])
        return np.array(rows), [*ordered, False]

    def field(self, outside: Sequence[Mapping[str, JsonValue]]) -> Field:
        """How alike the points are, those `outside` of the space after them."""
        key = str(len(self.points)), *map(key_of, outside)
        if key not in self._fields:
            self._fields = {key: field_over(*self.places(outside))}
        return self._fields[key]

    def _first(self) -> Iterator[Candidate]:
        """What is looked at from the start; each is added before the next one is chosen."""
        everything = candidates(self.space, self.ctx, most=DRAWN, rng=self._rng)
        if self._prior.foretell is None or len(everything) <= FORETOLD_FIRST:
            yield from everything
            if is_enumerated(self.space):
                self._surrounded = {*range(len(self.points))}
            return
        yield from (one for one in everything if len(one.stack.choices) <= 1)
        asked, best = len(self._rows), -1
        while asked < SOUGHT_SHARE * FORETOLD_FIRST and (found := self._best()) not in (best, None):
            best = found
            yield from self._near(best)[: FORETOLD_FIRST - asked]
            asked = len(self._rows)
        rest = [one for one in everything if one.key not in self._rows]
        self._rng.shuffle(rest)
        yield from rest[: max(0, FORETOLD_FIRST - asked)]

    def _best(self) -> int | None:
        """The point of which the best is foretold."""
        told = [(self._prior.of(one.stack.arguments), row) for row, one in enumerate(self.points)]
        ranked = [(self._score(known), -row) for known, row in told if known is not None]
        return -max(ranked)[1] if ranked else None

    def _add(self, one: Candidate) -> None:
        if one.key in self._rows:
            return
        told = self._prior.of(one.stack.arguments)
        same = None if told is None else self._courses.get(told.course)
        if same is None:
            self._rows[one.key] = len(self.points)
            if told is not None:
                self._courses[told.course] = len(self.points)
            self.points.append(one)
            return
        self._rows[one.key] = same
        if one.stack.cost < self.points[same].stack.cost:
            self.points[same] = one
            self._fields.clear()
