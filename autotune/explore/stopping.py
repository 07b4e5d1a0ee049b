"""When more trials are not worth their time."""

from __future__ import annotations

LEAST_TRIALS = 8
"""Before so many nothing ends. That the next trial adds little is no reason to end either: where
the model is wrong, that is what it says too."""


def why_stop(*, trials: int, lost: float, enough: float, among: str) -> str:
    """Why a search may end before its budget; empty when it should go on.

    Args:
        trials: how many were measured, repeats counted.
        lost: the share of the best of all that the best measured point is expected to lack.
        enough: the share that it may lack; 0 ends no search.
        among: what "all" are.
    """
    if not enough or trials < LEAST_TRIALS or lost > enough:
        return ""
    return (
        f"the best of {trials} trials is expected to be {lost:.1%} short of the best of {among}, "
        f"of which {enough:.1%} is enough"
    )
