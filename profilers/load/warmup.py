"""Whether a server answers as fast at the end of its warm-up as before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvtune.types import RequestRecord

LEAST_STEPS = 6
"""Of one window; the median of fewer says too little."""

TOLERATED = 0.1
"""Steps may take so much longer or shorter in one window than in the one before."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The median time of a decode step, in seconds, in the first and the second half of a pass."""

    before_s: float
    after_s: float

    def __str__(self) -> str:
        before_ms, after_ms = 1000 * self.before_s, 1000 * self.after_s
        return f"its steps took {before_ms:.3g} ms, then {after_ms:.3g} ms"

    @property
    def is_steady(self) -> bool:
        """Whether both halves agree."""
        low, high = sorted((self.before_s, self.after_s))
        return high <= (1 + TOLERATED) * low


def pace_of(records: Sequence[RequestRecord]) -> Pace | None:
    """How fast the steps of a pass were, in two windows of time.

    Only steps of the commonest batch size count, as larger batches take longer, and none that holds
    a prefill. `None` where there are too few to tell.
    """
    import numpy as np

    from kvtune.profilers.step_gaps import observations

    found = observations(records)
    if not len(found):
        return None
    sizes, counts = np.unique(found.sequences, return_counts=True)
    size = int(sizes[counts.argmax()])
    alike = found.where(found.sequences == size)
    steps_s = alike.step_s[np.argsort(alike.group, kind="stable")].tolist()
    half = len(steps_s) // 2
    if half < LEAST_STEPS * size:  # Each sequence of a batch tells of the same step.
        return None
    return Pace(median(steps_s[:half]), median(steps_s[half:]))
