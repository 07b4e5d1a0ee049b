"""When more trials are not worth their time."""

from __future__ import annotations

LEAST_TRIALS = 10
SURE = 0.95
"""Probability of being within 1% of the best from which on nothing more is measured. That another
trial adds little is no reason to end: where the model is wrong, that is what it says too."""


def why_stop(*, trials: int, within: float, among: str) -> str:
    """Why a search may end before its budget; empty when it should go on.

    Args:
        trials: how many were measured, repeats counted.
        within: the probability that the best measured point is within 1% of the best of all.
        among: what "all" are.
    """
    if trials < LEAST_TRIALS or within < SURE:
        return ""
    return (
        f"the best of {trials} trials is within 1% of the best of {among} with a probability of "
        f"{within:.0%}"
    )
