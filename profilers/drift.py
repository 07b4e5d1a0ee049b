"""Whether the machine itself became slower or faster within a run.

Decode steps say it: what a step costs by its sequences and resident tokens is fitted together with
a trend over time, so that a cache which fills up is not taken for a machine that slows down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtune.profilers.statistics import Estimate, t_quantile
from kvtune.profilers.step_gaps import Floats, Observations, observations
from kvtune.types import RequestRecord

MATTERS = 0.1
"""A change that makes a run's figures doubtful: their mean moves by half of it, which is about what
repeats differ by without any."""

SURE_T = 3.0
"""Standard errors that a trend has to be away from none, so that few quiet runs are doubted."""

LEAST_BLOCKS = 12
LEAST_OWN_SHARE = 0.05
"""Of the variance of time, what sequences and resident tokens leave unexplained; with less, a trend
cannot be told from theirs."""


class Drift(NamedTuple):
    """A change from the beginning to the end, as a share of the mean, with its 95% interval.

    `t` is how many standard errors it is away from none.
    """

    change: Estimate
    t: float

    @property
    def matters(self) -> bool:
        """Whether it is there beyond doubt and large enough to spoil figures."""
        estimate, low, high = self.change
        is_there = low is not None and high is not None and (low > 0 or high < 0)
        return is_there and abs(estimate) > MATTERS and abs(self.t) > SURE_T


def drift_within(records: Sequence[RequestRecord]) -> Drift | None:
    """The change of a decode step's time over one run; positive when the machine slowed down.

    `None` where too few stretches of the run hold steps of a full batch, or where time cannot be
    told from what fills up with it.
    """
    found = observations(records)
    clear = found.where(found.is_clear)
    blocks = _blocks(clear)
    if len(blocks) < LEAST_BLOCKS:  # Under a queue somebody always waits: a prefill may be in all.
        blocks = _blocks(found)
    if len(blocks) < LEAST_BLOCKS:
        return None
    time, step_s, sequences, resident = blocks.T
    return _trend(time / time[-1], step_s, np.column_stack((sequences, resident)))


def drift_warning(records: Sequence[RequestRecord]) -> str | None:
    """What to say of a run during which the machine changed; `None` if it did not, as far as known.

    A machine that became faster is doubtful too: it was slow before, for a reason that may be back.
    """
    drift = drift_within(records)
    if drift is None or not drift.matters:
        return None
    estimate, low, high = drift.change
    word = "slower" if estimate > 0 else "faster"
    bounds = sorted((abs(low or 0.0), abs(high or 0.0)))
    return (
        f"the machine became {abs(estimate):.0%} {word} during this run "
        f"({bounds[0]:.0%} to {bounds[1]:.0%}, by its decode steps): something else may use it"
    )


def _blocks(found: Observations) -> Floats:
    """Stretches of time in order, without those of small batches, as at a run's beginning and end.

    (blocks, 4): their number from 1, the median of a step's time, sequences and resident tokens.
    """
    if len(found) == 0:
        return np.empty((0, 4))
    full = found.where(found.sequences >= np.median(found.sequences) / 2)
    table = np.column_stack((full.group + 1, full.step_s, full.sequences, full.resident_tokens))
    return np.array([np.median(table[full.group == g], axis=0) for g in np.unique(full.group)])


def _trend(time: Floats, values: Floats, beside: Floats) -> Drift | None:
    """Least squares of values on time from 0 to 1 and what is `beside` it, (values, columns).

    Neighbours that err alike count as fewer values: the error is that of a first-order
    autoregression (Bayley and Hammersley, 1946).
    """
    design = np.column_stack((np.ones(len(time)), beside))
    design = design / np.maximum(np.abs(design).max(axis=0), 1e-300)
    freedom = len(values) - int(np.linalg.matrix_rank(design)) - 1
    own_time = time - design @ np.linalg.lstsq(design, time, rcond=None)[0]
    if freedom < 1 or own_time @ own_time < LEAST_OWN_SHARE * len(time) * time.var():
        return None
    rest = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
    slope = float(own_time @ rest) / float(own_time @ own_time)
    left = rest - slope * own_time
    squares = float(left @ left)
    alike = max(0.0, float(left[1:] @ left[:-1]) / squares) if squares else 0.0
    error = math.sqrt(squares / freedom / float(own_time @ own_time))
    error *= math.sqrt((1 + alike) / (1 - alike))
    mean = float(values.mean())
    half = t_quantile(0.975, freedom) * error
    return Drift(
        Estimate(slope / mean, (slope - half) / mean, (slope + half) / mean),
        slope / error if error else math.copysign(math.inf, slope) if slope else 0.0,
    )
