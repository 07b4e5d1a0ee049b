"""When more trials are not worth their time."""

from __future__ import annotations

LEAST_TRIALS = 8
SURE = 0.9
"""Probability of being within 2% of the best from which on nothing more is measured."""

WORTHLESS = 0.005
"""What all trials that are left must add together, as a share of the best."""


def why_stop(*, trials: int, trials_left: int, within: float, worth: float, best: float) -> str:
    """Why a search may end before its budget; empty when it should go on.

    Args:
        trials: how many were measured, repeats counted.
        trials_left: how many the budget has left.
        within: the probability that the best measured point is within 2% of the best of all.
        worth: what the next trial is expected to add to the objective.
        best: the objective of the best measured point that meets the goal; 0 if none does.
    """
    if trials < LEAST_TRIALS or best <= 0:
        return ""
    if within >= SURE:
        return (
            f"the best of {trials} trials is within 2% of the best of the space with a "
            f"probability of {within:.0%}"
        )
    gain = worth * trials_left / best
    if gain < WORTHLESS:
        return f"the {trials_left} trials that are left would add {gain:.1%} at most"
    return ""
