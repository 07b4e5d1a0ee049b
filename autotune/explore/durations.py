"""What trials take: a constant for the server, and a part that goes with 1 / rate for the load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvtune.autotune.explore.likeness import Floats

LEAST = 4
"""Trials from which on it is known how the seconds of a trial depend on its rate."""

LEAST_SHARE = 0.2
"""Of the mean: no trial is thought to take less, however steep the line through the others is."""


def seconds_of_trials(
    walls_s: Sequence[float], rates: Mapping[int, float], expected: Floats
) -> Floats:
    """The seconds that a trial of each point should take, (points,).

    Args:
        walls_s: what each trial so far took.
        rates: requests a second by trial, of those that were whole and did not fail.
        expected: (points,) requests a second.
    """
    mean_s = float(np.mean(walls_s)) if len(walls_s) else 1.0
    inverse = np.array([1 / rate for rate in rates.values()])
    if len(inverse) < LEAST or np.ptp(inverse) == 0:
        return np.full(len(expected), max(mean_s, 1e-9))
    slope_s, fixed_s = np.polyfit(inverse, [walls_s[trial] for trial in rates], 1)
    found: Floats = np.maximum(fixed_s + max(0.0, slope_s) / expected, LEAST_SHARE * mean_s)
    return found
