"""How far a chosen point may be from the best one, by draws over all points, measured or not."""

from __future__ import annotations

import numpy as np

from kvtune.autotune.explore.acquire import Outlook
from kvtune.autotune.explore.likeness import Floats
from kvtune.types import Regret

WITHIN = {"1%": 0.01, "2%": 0.02, "5%": 0.05}
SURE = 0.95
MOST = 10.0
"""What is told of a best point that may be better by any factor."""

UNKNOWN = 0.05
"""Chance of being within 5% of the best below which nothing is known, if that may be `MOST`."""


def excess(outlook: Outlook, chosen: int, runs: Floats) -> Floats:
    """By how much the best point of each draw is better than the chosen one, as a share; (DRAWS,).

    Args:
        outlook: what is believed.
        chosen: the point, measured.
        runs: (points,) probability that each can be served; 0 for those that may not be chosen.
    """
    values = np.where(outlook.drawn_to_hold(), outlook.drawn(), 0.0)
    rng = np.random.default_rng(0)
    values = np.where(rng.random(values.shape) < runs, values, 0.0)
    # The chosen one ran. Where its limits fail in a draw there is no telling what it is worth.
    own = np.where(outlook.drawn_to_hold()[:, chosen], outlook.drawn()[:, chosen], 0.0)
    best = np.maximum(values.max(axis=1), own)
    found: Floats = np.divide(best, own, out=np.full(len(own), np.inf), where=own > 0) - 1
    return np.where(best > 0, found, 0.0)


def expected_loss(behind: Floats) -> float:
    """The share of the best that the chosen point is expected to lack, of its `excess`.

    Where it misses a limit itself, that is all of it.
    """
    return float(1 - np.mean(1 / (1 + behind)))


def regret_of(outlook: Outlook, chosen: int, runs: Floats, among: str) -> Regret:
    """Say how far `chosen` may be from the best `among` what is known, in words; see `excess`."""
    behind = excess(outlook, chosen, runs)
    within = {text: float((behind <= share).mean()) for text, share in WITHIN.items()}
    bound = float(min(MOST, np.sort(behind)[int(np.ceil(SURE * len(behind))) - 1]))
    points = int((runs > 0).sum())
    if bound == MOST and within["5%"] < UNKNOWN:
        says = f"the trials do not tell how far it is from the best of {among}"
        return Regret(within=within, bound_ratio=bound, points=points, says=says)
    if (risk := float(np.isinf(behind).mean())) > 1 - SURE:
        rest = f"with {risk:.0%} it misses a limit itself"
    else:
        rest = f"with {SURE:.0%} none is better by more than {bound:.0%}"
    says = f"with {within['2%']:.0%} probability it is within 2% of the best of {among}, and {rest}"
    return Regret(within=within, bound_ratio=bound, points=points, says=says)
