"""What the model of a search says of what to try next, of what was measured so far, and in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from pydantic import JsonValue

from kvtune.autotune.decide import mean_metrics
from kvtune.autotune.explore.asking import LIMIT_S, Asking, TooLate
from kvtune.autotune.explore.base import NOT_OF_THE_POINT, Observation, Pick, Proposer
from kvtune.autotune.explore.kin import Kin
from kvtune.autotune.gates import Gates
from kvtune.autotune.ledger import Entry
from kvtune.autotune.so_far import SoFar
from kvtune.autotune.space import SearchSpace
from kvtune.autotune.spending import confirmation_s
from kvtune.policies.base import Context
from kvtune.types import FailureClass, Regret

T = TypeVar("T")


class Advice:
    """Tells a proposer what a search measured, and asks it; says nothing where there is none.

    What failed at `kin` is told too, but for what says nothing of the arguments. An answer may take
    `limit_s`.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        so_far: SoFar,
        context: Context,
        kin: Iterable[Kin],
        *,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._asking = None if proposer is None else Asking(proposer, limit_s=limit_s)
        self._so_far, self._context = so_far, context
        self._kin = [
            one for each in kin for one in each.failed if one.failure not in NOT_OF_THE_POINT
        ]
        self._told: set[int] = set()

    @property
    def is_given(self) -> bool:
        """Whether there is a model."""
        return self._asking is not None

    def pick(self, space: SearchSpace) -> Pick | None:
        """What to measure next; None when nothing is left.

        Raises:
            TooLate: it took too long.
        """
        seconds, trials = self._left()
        return self._asked(
            lambda one: one.pick(space, self._context, seconds_left=seconds, trials_left=trials),
            None,
        )

    def stop(self, space: SearchSpace) -> str:
        """Why the search may end now; empty when it should go on, or nothing is known."""
        with suppress(TooLate):
            return self._asked(lambda one: one.stop(space, self._context), "")
        return ""

    def chance(self, space: SearchSpace) -> float:
        """The probability that an unmeasured point of `space` meets the goal; 1 if unknown."""
        with suppress(TooLate):
            return self._asked(lambda one: one.chance(space, self._context), 1.0)
        return 1.0

    def left_out(self, space: SearchSpace) -> str:
        """Which knobs, or `knob=value`, hardly need to be tried, and why; empty if unknown."""
        nothing: Mapping[str, str] = {}
        by_reason: dict[str, list[str]] = {}
        with suppress(TooLate):
            found = self._asked(lambda one: one.left_out(space, self._context), nothing)
            for name, reason in found.items():
                by_reason.setdefault(reason, []).append(name)
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())

    def recommended(self, space: SearchSpace) -> Mapping[str, JsonValue] | None:
        """The arguments of the measured point of `space` that is thought best, if there is one."""
        with suppress(TooLate):
            return self._asked(lambda one: one.recommended(space, self._context), None)
        return None

    def regret(self, arguments: Mapping[str, JsonValue], space: SearchSpace) -> Regret | None:
        """How far a measured point of `space` may be from its best one; None if unknown."""
        with suppress(TooLate, ValueError):
            return self._asked(lambda one: one.regret(arguments, space, self._context), None)
        return None

    def end(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.end()

    def _asked(self, question: Callable[[Proposer], T], without: T) -> T:
        if self._asking is None:
            return without
        for one in self._new():
            self._asking.tell(one)
        return self._asking.ask(question)

    def _new(self) -> list[Observation]:
        """What was measured since it was asked last; what kin know comes after the baseline."""
        entries = self._so_far.tried
        found = [
            one
            for entry, one in zip(entries, self._observations(entries), strict=True)
            if entry.trial.number not in self._told
        ]
        self._told |= {entry.trial.number for entry in entries}
        if found and self._kin:
            found[1:1], self._kin = self._kin, []
        return found

    def _observations(self, entries: Sequence[Entry]) -> list[Observation]:
        found = observations(entries, self._so_far.gates)
        if not self._so_far.also:
            return found
        costs_of = self._so_far.objectives.costs
        return [
            replace(one, costs={name: cost.estimate for name, cost in costs_of(entry).items()})
            for entry, one in zip(entries, found, strict=True)
        ]

    def _left(self) -> tuple[float, int]:
        """Seconds that trials may still take, and how many there may be."""
        so_far = self._so_far
        left_s = so_far.left_s() - confirmation_s(so_far.points, so_far.budget)
        return max(left_s, 0.0), so_far.budget.trials - len(so_far.tried)


def observations(entries: Sequence[Entry], gates: Gates) -> list[Observation]:
    """What measurements in the order of their trials say of their points.

    Trials are taken to have been measured one right after the other, so that a search that goes on
    later sees the same. Answers that `gates` object to are a failure of the point.
    """
    found, at_s = [], 0.0
    for entry in entries:
        measured = entry.measurement
        failure = None if measured.failure is None else measured.failure.failure
        # Only the first measurement of a point is asked what gates want to know.
        if failure is None and entry.trial.parent is None and gates.objection(entry):
            failure = FailureClass.BROKEN_OUTPUT
        wall_s = (measured.wall_s or 0.0) - measured.asked_s + (measured.stop_s or 0.0)
        found.append(
            Observation(
                arguments=entry.trial.stack.arguments,
                figures={} if failure else mean_metrics(measured),
                at_s=at_s,
                wall_s=wall_s,
                share=measured.share,
                failure=failure,
            )
        )
        at_s += wall_s
    return found
