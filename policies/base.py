"""The contract of a policy: a lever on the KV cache, described so that a search can pull it.

A policy is one file in this folder with one class that declares `name`. It is pure: it looks at a
`Context` and answers which values are worth trying, which engine arguments serve a value, and why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeGuard

from pydantic import JsonValue

from kvtune.errors import BadInput
from kvtune.kernels.device import DeviceDetail
from kvtune.policies.model_shape import ModelShape
from kvtune.registry import discover
from kvtune.types import (
    Choice,
    Device,
    EffectiveConfig,
    EngineInfo,
    Harm,
    Verdict,
    WorkloadFingerprint,
)


@dataclass(frozen=True, slots=True)
class Support:
    """Whether something can be done here; a refusal carries its reason."""

    ok: bool
    reason: str = ""

    @classmethod
    def yes(cls) -> Support:
        """It can be done."""
        return cls(True)

    @classmethod
    def no(cls, reason: str) -> Support:
        """It cannot, and this is why."""
        return cls(False, reason)


@dataclass(frozen=True, slots=True)
class Knob:
    """One value to search: its type, its range and why the range is what it is.

    `choices` lists every allowed value, numbers ascending; it is empty for `int` and `float`, which
    are any number from `low` to `high`. `log2` means powers of two from `low` to `high`. `default`
    is what the engine does when nothing is said. `active_when` maps another knob's name to the
    values of it for which this knob matters; None means always. `served_as` maps values to those of
    the engine argument, where they are others; `named` is that argument where it is not called as
    the knob.
    """

    name: str
    kind: Literal["int", "log2", "float", "choice", "bool"]
    low: float | int | None
    high: float | int | None
    choices: tuple[JsonValue, ...]
    unit: str
    because: str
    default: JsonValue
    active_when: Mapping[str, tuple[JsonValue, ...]] | None = None
    served_as: Mapping[int | str, JsonValue] | None = None
    named: str = ""

    def __post_init__(self) -> None:
        if not self.allows(self.default):
            raise ValueError(f"knob {self.name}: default {self.default!r} is not in its range")

    @classmethod
    def span(
        cls, name: str, low: float, high: float, *, default: float, unit: str, because: str
    ) -> Knob:
        """Any number from `low` to `high`, both included: an integer if all three are integers."""
        whole = all(isinstance(bound, int) for bound in (low, high, default))
        return cls(name, "int" if whole else "float", low, high, (), unit, because, default)

    @classmethod
    def log2(cls, name: str, low: int, high: int, *, default: int, unit: str, because: str) -> Knob:
        """Powers of two from `low` to `high`, both included."""
        values = powers_of_two(low, high)
        return cls(name, "log2", values[0], values[-1], values, unit, because, default)

    @classmethod
    def choice(
        cls,
        name: str,
        choices: Sequence[JsonValue],
        *,
        default: JsonValue,
        unit: str = "",
        because: str,
        active_when: Mapping[str, tuple[JsonValue, ...]] | None = None,
        named: str = "",
    ) -> Knob:
        """One of `choices`; give numbers in ascending order."""
        return cls(
            name,
            "choice",
            low=None,
            high=None,
            choices=tuple(choices),
            unit=unit,
            because=because,
            default=default,
            active_when=active_when,
            named=named,
        )

    @classmethod
    def flag(cls, name: str, *, default: bool, because: str) -> Knob:
        """On or off."""
        return cls(name, "bool", None, None, (False, True), "", because, default)

    def allows(self, value: JsonValue) -> bool:
        """Whether `value` has this knob's type and lies in its range."""
        if self.kind in ("int", "float"):
            typed = isinstance(value, int if self.kind == "int" else int | float)
            return typed and _is_number(value) and self._clamp(value) == value
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def nearest(self, value: JsonValue) -> JsonValue:
        """Return `value` if it is allowed, else the allowed value closest to it, else the default.

        Numbers are compared by distance, the smaller one wins a tie; other values have no distance.
        """
        if self.allows(value):
            return value
        if not _is_number(value):
            return self.default
        if self.kind == "int":
            return self._clamp(round(value))
        if self.kind == "float":
            return self._clamp(value)
        numbers = [choice for choice in self.choices if _is_number(choice)]
        return min(numbers, key=lambda choice: (abs(choice - value), choice), default=self.default)

    @property
    def argument(self) -> str:
        """The engine argument that this knob's values set."""
        return self.named or self.name.replace("_", "-")

    def value_of(self, argument: JsonValue) -> JsonValue:
        """The value that a value of the engine argument stands for."""
        served = (self.served_as or {}).items()
        return next((value for value, given in served if given == argument), argument)

    def _clamp(self, value: float) -> float:
        if self.low is None or self.high is None:
            raise ValueError(f"knob {self.name} of kind {self.kind} needs low and high")
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True)
class Context:
    """Everything a policy may ask about; None is unknown.

    `baseline` is the effective configuration of the server run with `base_arguments` alone.
    `base_arguments` are the engine arguments that the user fixed. `max_concurrency` is the most
    requests that the load has in flight at once. `max_host_bytes` is the most host memory that the
    user lets a setting take beside the KV pool; without, policies set their own bounds.
    `scores_limit` is a limit of the user's on scores of given texts, in words, where there is one.
    """

    engine: EngineInfo
    device: Device
    model: ModelShape | None = None
    baseline: EffectiveConfig | None = None
    base_arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    fingerprint: WorkloadFingerprint | None = None
    verdict: Verdict | None = None
    max_concurrency: int | None = None
    detail: DeviceDetail | None = None
    max_host_bytes: int | None = None
    scores_limit: str = ""

    @property
    def platform(self) -> Literal["cpu", "cuda"]:
        """Where the engine computes: what its build says, else the kind of the device."""
        if self.engine.platform == "cpu" or self.engine.platform == "cuda":
            return self.engine.platform
        return self.device.kind

    def fixed(self, argument: str) -> bool:
        """Whether the user fixed this engine argument."""
        return argument in self.base_arguments


class Policy(ABC):
    """A lever: what it does, where it works, which values to try, and the arguments that serve one.

    `harm` is the least that any value but the default does; see `harm_of`.
    `saves` says in one word what it acts on; `arguments` are the engine arguments that it sets.
    Knob names are unique among all policies: the name of the argument with underscores, unless
    the knob names its argument.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    harm: ClassVar[Harm]
    saves: ClassVar[str]
    arguments: ClassVar[tuple[str, ...]]

    def supports(self, ctx: Context) -> Support:
        """Say whether this policy is worth offering here. Extend, and call this one first."""
        for argument in self.arguments:
            if ctx.fixed(argument):
                return Support.no(f"{argument} is fixed by --engine-args")
        return Support.yes()

    def harm_of(self, parameters: Mapping[str, JsonValue]) -> Harm:
        """How much these parameters may change answers; unless a policy says more, all the same."""
        return self.harm

    def takes_bytes(self, parameters: Mapping[str, JsonValue]) -> int:
        """Memory that a server takes for these parameters beside all that it takes without."""
        return 0

    def relieves(self, ctx: Context) -> frozenset[str]:
        """All that it acts on here, in the words of `saves`."""
        return frozenset({self.saves})

    def refused_values(self, ctx: Context) -> dict[str, str]:
        """Map `knob=value` to the reason why that value is not offered."""
        return {}

    @abstractmethod
    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Return what to search; empty when there is nothing to search."""

    @abstractmethod
    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Return the engine arguments for `parameters` (knob name to value) and a one-line reason.

        A knob that is not named is at its default, and a default gives no argument, so that a
        stack says only what differs from the engine's own behaviour.

        Raises:
            BadInput: a name that is no knob of this policy, or a value outside its range.
        """

    def complete(self, parameters: Mapping[str, JsonValue], ctx: Context) -> dict[str, JsonValue]:
        """Return a value for each knob: the given one, else the default.

        Raises:
            BadInput: a name that is no knob of this policy, or a value outside its range.
        """
        knobs = {knob.name: knob for knob in self.knobs(ctx)}
        for name, value in parameters.items():
            if name not in knobs:
                known = ", ".join(sorted(knobs)) or "none here"
                raise BadInput(
                    f"policy {self.name!r} has no knob {name!r}", fix=f"its knobs: {known}"
                )
            if not knobs[name].allows(value):
                allowed = describe_range(knobs[name])
                raise BadInput(f"{name}={value!r} is outside its range", fix=f"use {allowed}")
        return {name: parameters.get(name, knob.default) for name, knob in knobs.items()}

    def make_choice(
        self,
        parameters: Mapping[str, JsonValue],
        arguments: Mapping[str, JsonValue],
        because: str,
    ) -> Choice:
        """Build this policy's `Choice`."""
        return Choice(
            policy=self.name,
            parameters=dict(parameters),
            arguments=dict(arguments),
            harm=self.harm_of(parameters),
            because=because,
            takes_bytes=self.takes_bytes(parameters),
        )


def policies() -> dict[str, type[Policy]]:
    """Return every policy by name: those in this folder, then those of other distributions."""
    return discover("kvtune.policies", Policy, group="kvtune.policies")


def describe_range(knob: Knob) -> str:
    """Say in a few words which values a knob takes."""
    if knob.kind in ("int", "float"):
        return f"{knob.low}..{knob.high}"
    if knob.kind == "log2":
        return f"powers of two {knob.low}..{knob.high}"
    if knob.kind == "bool":
        return "on or off"
    return ", ".join(str(choice) for choice in knob.choices)


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """Return the powers of two in [low, high], ascending.

    Raises:
        ValueError: there is none.
    """
    values = tuple(1 << bits for bits in range(high.bit_length()) if low <= 1 << bits <= high)
    if not values:
        raise ValueError(f"no power of two in [{low}, {high}]")
    return values


def _is_number(value: JsonValue) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
