"""Schemas of Prompt Cache: a tree of modules, and the position that each has in every prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtune.errors import BadInput


@dataclass(frozen=True, slots=True)
class Parameter:
    """A place of `length_tokens` positions for what each prompt fills in."""

    name: str
    length_tokens: int


@dataclass(frozen=True, slots=True)
class Module:
    """A named part of prompts: token ids, parameters, and modules or unions inside, in order."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """Modules of which a prompt has at most one: all start at one position.

    It takes the room of the largest.
    """

    members: tuple[Module, ...]


Part = tuple[int, ...] | Parameter | Module | Union
"""What a module consists of; a tuple is token ids."""


@dataclass(frozen=True, slots=True)
class Run:
    """Token ids at consecutive positions from `start` on."""

    start: int
    token_ids: tuple[int, ...]

    @property
    def positions(self) -> range:
        """Their positions."""
        return range(self.start, self.start + len(self.token_ids))


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a module is: its own token ids, its parameters as (start, length), and its room.

    `parent` is the module that it is inside; `rivals` are the other members of its union.
    """

    name: str
    start: int
    end: int
    runs: tuple[Run, ...]
    parameters: Mapping[str, tuple[int, int]]
    parent: str | None
    rivals: tuple[str, ...]


class Schema:
    """Modules and unions in order, and scaffolds: modules that are encoded together.

    Each position is the sum of the sizes before it. Modules of a scaffold see each other, as in an
    ordinary prompt; others see nothing but themselves.
    """

    def __init__(
        self, parts: Sequence[Module | Union], scaffolds: Sequence[Sequence[str]] = ()
    ) -> None:
        """Place the modules.

        Raises:
            BadInput: a name is used twice, a parameter has no length, or a scaffold names unknown
                modules, or two of one union.
        """
        self.modules: dict[str, Placed] = {}
        at = 0
        for part in parts:
            at = self._place(part, at, None)
        self.end = at
        self.scaffolds = tuple(tuple(names) for names in scaffolds)
        for names in self.scaffolds:
            self.check(names)

    def check(self, names: Sequence[str]) -> None:
        """Raise unless one prompt can have these modules.

        Raises:
            BadInput: one is unknown, named twice, a rival of another, or without its parent.
        """
        for name in names:
            placed = self.modules.get(name)
            if placed is None:
                known = ", ".join(self.modules)
                raise BadInput(f"the schema has no module {name!r}", fix=f"it has: {known}")
            if names.count(name) > 1:
                raise BadInput(f"module {name!r} is named twice", fix="name each module once")
            rival = next((other for other in placed.rivals if other in names), None)
            if rival is not None:
                raise BadInput(
                    f"modules {name!r} and {rival!r} are alternatives of one union",
                    fix="choose one of them",
                )
            if placed.parent is not None and placed.parent not in names:
                raise BadInput(
                    f"module {name!r} is inside {placed.parent!r}, which is missing",
                    fix=f"add {placed.parent!r}",
                )

    def encoded_together(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Split the modules of a prompt into scaffolds, the earlier first, and single modules."""
        left = set(names)
        for scaffold in self.scaffolds:
            if left.issuperset(scaffold):
                left.difference_update(scaffold)
                yield scaffold
        yield from ((name,) for name in names if name in left)

    def arguments(self, names: Sequence[str], given: Mapping[str, Sequence[int]]) -> list[Run]:
        """Place the arguments of a prompt's parameters, in the order of their positions.

        Raises:
            BadInput: no module of the prompt has a parameter, or an argument does not fit.
        """
        known = {
            parameter: place
            for name in names
            for parameter, place in self.modules[name].parameters.items()
        }
        runs = []
        for parameter, token_ids in given.items():
            if parameter not in known:
                raise BadInput(
                    f"no module of the prompt has a parameter {parameter!r}",
                    fix="parameters: " + (", ".join(known) or "none"),
                )
            start, length = known[parameter]
            if len(token_ids) > length:
                raise BadInput(
                    f"{parameter!r} has room for {length} tokens, and its argument has "
                    f"{len(token_ids)}",
                    fix="shorten the argument, or raise the parameter's length",
                )
            runs.append(Run(start, tuple(token_ids)))
        return sorted(runs, key=lambda run: run.start)

    def _place(
        self, part: Module | Union, start: int, parent: str | None, rivals: tuple[str, ...] = ()
    ) -> int:
        """Place a module or a union, and what is inside; return where it ends."""
        if isinstance(part, Union):
            names = [member.name for member in part.members]
            ends = [
                self._place(
                    member, start, parent, tuple(other for other in names if other != member.name)
                )
                for member in part.members
            ]
            return max(ends, default=start)
        if part.name in self.modules:
            raise BadInput(f"two modules are named {part.name!r}", fix="rename one")
        self.modules[part.name] = Placed(part.name, start, start, (), {}, parent, rivals)
        at = start
        runs: list[Run] = []
        parameters: dict[str, tuple[int, int]] = {}
        for inside in part.parts:
            if isinstance(inside, tuple):
                runs.append(Run(at, inside))
                at += len(inside)
            elif isinstance(inside, Parameter):
                self._check_parameter(inside, parameters)
                parameters[inside.name] = at, inside.length_tokens
                at += inside.length_tokens
            else:
                at = self._place(inside, at, part.name)
        self.modules[part.name] = Placed(
            part.name,
            start,
            at,
            tuple(run for run in runs if run.token_ids),
            parameters,
            parent,
            rivals,
        )
        return at

    def _check_parameter(self, parameter: Parameter, here: Mapping[str, object]) -> None:
        if parameter.length_tokens < 1:
            raise BadInput(f"parameter {parameter.name!r} has no room", fix="give it a length")
        taken = (placed.parameters for placed in self.modules.values())
        if parameter.name in here or any(parameter.name in names for names in taken):
            raise BadInput(f"two parameters are named {parameter.name!r}", fix="rename one")
