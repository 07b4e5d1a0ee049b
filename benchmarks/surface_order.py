"""What a recorder measures next, and how long all of it takes. Pure: it looks at what there is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
from surface_file import Kind, Line, run_of
from surface_spec import Point, SurfaceSpec

from kvtune.autotune.decide import CANNOT_START
from kvtune.profilers.goal import parse_goal
from kvtune.profilers.metrics.base import measure

REFERENCE_EVERY = 6
"""The stock configuration is every so-manieth measurement."""


class Again(NamedTuple):
    """So many of the best points are measured so often again, by the goal with its limits or none.

    What is told of the best point is the truth that searches are judged by, and a lucky one is not
    it; where limits bite, the best without them are other points.
    """

    best: int
    repeats: int
    limits: bool


STAGES = (Again(24, 2, True), Again(12, 2, False), Again(6, 6, True), Again(6, 6, False))
"""One after the other. A point's repeats count in all of them."""


def next_one(spec: SurfaceSpec, lines: Sequence[Line], session: int) -> tuple[Kind, Point] | None:
    """What is measured now; None: everything was, with the stock configuration as the last.

    A session begins with the stock configuration. All points come before any is repeated.
    """
    chosen = _next_point(spec, lines)
    if chosen is None:
        is_ended = bool(lines) and lines[-1].kind == "reference"
        return None if is_ended else ("reference", spec.stock)
    kinds = [line.kind for line in lines if line.session == session]
    is_due = "reference" not in kinds[1 - REFERENCE_EVERY :]
    return ("reference", spec.stock) if is_due else chosen


def whole_s(spec: SurfaceSpec, lines: Sequence[Line]) -> float | None:
    """How long a whole recording takes, judged by its measurements; None before there are some."""
    points = [line.wall_s for line in lines if line.kind == "point"]
    references = [line.wall_s for line in lines if line.kind == "reference"]
    fast = sorted(line.wall_s for line in lines if line.kind == "point" and line.ok)
    if not points or not references or not fast:
        return None
    # Those that are repeated serve their load fast.
    repeat_s = fmean(fast[: max(1, len(fast) // 3)])
    repeats = _most_repeats(spec)
    count = len(spec.order())
    others = (count + repeats) / (REFERENCE_EVERY - 1)
    return count * fmean(points) + repeats * repeat_s + others * fmean(references)


def _most_repeats(spec: SurfaceSpec) -> int:
    """How many there are if the best points with and without limits are others."""
    total = 0
    for limits in (True, False) if parse_goal(spec.goal).slos else (True,):
        before = 0
        for stage in (stage for stage in STAGES if stage.limits == limits):
            total += stage.best * (stage.repeats - before)
            before = stage.repeats
    return total


def _next_point(spec: SurfaceSpec, lines: Sequence[Line]) -> tuple[Kind, Point] | None:
    measured = {line.point for line in lines if line.kind != "reference"}
    for point in spec.order():
        if point not in measured:
            return "point", point
    repeated = [line.point for line in lines if line.kind == "repeat"]
    by_chance = [
        line.point
        for line in lines
        if line.failure is not None and line.failure.failure not in CANNOT_START
    ]
    for point in by_chance:
        if point not in repeated and point != spec.stock:
            return "repeat", point
    ranked = cache(lambda limits: _ranked(spec, lines, limits=limits))
    for stage in STAGES:
        best = ranked(stage.limits)[: stage.best]
        left = [point for point in best if repeated.count(point) < stage.repeats]
        if left:
            return "repeat", min(left, key=repeated.count)
    return None


def _ranked(spec: SurfaceSpec, lines: Sequence[Line], *, limits: bool) -> list[Point]:
    """The points by goodput, best first, as if the machine had always been as fast."""
    goal = parse_goal(spec.goal)
    if not limits:
        goal = goal.model_copy(update={"slos": ()})
    references = [line for line in lines if line.kind == "reference" and line.load_s]
    at_s = [line.at_s for line in references]
    load_s = [line.load_s or 0.0 for line in references]
    found: dict[Point, list[float]] = defaultdict(list)
    for line in lines:
        if line.ok and line.kind != "reference":
            figures = measure(run_of(line), goal)
            slowness = float(np.interp(line.at_s, at_s, load_s))
            found[line.point].append(figures["goodput_requests_per_s"] * slowness)
    return sorted(found, key=lambda point: -fmean(found[point]))
