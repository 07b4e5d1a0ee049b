"""What a search and the one who proposes its trials say to each other.

A proposer is told what was measured, and says what to measure next. It sees figures and arguments,
never servers, so a search on recorded measurements runs the same code as one on servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from kvtune.autotune.space import SearchSpace
from kvtune.policies.base import Context
from kvtune.types import FailureClass, Interval, PolicyStack, Regret

NOT_OF_THE_POINT = frozenset(
    {FailureClass.PORT_TAKEN, FailureClass.ENGINE_MISSING, FailureClass.CONTAMINATED}
)
"""Failures that say nothing about the arguments."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one measurement gave.

    `arguments` are those of its stack alone, so `{}` is stock defaults. `figures` maps the flat
    name of a metric to its mean; empty when the run failed. `share` is the part of the load that
    was sent before the run was cut short (1: all of it). `at_s` is when it began, on any one clock,
    and `wall_s` is what it took, the start and stop of the server included. `task` is how alike
    its workload and this one are: 1 for the study's own measurements, less for those of a kin.
    `costs` are what it has of further objectives, as far as they are known; less is better.
    """

    arguments: Mapping[str, JsonValue]
    figures: Mapping[str, float]
    at_s: float
    wall_s: float
    share: float = 1.0
    failure: FailureClass | None = None
    task: float = 1.0
    costs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pick:
    """What to measure next, and why.

    `values` has one for each knob of the space, and `stack` is what serves them. `expected` is what
    the objective should be, with the range in which one measurement of it will fall. `again`: it
    was measured before, and once more tells the most.
    """

    values: dict[str, JsonValue]
    stack: PolicyStack
    because: str
    expected: Interval | None
    again: bool = False


class Proposer(Protocol):
    """Chooses what to measure. The first observation must be the baseline's."""

    def observe(self, observation: Observation) -> None:
        """Learn from one measurement, failed or not."""
        ...

    def pick(
        self, space: SearchSpace, ctx: Context, *, seconds_left: float, trials_left: int
    ) -> Pick | None:
        """What to measure next in `space`; None when nothing of it is worth a trial any more.

        `seconds_left` is what trials may still take, or infinite.
        """
        ...

    def stop(self, space: SearchSpace, ctx: Context) -> str:
        """Why the search in `space` may end before its budget; empty when it should go on."""
        ...

    def chance(self, space: SearchSpace, ctx: Context) -> float:
        """The probability that an unmeasured point of `space` meets all limits of the goal."""
        ...

    def recommended(self, space: SearchSpace, ctx: Context) -> Mapping[str, JsonValue] | None:
        """The arguments of the measured point that is thought best; None if none meets the goal.

        Judged by all measurements together, not by the luckiest one.
        """
        ...

    def regret(
        self, recommended: Mapping[str, JsonValue], space: SearchSpace, ctx: Context
    ) -> Regret:
        """How far the point with these arguments may be from the best one of `space`.

        Raises:
            ValueError: no point of `space` is served by them.
        """
        ...

    def left_out(self, space: SearchSpace, ctx: Context) -> Mapping[str, str]:
        """Map a knob, or `knob=value`, to why it is tried only in stacks where it matters."""
        ...
