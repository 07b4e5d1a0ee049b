"""Trials that are one and the same for the engine, whatever it was asked for.

An engine may take an argument as something else than was passed, or not at all. What it says that
it runs with then equals that of another trial, and a measurement of one is a repeat of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtune.autotune.confirm import merged
from kvtune.autotune.forecast.experience import ABOUT_THE_START
from kvtune.autotune.ledger import Entry
from kvtune.engines.vllm.effective import unread
from kvtune.types import Harm, Status, fingerprint_of


def twins(points: Sequence[Entry]) -> dict[int, int]:
    """By the number of a trial that runs as another does, the number of that other.

    Of several that run alike, the least harmful, then the first stands for all.
    """
    return {
        entry.trial.number: first.trial.number
        for first, *others in _alike(points)
        for entry in others
    }


def pooled(points: Sequence[Entry]) -> list[Entry]:
    """The points by number, without twins, whose values are repeats of the one they run as."""
    found = [
        replace(alike[0], measurement=merged([entry.measurement for entry in alike]))
        for alike in _alike(points)
    ]
    return sorted(found, key=lambda entry: entry.trial.number)


def _alike(points: Sequence[Entry]) -> list[list[Entry]]:
    """The points in groups that run alike, first the one that stands for its group."""
    groups: dict[str, list[Entry]] = {}
    for entry in points:
        groups.setdefault(_running(entry), []).append(entry)
    return [sorted(group, key=_harm_and_number) for group in groups.values()]


def _running(entry: Entry) -> str:
    """What the engine ran with: what it says, and the arguments of which it does not say how."""
    effective = entry.measurement.effective
    if effective is None or entry.measurement.status is not Status.OK:
        return f"trial {entry.trial.number}"
    return fingerprint_of(
        [
            effective.model_dump(mode="json", exclude=ABOUT_THE_START),
            unread(entry.trial.arguments, effective),
        ]
    )


def _harm_and_number(entry: Entry) -> tuple[int, int]:
    return list(Harm).index(entry.trial.stack.harm), entry.trial.number
