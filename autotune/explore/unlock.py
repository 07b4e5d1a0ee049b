"""Why settings that may change answers are tried from some trial on, in words."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.autotune.decide import meets_goal
from kvtune.autotune.ledger import Entry
from kvtune.types import Goal, Harm


def unlock_reason(
    goal: Goal,
    points: Sequence[Entry],
    *,
    is_asked_for: bool,
    has_lossless: bool,
    is_exhausted: bool,
    is_unlikely: bool,
) -> str:
    """Why near-lossless settings are tried from now on, in one sentence.

    `points` were measured so far, those that run alike as one. `is_exhausted`: all lossless
    configurations were tried, or cannot run. `is_unlikely`: those that are left hardly can.
    """
    lossless = [entry for entry in points if entry.trial.stack.harm is Harm.LOSSLESS]
    met = sum(meets_goal(goal, entry.measurement) for entry in lossless)
    stood = f"{met} of {len(lossless)} lossless trials met the goal by then"
    if is_asked_for:
        why = "it was asked for"
    elif not has_lossless:
        why = "no lossless setting can be searched here"
    elif is_exhausted:
        why = "no lossless configuration is left"
    elif is_unlikely:
        why = "no lossless configuration that is left is likely to meet the goal"
    else:
        why = "the lossless share of the budget is spent and the goal is missed"
    return f"settings that may change answers are tried from here on: {why}; {stood}"
