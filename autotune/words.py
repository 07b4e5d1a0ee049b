"""How numbers are put into words, the same in the terminal and on pages."""

from __future__ import annotations

import math
from statistics import fmean

from kvtune.profilers.goal import slo_key
from kvtune.types import Bottleneck, Goal, Interval, Measurement, Verdict

START_KINDS = {
    "cold": "a process of its own",
    "warm": "forked from a process that had the engine loaded",
    "attached": "it ran already, and kvtune only looked",
    "live": "that of the trial before, changed while it ran and read back",
    "narrowed": "started with stock sizes and changed before its load, for later trials to share",
}
"""How a server came to run as it did, by `EffectiveConfig.start_kind`."""

_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def interval(value: Interval | None) -> str:
    """An estimate with its interval, in three significant digits; times with their unit."""
    if value is None:
        return "-"
    factor, unit = (1.0, " s") if value.unit == "s" else (1.0, "")
    if value.unit == "s" and abs(value.estimate) < 1:
        factor, unit = 1000.0, " ms"
    text = digits(factor * value.estimate) + unit
    if value.low is None:
        return text
    if value.high is None:
        return f"{text} (at least {digits(factor * value.low)})"
    return f"{text} ({digits(factor * value.low)} to {digits(factor * value.high)})"


def amount(value: float | None, unit: str = "") -> str:
    """A number in three significant digits with its unit; shares in per cent."""
    if value is None:
        return "-"
    if unit == "share":
        return f"{digits(100 * value)}%"
    per = unit.removeprefix("1/")
    return f"{digits(value)} {f'a {per}' if per != unit else unit}".strip()


def digits(value: float) -> str:
    """A number in three significant digits, written out where it is large."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:g}"


def span(value: Interval) -> str:
    """A time with its interval, in the unit that suits both."""
    text = duration(value.estimate, value)
    if value.low is None or value.high is None:
        return text
    return f"{text} ({duration(value.low, value)} to {duration(value.high, value)})"


def duration(seconds: float, like: Interval | None = None) -> str:
    """Seconds in the unit that suits an interval, else in the one that suits them."""
    largest = seconds if like is None else max(like.estimate, like.high or 0.0)
    factor, unit = next((scale for scale in _SCALES if largest >= scale[0]), _SCALES[-1])
    return f"{digits(seconds / factor)} {unit}"


def percent_change(ratio: Interval | None) -> str:
    """A ratio as a change in per cent, with its range."""
    if ratio is None:
        return "-"
    text = percent(ratio.estimate)
    if ratio.low is None or ratio.low == ratio.high:
        return text
    if ratio.high is None:
        return f"{text} (at least {percent(ratio.low)})"
    return f"{text} ({percent(ratio.low)} to {percent(ratio.high)})"


def percent(ratio: float) -> str:
    """A ratio as a change in per cent."""
    return f"{ratio - 1:+.0%}"


def times_of(goal: Goal) -> dict[str, str]:
    """The times that tell of a trial, with their names: what the goal limits, else p95s."""
    limited = {slo_key(slo): f"{slo.statistic} {slo.metric.upper()}" for slo in goal.slos}
    return limited or {"ttft_p95_s": "p95 TTFT", "itl_p95_s": "p95 ITL"}


def verdict_text(verdict: Verdict) -> str:
    """What a load is bound by, in a few words."""
    if verdict.bottleneck is Bottleneck.ABSTAIN:
        return "no verdict"
    by = "" if verdict.bottleneck is Bottleneck.IDLE else "bound by "
    return f"{by}{verdict.bottleneck} ({verdict.confidence} confidence)"


def load_text(load: float, unit: str) -> str:
    """A load in the unit of a `Boundary`: "14 requests in flight"."""
    if unit == "requests/s":
        return f"{digits(load)} requests a second"
    return f"{load:.0f} {unit}" if load != 1 else "1 request in flight"


def boundary_text(found: Measurement) -> str:
    """The highest load at which a goal held, and what limits it; empty where the load was fixed."""
    if (boundary := found.boundary) is None:
        return ""
    unit = boundary.unit
    lows, highs = found.metrics.get("boundary_low"), found.metrics.get("boundary_high")
    failed = [level for level in boundary.levels if not level.held]
    limits = [level.worst for level in sorted(failed, key=lambda one: one.load) if level.worst]
    limit = f"; what limits it is {limits[0]}" if limits else ""
    if not lows:
        lowest = min(boundary.levels, key=lambda level: level.load)
        if lowest.held:
            return f"holds no load in every round{limit}"
        return f"does not hold even {load_text(lowest.load, unit)}{limit}"
    if not highs:
        most = load_text(min(lows), unit)
        return f"holds at least {most}: the workload has too few requests to show more"
    load = fmean(found.metrics["boundary_load"])
    load = math.floor(load) if unit == "requests in flight" else load
    span = f"({digits(min(lows))} to {digits(max(highs))})"
    cliff = ", a cliff: between them it more than doubles" if boundary.is_cliff else ""
    return f"holds up to {load_text(load, unit)} {span}{limit}{cliff}"
