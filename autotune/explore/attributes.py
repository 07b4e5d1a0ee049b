"""What the sampler's tables say of a trial in words, for who reads them with Optuna's own tools.

The sampler itself knows knobs by the place of their value in a list, and never reads these.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from kvtune.autotune.ledger import Entry
from kvtune.policies.stack import describe
from kvtune.types import PolicyStack


def attributes_of(entry: Entry) -> Mapping[str, JsonValue]:
    """A measured trial: its settings, number and rung here, what failed, and what it took."""
    found = entry.measurement
    return {
        "settings": describe(entry.trial.stack),
        "kvtune trial": entry.trial.number,
        "rung": f"L{entry.rung}",
        "seconds": found.wall_s,
        "outcome": found.status if found.failure is None else found.failure.failure,
        "why": found.cut if found.failure is None else found.failure.message,
    }


def attributes_unmeasured(stack: PolicyStack, reason: str) -> Mapping[str, JsonValue]:
    """A point that was never launched."""
    return {"settings": describe(stack), "outcome": "not launched", "why": reason}
