"""What a search may spend, and what it may try."""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.types import Harm


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be spent. `trials` counts the baseline and not the confirmation.

    `probe_s` is for a probe of the baseline's server, 0 for none.
    """

    trials: int
    time_s: float | None = None
    finalists: int = 2
    confirm_rounds: int = 3
    repeats: int = 1
    probe_s: float = 0.0

    @property
    def probe_limit_s(self) -> float:
        """The time for a probe: no more than a tenth of all of it."""
        return self.probe_s if self.time_s is None else min(self.probe_s, self.time_s / 10)


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be tried: the worst harm, and whether harm waits until it is needed."""

    max_harm: Harm = Harm.NEAR_LOSSLESS
    explore_lossy: bool = False
    seed: int = 0
    remeasure: bool = False
