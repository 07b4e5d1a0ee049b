"""The points that a search may propose: each can start, none comes twice, and knobs have places.

A space of some thousand points is not enumerated: a part of it is drawn, and what lies around the
best points is added as the search goes on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from pydantic import JsonValue

from kvtune.autotune.space import SearchSpace, SpaceKnob, infeasible_reason, stack_from
from kvtune.policies.base import Context
from kvtune.types import PolicyStack

ENUMERATED = 1_000
"""Points of a space up to which all are looked at: a second."""

STOPS = 7
"""Values that are looked at of a knob that takes any number."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point that can start: the value of each knob as it takes effect, and what serves them."""

    values: Mapping[str, JsonValue]
    stack: PolicyStack

    @property
    def key(self) -> str:
        """Equal for points that are served alike."""
        return key_of(self.stack.arguments)


def key_of(arguments: Mapping[str, JsonValue]) -> str:
    """One text for equal arguments, in whatever order."""
    return json.dumps(arguments, sort_keys=True)


def candidate(
    space: SearchSpace, values: Mapping[str, JsonValue], ctx: Context
) -> Candidate | None:
    """The point at `values`, moved to where its values go together; None if it cannot start."""
    stack = stack_from(space, values, ctx)
    if infeasible_reason(stack, ctx) is not None:
        return None
    chosen = {name: value for one in stack.choices for name, value in one.parameters.items()}
    return Candidate(
        {name: chosen.get(name, value) for name, value in space.defaults.items()}, stack
    )


def candidates(
    space: SearchSpace, ctx: Context, *, most: int, rng: random.Random
) -> list[Candidate]:
    """All points of a small space; of a large one the defaults, what is next to them, and draws.

    Args:
        space: what may be tried.
        ctx: what is known about engine, device, model and workload.
        most: how many points of a large space, about.
        rng: where draws come from.
    """
    options = [options_of(entry) for entry in space.knobs]
    names = [entry.knob.name for entry in space.knobs]
    found: dict[str, Candidate] = {}
    points: Iterator[Sequence[JsonValue]]
    if is_enumerated(space):
        points, most = product(*options), ENUMERATED
    else:
        singles = moves(space, space.defaults)
        _add(found, space, ctx, [space.defaults, *singles])
        # Twice as many as are wanted, as several draws may be served alike.
        points = ([rng.choice(one) for one in options] for _ in range(2 * most))
    for point in points:
        if len(found) >= most:
            break
        _add(found, space, ctx, [dict(zip(names, point, strict=True))])
    return sorted(found.values(), key=lambda one: one.stack.cost)


def size_of(space: SearchSpace) -> int:
    """How many points a space has, those that cannot start or are served alike among them."""
    return prod(len(options_of(entry)) for entry in space.knobs)


def is_enumerated(space: SearchSpace) -> bool:
    """Whether a space is so small that all of its points are candidates."""
    return size_of(space) <= ENUMERATED


def neighbours(
    space: SearchSpace, values: Mapping[str, JsonValue], ctx: Context
) -> list[Candidate]:
    """The points that differ from `values` in one knob."""
    found: dict[str, Candidate] = {}
    _add(found, space, ctx, moves(space, values))
    return list(found.values())


def moves(space: SearchSpace, values: Mapping[str, JsonValue]) -> list[dict[str, JsonValue]]:
    """`values` with one knob moved, for each knob and each other value of it."""
    return [
        {**values, entry.knob.name: value}
        for entry in space.knobs
        for value in options_of(entry)
        if value != values[entry.knob.name]
    ]


def options_of(entry: SpaceKnob) -> list[JsonValue]:
    """The values of a knob that are looked at."""
    knob = entry.knob
    if knob.choices or knob.low is None or knob.high is None:
        return list(knob.choices)
    width = (knob.high - knob.low) / (STOPS - 1)
    stops = [knob.low + width * step for step in range(STOPS)]
    values = [*(knob.nearest(stop) for stop in stops), knob.default]
    return list(dict.fromkeys(values))


def is_ordered(entry: SpaceKnob) -> bool:
    """Whether values of a knob lie between each other, as numbers do."""
    return all(type(choice) in (int, float) for choice in entry.knob.choices)


def place(entry: SpaceKnob, value: JsonValue) -> float:
    """Where a value lies among those of its knob, from 0 to 1; its number where none is between."""
    knob = entry.knob
    if not knob.choices:
        low, high = float(knob.low or 0.0), float(knob.high or 0.0)
        number = float(value) if isinstance(value, int | float) else low
        return (number - low) / ((high - low) or 1.0)
    index = knob.choices.index(knob.nearest(value))
    return index / max(1, len(knob.choices) - 1) if is_ordered(entry) else float(index)


def values_of(space: SearchSpace, arguments: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The value of each knob under `arguments`."""
    found = space.defaults
    for knob in (entry.knob for entry in space.knobs):
        if knob.argument in arguments:
            found[knob.name] = knob.value_of(arguments[knob.argument])
    return found


def beyond(space: SearchSpace, arguments: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The arguments that no knob of the space sets, as those of a space with more levers."""
    own = {entry.knob.argument for entry in space.knobs}
    return {name: value for name, value in arguments.items() if name not in own}


def _add(
    found: dict[str, Candidate],
    space: SearchSpace,
    ctx: Context,
    points: Sequence[Mapping[str, JsonValue]],
) -> None:
    for values in points:
        one = candidate(space, values, ctx)
        if one is not None:
            found.setdefault(one.key, one)
