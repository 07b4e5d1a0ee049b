"""What is left of a budget will have to pay for: the next trial, and the confirmation after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from kvtune.autotune.gates import Gates
from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import Budget
from kvtune.autotune.quality.trials import TrialQuality
from kvtune.autotune.rounds import looks, usual
from kvtune.autotune.standing import finalists
from kvtune.types import Goal, Measurement, Status


@dataclass(frozen=True, slots=True)
class Finals:
    """Who would be confirmed now, and who is left out because there is no time to ask them.

    `asking_s` is what questions would have taken with those that are left out. `says` why somebody
    has a place that single measurements did not give, if so.
    """

    chosen: list[Entry]
    left_out: list[Entry] = field(default_factory=list)
    asking_s: float = 0.0
    says: str = ""


def finals(
    goal: Goal,
    points: Sequence[Entry],
    gates: Gates,
    budget: Budget,
    quality: TrialQuality | None,
    left_s: float,
    first: Sequence[int] = (),
) -> Finals:
    """The best trials, without those whose answers nobody would have the time to ask for.

    Those with numbers of `first` come before others.

    As long as there is too little time for all, whoever takes longest to ask gives up the place to
    the next best.
    """
    left_out: list[Entry] = []
    longest_s = 0.0
    while True:
        able = [one for one in points if one not in left_out]
        chosen = finalists(goal, able, gates, budget.finalists, first)
        asking_s = 0.0 if quality is None else quality.expected_s(chosen)
        if quality is None or not asking_s or asking_s + confirmation_s(points, budget) <= left_s:
            return Finals(chosen, left_out, longest_s)
        slowest = max(chosen, key=lambda one: quality.expected_s([one]))
        left_out.append(slowest)
        longest_s = max(longest_s, asking_s)


def trial_s(points: Sequence[Entry]) -> float:
    """What a whole trial took so far as the median, without questions of quality; 0 without any.

    It is one on a server of its own, as all are in the confirmation. What a first server takes once
    for all, such as the import of the engine, is no part of it.
    """
    found = [entry.measurement for entry in points]
    starts = [one.start_s for one in found if one.start_s is not None and not _is_live(one)]
    start_s = median(starts) if starts else 0.0
    walls = [
        own_s + (start_s - (one.start_s or 0.0) if _is_live(one) else 0.0)
        for one in found
        if one.status is not Status.CUT and (own_s := _own_s(one)) is not None
    ]
    return median(walls) if walls else 0.0


def _own_s(one: Measurement) -> float | None:
    """What a measurement took, by its parts where they are known."""
    if one.start_s is not None and one.warmup_s is not None and one.load_s is not None:
        return one.start_s + one.warmup_s + one.load_s + (one.stop_s or 0.0)
    return None if one.wall_s is None else one.wall_s - one.asked_s


def _is_live(measurement: Measurement) -> bool:
    """Whether a running server was changed for it, and none started."""
    effective = measurement.effective
    return effective is not None and effective.start_kind == "live"


def needed_s(
    points: Sequence[Entry],
    chosen: Sequence[Entry],
    budget: Budget,
    quality: TrialQuality | None,
    *,
    may_harm: bool,
) -> float:
    """What one more trial takes, and then the confirmation and the questions to its finalists.

    `chosen` are those that would be finalists now. `may_harm`: the trial may change answers, so it
    is asked a screen, and must be asked as a finalist if it comes out best. What that takes is a
    guess until a screen was seen, and too rough a one to keep a first trial from being tried.
    """
    if quality is None:
        return trial_s(points) + confirmation_s(points, budget)
    asking_s = quality.expected_s([], newcomers=1, final=False) if may_harm else 0.0
    if may_harm and any(quality.verdict(entry.trial.number) for entry in points):
        asking_s += quality.expected_s(chosen[: budget.finalists - 1], newcomers=1)
    else:
        asking_s += quality.expected_s(chosen)
    return trial_s(points) + confirmation_s(points, budget) + asking_s


def confirmation_s(points: Sequence[Entry], budget: Budget) -> float:
    """What the confirmation takes as a rule, without questions.

    While there is little to confirm, what it takes at least: with little time, few rounds of
    something are worth more than many of nothing.
    """
    rounds = budget.confirm_rounds
    runs = usual(rounds) if len(points) > budget.finalists else looks(rounds)[0]
    finalists_most = min(budget.finalists, len(points))
    return trial_s(points) * runs * (finalists_most + 1) / budget.repeats
