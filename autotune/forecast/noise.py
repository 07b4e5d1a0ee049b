"""How far one measurement of a figure is from the next: what every forecast is unsure of at least.

Repeats of the baseline say it best. A run that was made once is cut into stretches of equally many
requests: the simulated baseline goes through the same stretches, warm-up and drain included, so
that what is left between the two is noise, and what the model misses for a while.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from kvtune.profilers.metrics.base import measure
from kvtune.types import Goal, LoadRun

STRETCHES = 4
BETWEEN_SERVERS = 0.03
"""Between two servers with the same arguments, minutes apart, which no single run shows. Assumed: a
machine that others used too gave 5% less goodput and 13% longer steps the one time it was tried."""

LEAST_REQUESTS = 4
"""In a stretch, so that its figures mean something."""

CLUMPED = 0.25
"""A stretch that is over in a quarter of the mean one holds requests that ended together, as those
of a closed loop do that were sent together; rates of such stretches mean nothing."""


def noise_of(
    names: Iterable[str],
    measured: LoadRun,
    simulated: LoadRun,
    goal: Goal,
    repeats: Mapping[str, Sequence[float]],
) -> dict[str, float]:
    """Standard deviation of what is measured under each name, as a share of it.

    The larger one of that over `repeats` and over stretches of the run, and what servers differ by.
    """
    by_stretch = _by_stretch(measured, simulated, goal)
    found = {}
    for name in names:
        known = [*_of_repeats(repeats.get(name, ())), *_of_stretches(name, by_stretch)]
        found[name] = math.hypot(max(known, default=0.0), BETWEEN_SERVERS)
    return found


def _of_repeats(values: Sequence[float]) -> list[float]:
    if len(values) < 2 or not (mean := fmean(values)):
        return []
    return [stdev(values) / abs(mean) / math.sqrt(len(values))]


def _of_stretches(
    name: str, by_stretch: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]
) -> list[float]:
    pairs = [(real[name], told[name]) for real, told in by_stretch if name in real and name in told]
    if len(pairs) < STRETCHES or not (mean := fmean(real for real, _ in pairs)):
        return []
    apart = [(real - told) / mean for real, told in pairs]
    return [stdev(apart) / math.sqrt(len(apart))]


def _by_stretch(
    measured: LoadRun, simulated: LoadRun, goal: Goal
) -> list[tuple[Mapping[str, float], Mapping[str, float]]]:
    real, told = _stretches(measured), _stretches(simulated)
    if not real or not told:
        return []
    return [
        (measure(one, goal), measure(other, goal)) for one, other in zip(real, told, strict=True)
    ]


def _stretches(run: LoadRun) -> list[LoadRun]:
    """Equally many requests in the order in which they ended.

    None of a run that is too short, or whose requests ended in clumps.
    """
    ended = sorted((record for record in run.records if record.ok), key=lambda one: one.end_s)
    if len(ended) < STRETCHES * LEAST_REQUESTS:
        return []
    found, began_s = [], 0.0
    for part in range(STRETCHES):
        records = ended[len(ended) * part // STRETCHES : len(ended) * (part + 1) // STRETCHES]
        found.append(replace(run, records=tuple(records), duration_s=records[-1].end_s - began_s))
        began_s = records[-1].end_s
    durations_s = [one.duration_s for one in found]
    return [] if min(durations_s) < CLUMPED * fmean(durations_s) else found
