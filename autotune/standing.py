"""Which measured trials may still win, which go into the confirmation, and why others may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtune.autotune.decide import meets_goal, missed_by, objective_values
from kvtune.autotune.gates import Gates
from kvtune.autotune.ledger import Entry
from kvtune.profilers.quality import traffic
from kvtune.types import Goal, Harm, Measurement, Status


def rejected(
    points: Sequence[Entry],
    gates: Gates,
    confirmed: Mapping[int, Measurement] | None = None,
    missed: Mapping[int, str] | None = None,
) -> dict[int, str]:
    """Why trials cannot be recommended, by number.

    `confirmed` (perhaps empty) is given once the search has ended: then also those are out that
    were not confirmed where others were, whose answers to the held-out requests are broken beside
    the baseline's, or whose answers nobody has vouched for. `missed` is why those of an earlier
    confirmation are out, which nothing passed.
    """
    found: dict[int, str] = {}
    stock = (confirmed or {}).get(0)
    for entry in points:
        number = entry.trial.number
        last = (confirmed or {}).get(number, entry.measurement)
        if last.failure is not None:
            found[number] = f"{last.failure.failure}: {last.failure.message}"
        elif last.status is Status.CUT:
            found[number] = last.cut
        elif reason := gates.objection(entry):
            found[number] = reason
        elif confirmed and number not in confirmed:
            reason = (missed or {}).get(number) or gates.left_out(entry)
            found[number] = reason or "not among those that were confirmed"
        elif confirmed and (reason := traffic.objection(last, stock)):
            found[number] = f"at the confirmation, {reason}"
        elif confirmed is not None and (reason := gates.unproved(entry)):
            found[number] = reason
    return found


def up_to(harm: Harm, points: Sequence[Entry]) -> list[Entry]:
    """The trials that do no more harm."""
    order = list(Harm)
    most = order.index(harm)
    return [entry for entry in points if order.index(entry.trial.stack.harm) <= most]


def meeting(goal: Goal, points: Sequence[Entry], gates: Gates) -> list[Entry]:
    """The trials that meet the goal and may be shipped, as far as it is known."""
    return [
        entry
        for entry in points
        if meets_goal(goal, entry.measurement) and gates.objection(entry) is None
    ]


def ranked(goal: Goal, points: Sequence[Entry], gates: Gates) -> list[Entry]:
    """Measured trials beside the baseline: that meet the goal, or are closest to it, first.

    Of those that meet it, the ones with the best objective.
    """
    out = rejected(points, gates)
    measured = [
        entry
        for entry in points
        if entry.trial.number
        and entry.trial.number not in out
        and objective_values(goal, entry.measurement)
    ]

    def rank(entry: Entry) -> tuple[float, float]:
        values = objective_values(goal, entry.measurement)
        return -missed_by(goal, entry.measurement), sum(values) / len(values)

    return sorted(measured, key=rank, reverse=True)


def finalists(
    goal: Goal, points: Sequence[Entry], gates: Gates, most: int, first: Sequence[int] = ()
) -> list[Entry]:
    """The best trials, at most so many; those with numbers of `first` come before others.

    Where all of them may change answers, the last place goes to the best lossless one that meets
    the goal, so that there is somebody to win if their answers turn out worse than allowed.
    """
    everyone = ranked(goal, points, gates)
    places = {number: place for place, number in enumerate(first)}
    everyone.sort(key=lambda entry: places.get(entry.trial.number, len(places)))
    chosen = everyone[:most]
    lossless = [
        entry
        for entry in everyone
        if entry.trial.stack.harm is Harm.LOSSLESS and meets_goal(goal, entry.measurement)
    ]
    if most > 1 and lossless and all(e.trial.stack.harm is not Harm.LOSSLESS for e in chosen):
        chosen = [*chosen[: most - 1], lossless[0]]
    return chosen
