"""What a simulation says of points before they are measured, and which it cannot tell apart.

The simulated engine follows the real scheduler, so its ratios carry how levers act together. They
are no forecast here, only where the search starts from: measurements correct them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from kvtune.autotune.explore.candidates import key_of
from kvtune.autotune.forecast.predict import Forecaster
from kvtune.autotune.forecast.system import MODELLED
from kvtune.profilers.metrics.base import measure

NOT_TOLD = (
    "block-size",
    "enable-prefix-caching",
    "kv-cache-dtype",
    "kv-cache-dtype-skip-layers",
    "prefix-caching-hash-algo",
)
"""Arguments with effects that no simulation has: what a block, a number or a hash costs to handle.
Points that differ in one of them are never taken for the same."""


@dataclass(frozen=True, slots=True)
class Foretold:
    """What is expected of a point: `figures` by flat name of the metric.

    Two points with the same `course` are the same for this load: everything in their runs is equal.
    """

    figures: Mapping[str, float]
    course: Hashable


Foretell = Callable[[Mapping[str, JsonValue]], Foretold | None]
"""Says what arguments on top of the baseline's are expected to do; None where nothing is known."""


def simulated_by(forecaster: Forecaster) -> Foretell:
    """The simulation of a forecaster; arguments that it does not know change nothing in it."""

    def foretell(arguments: Mapping[str, JsonValue]) -> Foretold | None:
        known = {name: value for name, value in arguments.items() if name in MODELLED}
        done = forecaster.simulated(known)
        if done is None:
            return None
        apart = {
            name: value
            for name, value in arguments.items()
            if name in NOT_TOLD or name not in MODELLED
        }
        course = hash((done.run.records, done.preemptions, done.steps)), key_of(apart)
        return Foretold(measure(done.run, forecaster.baseline.goal), course)

    return foretell


@dataclass(slots=True)
class Prior:
    """What is foretold, asked once for each point. Without a `foretell` nothing is."""

    foretell: Foretell | None
    _known: dict[str, Foretold | None] = field(default_factory=dict)

    def of(self, arguments: Mapping[str, JsonValue]) -> Foretold | None:
        """What is expected of a point; None where nothing is known."""
        if self.foretell is None:
            return None
        key = key_of(arguments)
        if key not in self._known:
            self._known[key] = self.foretell(arguments)
        return self._known[key]
