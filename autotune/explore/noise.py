"""What measurements say of a response, and how far one measurement of it may be off."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtune.autotune.explore.base import Observation
from kvtune.autotune.explore.responses import RATE, SHARE
from kvtune.autotune.explore.surrogate import Samples

NOISE: Mapping[str, float] = {RATE: 0.05, SHARE: 0.0}
LIMIT_NOISE = 0.1
"""Standard deviation of one measurement where nobody says it. What a share lacks in requests is
added to it."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The standard deviation of one measurement of a response in natural logs, by its name.

    `requests` is how many a run has.
    """

    by_name: Mapping[str, float]
    requests: int

    def samples(
        self,
        name: str,
        rows: Sequence[int],
        seen: Sequence[Observation],
        responses: Callable[[Mapping[str, float]], Mapping[str, float]],
    ) -> Samples:
        """What is known of a response at points, from what was `seen` at each of these `rows`."""
        found = []
        for row, one in zip(rows, seen, strict=True):
            value = responses(one.figures).get(name) if one.failure is None else None
            if value is None:
                continue
            variance = self._own(name) + self._of_share(name, value)
            # A kin's workload is another one: what it says is off by more the less it is alike.
            found.append((row, value, variance / one.share + (1 / one.task - 1) ** 2, one.at_s))
        at, values, variances, times_s = zip(*found, strict=True) if found else ((), (), (), ())
        return Samples(
            np.array(at, dtype=np.intp),
            np.array(values, dtype=np.float64),
            np.array(variances, dtype=np.float64),
            np.array(times_s, dtype=np.float64),
        )

    def variance(self, name: str, samples: Samples) -> float:
        """The variance of one more whole measurement."""
        if name == SHARE and len(samples.variance):
            return max(self._own(name), float(np.median(samples.variance)))
        return self._own(name)

    def _own(self, name: str) -> float:
        return self.by_name.get(name, NOISE.get(name, LIMIT_NOISE)) ** 2

    def _of_share(self, name: str, value: float) -> float:
        """The variance of log odds from as many requests as a run has; 0 for other responses."""
        share = 1 / (1 + math.exp(-value))
        return 1 / (self.requests * share * (1 - share)) if name == SHARE else 0.0
