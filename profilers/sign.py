"""One sign of a verdict: a reading against a threshold, in words."""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.types import Evidence

TELL_CONFIGURATION = (
    "profile with --model, so that kvtune starts the server, or start it with "
    "VLLM_SERVER_DEV_MODE=1, so that /server_info tells"
)
"""How a user makes a server say what it runs with."""

TELL_SLOTS = f'say it with --engine-args "--max-num-seqs N", {TELL_CONFIGURATION}'
"""How a user makes known how many sequences may run at once."""

NAME_CHECKPOINT = "name the checkpoint's directory with --model, together with --url if it runs"
"""How a user makes the bytes of a model known."""

MEASURE_CEILINGS = (
    "measure the device that the server runs on, while it is idle: kvtune doctor --measure"
)
"""How a user makes known what a device reaches."""

PROBE = "fit what a step costs: kvtune profile --probe"
"""How a user gets a step-time model."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One evidence row, and what to do when its value is missing; empty if it doesn't matter."""

    evidence: Evidence
    fix: str

    @property
    def holds(self) -> bool:
        """Whether it is known and crosses its threshold."""
        return self.evidence.holds is True

    @property
    def fails(self) -> bool:
        """Whether it is known and does not cross its threshold."""
        return self.evidence.holds is False

    @property
    def value(self) -> float | None:
        """The reading, if it can be believed."""
        return None if self.evidence.holds is None else self.evidence.value


def make_sign(
    metric: str,
    value: float | None,
    threshold: float,
    source: str,
    says: str,
    fix: str,
    *,
    unit: str = "share",
    below: bool = False,
) -> Sign:
    """A sign that claims `says` at or above its threshold, or below it."""
    holds = None if value is None else (value < threshold if below else value >= threshold)
    if holds is None:
        says = f"unknown whether {says}"
    elif not holds:
        says = f"no sign that {says}"
    return Sign(
        Evidence(
            metric=metric,
            value=value,
            threshold=threshold,
            unit=unit,
            source=source,
            holds=holds,
            says=says,
        ),
        fix,
    )
