"""What is left of a budget will have to pay for: the next trial, and the confirmation after it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import Budget
from kvtune.autotune.quality.trials import TrialQuality


def trial_s(points: Sequence[Entry]) -> float:
    """What a trial took so far, without questions of quality, as the median; 0 without any."""
    found = [entry.measurement for entry in points]
    walls = [one.wall_s - one.asked_s for one in found if one.wall_s is not None]
    return median(walls) if walls else 0.0


def needed_s(
    points: Sequence[Entry], chosen: Sequence[Entry], budget: Budget, quality: TrialQuality | None
) -> float:
    """What one more trial takes, and then the confirmation and the questions to its finalists.

    `chosen` are those that would be finalists now.
    """
    screens = [e.measurement.asked_s for e in points if e.trial.number and e.measurement.asked_s]
    asking_s = median(screens) if screens else 0.0
    if quality is not None:
        asking_s += quality.expected_s(chosen)
    return trial_s(points) + confirmation_s(points, budget) + asking_s


def confirmation_s(points: Sequence[Entry], budget: Budget) -> float:
    """What the confirmation takes, without questions."""
    runs = budget.confirm_rounds * (budget.finalists + 1)
    return trial_s(points) * runs / budget.repeats
