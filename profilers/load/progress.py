"""How far a replay is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A replay under way. `done` counts ended requests, `failed` those of them with an error.

    `output_tokens_per_s` is the average since the start of the run.
    """

    done: int
    failed: int
    total: int
    in_flight: int
    elapsed_s: float
    output_tokens_per_s: float
