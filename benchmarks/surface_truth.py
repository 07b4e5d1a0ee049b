"""What a recorded surface says: how the machine drifted, what each point is worth, how unsure.

A machine that is slower makes every time of a run longer by the same factor. So a run is put right
by scaling its times, and any goal can then be applied to it. Three things are told apart:

    log(rate) = point + drift(time) + noise

Drift is a local line through the stock measurements of a session. Noise is what is left between
measurements of one point. The point itself is an empirical-Bayes mean: the best of 168 noisy values
is a lucky one, so values are drawn towards what the levers and their pairs explain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from random import Random
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from surface_file import Line, Recording, run_of
from surface_spec import Point

from kvtune.profilers.goal import goal_violations
from kvtune.profilers.metrics.base import measure
from kvtune.types import FailureClass, Goal, LoadRun, RequestRecord

Floats = NDArray[np.float64]

DRIFTS_S = (300.0, 750.0, 1500.0, 3000.0)
"""Times over which the speed of a machine may be taken to change along a line. The one counts from
which each stock measurement is told best by the others."""

PREEMPTING = 0.1
"""Preemptions a request from which a run counts as one that preempts; those are noisier."""

LEAST_NOISE = 0.01
"""Standard deviation of a log rate that is taken for the least there is."""

FEWEST = 5
"""Degrees of freedom that noise of its own is worth."""

BLOCK_REQUESTS = 4
"""Requests that are drawn together, because neighbours shared their steps."""

SHARES = (0.001, 0.01, 0.1, 0.3, 1.0)
"""Parts of the variance of all values that a component may have."""


@dataclass(frozen=True, slots=True)
class PointTruth:
    """What is known of a point: runs as at mean speed, or the way in which it fails.

    `log_rate` is the log of requests a second, with its standard deviation; the times of `runs` are
    scaled so that each has that. `noise` has factors by which the log rate of one measurement
    may be off, `aside_s` is what a measurement takes beside its load, `server_s` what of that its
    server takes to start and to end, and `lines` how often the point was measured.
    """

    runs: tuple[LoadRun, ...]
    log_rate: float
    log_rate_sd: float
    noise: tuple[float, ...]
    aside_s: float
    lines: int
    server_s: float = 0.0
    failure: FailureClass | None = None
    message: str = ""

    def figures(self, goal: Goal) -> dict[str, float]:
        """Means of the metrics that are expected of a measurement; none of a point that fails."""
        found = [measure(run, goal) for run in self.runs]
        names = set.intersection(*(set(one) for one in found)) if found else set()
        return {name: fmean(one[name] for one in found) for name in sorted(names)}

    def value(self, goal: Goal) -> float:
        """The objective that is expected; 0 of a point that fails or misses a limit."""
        return value_of(self.figures(goal), goal)

    def draw(self, random: Random, slowness: float = 1.0) -> LoadRun:
        """One more measurement of a point that does not fail.

        Requests are drawn anew from those of one run, and its speed from the noise.
        """
        run = random.choice(self.runs)
        factor = slowness * float(np.exp(-random.choice(self.noise)))
        return scaled(replace(run, records=resampled(run.records, random)), factor)


@dataclass(frozen=True, slots=True)
class Truth:
    """A whole surface: its points, and how slow the machine was as the recording went on.

    `ended_s` is when each measurement ended, pauses between sessions left out.
    """

    points: Mapping[Point, PointTruth]
    ended_s: Floats
    slow: Floats

    def slowness(self, at_s: float) -> float:
        """By what factor a run takes longer at a time of the recording; it begins again at its
        end."""
        return float(np.interp(at_s % self.ended_s[-1], self.ended_s, self.slow))


def truth_of(recording: Recording, *, shrink: bool = True) -> Truth:
    """Work out what a recording says. Without `shrink` a point is the mean of its measurements."""
    drift = drift_of(recording.lines)
    by_point: dict[Point, list[Line]] = defaultdict(list)
    for line in recording.lines:
        by_point[tuple(line.point)].append(line)
    runs = {
        point: [
            scaled(run_of(line), 1 / drift(line.session, line.at_s)) for line in lines if line.ok
        ]
        for point, lines in by_point.items()
    }
    runs = {point: found for point, found in runs.items() if found}
    noise = _noise(runs)
    points = list(runs)
    rates = [_log_rates(runs[point]) for point in points]
    means = np.array([fmean(one) for one in rates])
    variances = np.array(
        [noise[_is_preempting(runs[point])].variance / len(runs[point]) for point in points]
    )
    spread = np.sqrt(variances)
    if shrink and len(points) > 2:
        means, spread = shrunk(points, means, variances)
    found: dict[Point, PointTruth] = {}
    for point, mean, sd, own in zip(points, means, spread, rates, strict=True):
        # Each by itself: what runs differ by is in the noise, and would count twice.
        alike = zip(runs[point], own, strict=True)
        lines = by_point[point]
        found[point] = PointTruth(
            runs=tuple(scaled(run, float(np.exp(rate - mean))) for run, rate in alike),
            log_rate=float(mean),
            log_rate_sd=float(sd),
            noise=noise[_is_preempting(runs[point])].residuals,
            aside_s=fmean(line.wall_s - (line.load_s or 0.0) for line in lines if line.ok),
            lines=len(lines),
            server_s=fmean((one.start_s or 0.0) + (one.stop_s or 0.0) for one in lines if one.ok),
        )
    for point in by_point.keys() - runs.keys():
        found[point] = _failing(by_point[point])
    return Truth(
        points=found,
        ended_s=np.cumsum([line.wall_s for line in recording.lines]),
        slow=np.array([drift(line.session, line.at_s) for line in recording.lines]),
    )


def value_of(figures: Mapping[str, float], goal: Goal) -> float:
    """The objective of what was measured; 0 where a limit is missed or nothing was measured."""
    violations = goal_violations(goal, figures).values()
    if any(violation is None or violation > 0 for violation in violations):
        return 0.0
    return figures.get(goal.objective_metric, 0.0)


def drift_of(lines: Sequence[Line]) -> Callable[[int, float], float]:
    """How slow the machine was in a session at a time: 1 is the mean of all stock measurements."""
    references = [line for line in lines if line.kind == "reference" and line.load_s]
    middle = fmean(np.log(line.load_s or 1.0) for line in references) if references else 0.0
    by_session: dict[int, tuple[Floats, Floats]] = {}
    for session in {line.session for line in references}:
        own = [line for line in references if line.session == session]
        by_session[session] = (
            np.array([line.at_s for line in own]),
            np.array([np.log(line.load_s or 1.0) for line in own]) - middle,
        )

    width_s = min(DRIFTS_S, key=lambda one_s: _missed(by_session.values(), one_s))

    def slowness(session: int, at_s: float) -> float:
        if session not in by_session:
            return 1.0
        return float(np.exp(_local_line(*by_session[session], at_s, width_s)))

    return slowness


def scaled(run: LoadRun, factor: float) -> LoadRun:
    """A run as on a machine that takes `factor` times as long for everything."""
    return replace(
        run,
        duration_s=run.duration_s * factor,
        records=tuple(
            replace(
                record,
                scheduled_s=record.scheduled_s * factor,
                sent_s=record.sent_s * factor,
                first_token_s=None
                if record.first_token_s is None
                else record.first_token_s * factor,
                end_s=record.end_s * factor,
                gaps_s=tuple(gap_s * factor for gap_s in record.gaps_s),
            )
            for record in run.records
        ),
    )


def resampled(records: Sequence[RequestRecord], random: Random) -> tuple[RequestRecord, ...]:
    """As many requests, drawn with replacement in blocks of neighbours by when they were sent.

    Each keeps its own times, so that the drawn run ends about when the real one did.
    """
    ordered = sorted(records, key=lambda record: (record.sent_s, record.index))
    starts = range(0, len(ordered), BLOCK_REQUESTS)
    drawn: list[RequestRecord] = []
    while len(drawn) < len(ordered):
        first = random.choice(starts)
        drawn += ordered[first : first + BLOCK_REQUESTS]
    drawn = sorted(drawn[: len(ordered)], key=lambda record: record.sent_s)
    return tuple(replace(record, index=index) for index, record in enumerate(drawn))


def shrunk(points: Sequence[Point], values: Floats, variances: Floats) -> tuple[Floats, Floats]:
    """Empirical-Bayes means and standard deviations of noisy values on a grid.

    The model is main effects, pairs and a rest of its own for each point, whose variances are those
    under which the values are most likely. All arrays are (points,).
    """
    main, pairs = _kernels(points)
    rest = np.eye(len(points))
    total = max(float(values.var()), 1e-9)
    best = (-np.inf, rest)
    for parts in product(SHARES, (0.0, *SHARES), SHARES):
        kernel = total * (parts[0] * main + parts[1] * pairs + parts[2] * rest)
        likelihood = _log_likelihood(kernel + np.diag(variances), values)
        if likelihood > best[0]:
            best = (likelihood, kernel)
    kernel = best[1]
    whole = kernel + np.diag(variances)
    solved = np.linalg.solve(whole, np.column_stack((values, np.ones(len(values)))))
    middle = solved[:, 0].sum() / solved[:, 1].sum()
    means = middle + kernel @ (solved[:, 0] - middle * solved[:, 1])
    left = kernel - kernel @ np.linalg.solve(whole, kernel)
    return means, np.sqrt(np.maximum(np.diag(left), 0.0))


@dataclass(frozen=True, slots=True)
class _Noise:
    variance: float
    residuals: tuple[float, ...]


def _noise(runs: Mapping[Point, Sequence[LoadRun]]) -> dict[bool, _Noise]:
    """What measurements of a point differ by, for points that preempt (True) and others."""
    residuals: dict[bool, list[float]] = {False: [], True: []}
    freedom = {False: 0, True: 0}
    for found in runs.values():
        if len(found) < 2:
            continue
        rates = _log_rates(found)
        kind = _is_preempting(found)
        # As wide as they would be around the true mean.
        wider = (len(rates) / (len(rates) - 1)) ** 0.5
        residuals[kind] += [(rate - fmean(rates)) * wider for rate in rates]
        freedom[kind] += len(rates) - 1
    both = residuals[False] + residuals[True]
    chosen = {kind: residuals[kind] if freedom[kind] >= FEWEST else both for kind in freedom}
    return {kind: _noise_of(found) for kind, found in chosen.items()}


def _noise_of(residuals: Sequence[float]) -> _Noise:
    variance = fmean(one * one for one in residuals) if residuals else 0.0
    if variance < LEAST_NOISE**2:
        return _Noise(LEAST_NOISE**2, (-LEAST_NOISE, LEAST_NOISE))
    return _Noise(variance, tuple(residuals))


def _failing(lines: Sequence[Line]) -> PointTruth:
    fault = lines[-1].failure
    return PointTruth(
        runs=(),
        log_rate=-np.inf,
        log_rate_sd=0.0,
        noise=(),
        aside_s=fmean(line.wall_s for line in lines),
        lines=len(lines),
        failure=fault.failure if fault else FailureClass.UNKNOWN,
        message=fault.message if fault else "",
    )


def _log_rates(runs: Sequence[LoadRun]) -> list[float]:
    return [
        float(np.log(max(1, sum(record.ok for record in run.records)) / run.duration_s))
        for run in runs
    ]


def _is_preempting(runs: Sequence[LoadRun]) -> bool:
    preempted = fmean(run.counters.get("vllm:num_preemptions_total", 0.0) for run in runs)
    return preempted > PREEMPTING * len(runs[0].records)


def _missed(sessions: Iterable[tuple[Floats, Floats]], width_s: float) -> float:
    """How far stock measurements are from what the others of their session say, squared."""
    total = 0.0
    for at_s, values in sessions:
        for left_out in range(len(at_s) if len(at_s) > 1 else 0):
            others = np.arange(len(at_s)) != left_out
            told = _local_line(at_s[others], values[others], at_s[left_out], width_s)
            total += (values[left_out] - told) ** 2
    return total


def _local_line(at_s: Floats, values: Floats, here_s: float, width_s: float) -> float:
    """The value at a time of a line through the values around it; of one value, that one."""
    away = at_s - here_s
    weights = np.exp(-0.5 * (away / (width_s / 2)) ** 2) + 1e-12
    weights /= weights.sum()
    middle, mean = weights @ away, weights @ values
    width = weights @ (away - middle) ** 2
    # Too few or too close together to say which way it goes.
    if len(at_s) < 4 or width < (width_s / 20) ** 2:
        return float(mean)
    slope = weights @ ((away - middle) * (values - mean)) / width
    return float(mean - slope * middle)


def _kernels(points: Sequence[Point]) -> tuple[Floats, Floats]:
    """How alike points are: the share of levers, and of pairs of levers, with the same value."""
    table = [[str(value) for value in point] for point in points]
    columns = list(zip(*table, strict=True))
    same = [np.equal.outer(np.array(column), np.array(column)) for column in columns]
    main = np.mean(np.array(same, dtype=np.float64), axis=0)
    both = [one & other for one, other in combinations(same, 2)]
    pairs = np.mean(np.array(both or same, dtype=np.float64), axis=0)
    return main, pairs


def _log_likelihood(covariance: Floats, values: Floats) -> float:
    """Of values with an unknown mean."""
    try:
        lower = np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        return -np.inf
    solved = np.linalg.solve(lower, np.column_stack((values, np.ones(len(values)))))
    of_ones = solved[:, 1] @ solved[:, 1]
    left = solved[:, 0] - solved[:, 1] * (solved[:, 1] @ solved[:, 0]) / of_ones
    return float(-np.log(np.diag(lower)).sum() - 0.5 * (left @ left + np.log(of_ones)))
