"""How likely a point runs, learnt from those that did and those that did not.

Crashes come with values of a knob, or with two together, so they are learnt as responses are: by a
Gaussian process on what happened, +1 for a run and -1 for a failure, that expects runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtune.autotune.explore.base import NOT_OF_THE_POINT
from kvtune.autotune.explore.likeness import ROUGH, USUAL_AT, Field, Floats, Ints
from kvtune.types import FailureClass

UNDER_LOAD = frozenset(
    {
        FailureClass.CRASH_UNDER_LOAD,
        FailureClass.HANG_UNDER_LOAD,
        FailureClass.BROKEN_OUTPUT,
        FailureClass.REQUEST_ERRORS,
    }
)
"""Failures of servers that had started."""

EXPECTED, NOISE = 1.0, 0.1
"""What is expected of a point before anything was seen, and the variance of what is seen."""


def chance_to_run(
    field: Field, rows: Ints, failures: Sequence[FailureClass | None], tasks: Floats
) -> Floats:
    """The probability that each point starts and carries the load, (points,).

    Args:
        field: the points.
        rows: (launches,) which points were launched.
        failures: (launches,) what became of each; None: it ran.
        tasks: (launches,) how alike the workload of each and this one are; 1: the same.
    """
    seen = [at for at, failure in enumerate(failures) if failure not in NOT_OF_THE_POINT]
    started = [at for at in seen if failures[at] is None or failures[at] in UNDER_LOAD]
    starts = np.array([1.0 if at in started else -1.0 for at in seen])
    carries = np.array([1.0 if failures[at] is None else -1.0 for at in started])
    chance = np.ones(field.points)
    if any(failures[at] is not None for at in seen):
        alike = _alike(field)
        for launches, outcomes in ((seen, starts), (started, carries)):
            chosen = np.array(launches, dtype=np.intp)
            chance *= _chance(alike, rows[chosen], outcomes, NOISE + (1 / tasks[chosen] - 1) ** 2)
    return chance


def _alike(field: Field) -> Floats:
    everywhere, lengths = np.arange(field.points), np.full((1, field.knobs), USUAL_AT)
    additive, joint = field.alike(lengths, np.array([ROUGH]), everywhere, everywhere)
    found: Floats = (additive[0] + joint[0]) / 2
    return found


def _chance(alike: Floats, rows: Ints, outcomes: Floats, noise: Floats) -> Floats:
    if np.all(outcomes > 0):
        # Nothing ever failed: nothing is known to avoid.
        return np.ones(len(alike))
    inside = alike[np.ix_(rows, rows)] + np.diag(noise)
    gain = np.linalg.solve(inside, alike[rows])
    mean = EXPECTED + (outcomes - EXPECTED) @ gain
    spread = np.sqrt(np.maximum(1 - (gain * alike[rows]).sum(axis=0), 0.0) + NOISE)
    return normal_cdf(mean / spread)


def normal_cdf(values: Floats) -> Floats:
    """The standard normal distribution function, to 0.01 (a logistic curve in its place)."""
    found: Floats = 1 / (1 + np.exp(np.clip(-1.702 * values, -700.0, 700.0)))
    return found
