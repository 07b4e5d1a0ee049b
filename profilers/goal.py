"""Read, write and check goals: "max goodput where p95 ttft <= 500ms and p95 itl <= 80ms".

A limit is `STATISTIC METRIC <= NUMBER UNIT` (or `METRIC STATISTIC`, or `<`, which means the same as
`<=`). Units are us, ms, s and m (minutes); a number without a unit is refused.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, cast, get_args

from kvtune.errors import BadGoal
from kvtune.types import Goal, Slo

UNIT_S: Mapping[str, Decimal] = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
}
METRICS: tuple[str, ...] = get_args(Slo.model_fields["metric"].annotation)
OBJECTIVES: tuple[str, ...] = get_args(Goal.model_fields["objective"].annotation)
METRIC_ALIASES = {"e2el": "e2e", "latency": "e2e"}
STATISTIC_ALIASES = {"median": "p50", "avg": "mean", "p100": "max"}
EXAMPLE = "p95 ttft <= 800ms"

_LIMIT = re.compile(
    r"(?P<first>[\w.]+)\s+(?P<second>[\w.]+)\s*(?P<sign>[<>=]+)\s*"
    r"(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>\S*)"
)
_DIAL = re.compile(
    r"max(?:imi[sz]e)?\s+(?P<objective>\w+)(?:\s+where\s+(?P<limits>.*))?", re.DOTALL
)


def parse_slo(text: str) -> Slo:
    """Read one limit, such as "p95 ttft <= 800ms".

    Raises:
        BadGoal: it is no limit, or a metric, statistic or unit is unknown or missing.
    """
    match = _LIMIT.fullmatch(text.strip().lower())
    if match is None:
        raise BadGoal(
            f"{text.strip()!r} is not a limit",
            f'write it like "{EXAMPLE}", a whole goal like "max goodput where {EXAMPLE}"',
        )
    if match["sign"] not in ("<=", "<"):
        raise BadGoal(
            f"{text.strip()!r}: a limit on a time is an upper bound, got {match['sign']!r}",
            f'use "<=", like "{EXAMPLE}"',
        )
    first, second = match["first"], match["second"]
    if _statistic(first) is None and _statistic(second) is not None:
        first, second = second, first
    return Slo(
        metric=cast(Any, _metric(second)),
        statistic=_known_statistic(first),
        limit_s=_limit_s(text.strip(), match["number"], match["unit"]),
    )


def parse_goal(text: str | Sequence[str]) -> Goal:
    """Read a goal: the whole dial in one text, or several texts with limits or a dial each.

    Without "max ..." the objective is goodput. Without limits, goodput counts every completed
    request.

    Raises:
        BadGoal: a part cannot be read, or two parts contradict each other.
    """
    objectives: set[str] = set()
    slos: dict[str, Slo] = {}
    for part in [text] if isinstance(text, str) else text:
        limits = part.strip().lower()
        if dial := _DIAL.fullmatch(limits):
            objectives.add(_known(dial["objective"], OBJECTIVES, "objective"))
            if dial["limits"] is None:
                continue
            limits = dial["limits"]
        for slo in map(parse_slo, re.split(r"\band\b|,", limits)):
            if slos.setdefault(slo_key(slo), slo) != slo:
                raise BadGoal(
                    f"two limits for {slo.statistic} {slo.metric}: "
                    f"{slo_text(slos[slo_key(slo)])} and {slo_text(slo)}",
                    "keep one of them",
                )
    if len(objectives) > 1:
        raise BadGoal(f"two objectives: {' and '.join(sorted(objectives))}", "keep one of them")
    objective = objectives.pop() if objectives else "goodput"
    return Goal(objective=cast(Any, objective), slos=tuple(slos.values()))


def slo_text(slo: Slo) -> str:
    """The limit as `parse_slo` reads it back, exactly."""
    limit_s = Decimal(repr(slo.limit_s))
    unit = "s" if limit_s >= 1 else "ms" if limit_s >= UNIT_S["ms"] else "us"
    number = format((limit_s / UNIT_S[unit]).normalize(), "f")
    return f"{slo.statistic} {slo.metric} <= {number}{unit}"


def goal_text(goal: Goal) -> str:
    """The goal as `parse_goal` reads it back, exactly."""
    limits = " and ".join(slo_text(slo) for slo in goal.slos)
    return f"max {goal.objective} where {limits}" if limits else f"max {goal.objective}"


def slo_key(slo: Slo) -> str:
    """The name under which `measure` reports what the limit is about, such as "ttft_p95_s"."""
    return f"{slo.metric}_{slo.statistic}_s"


def slo_attained(slo: Slo, metrics: Mapping[str, float]) -> bool | None:
    """Whether the statistic over all requests of a run is within the limit; `None` if unmeasured.

    A request that failed has no latency, so look at `failed_requests` too.
    """
    value = metrics.get(slo_key(slo))
    return None if value is None else value <= slo.limit_s


def goal_met(goal: Goal, metrics: Mapping[str, float]) -> dict[str, bool | None]:
    """`slo_attained` for each limit, keyed by its text."""
    return {slo_text(slo): slo_attained(slo, metrics) for slo in goal.slos}


def goal_violations(goal: Goal, metrics: Mapping[str, float]) -> dict[str, float | None]:
    """How far each limit is missed, value / limit - 1, keyed by its text.

    At most 0 means met; `None` means that the value was not measured.
    """
    values = {slo_text(slo): (metrics.get(slo_key(slo)), slo.limit_s) for slo in goal.slos}
    return {
        text: None if value is None else value / limit_s - 1
        for text, (value, limit_s) in values.items()
    }


def _known(word: str, choices: Sequence[str], what: str) -> str:
    if word in choices:
        return word
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise BadGoal(f"unknown {what} {word!r}", f"{hint}choose from {', '.join(choices)}")


def _metric(word: str) -> str:
    return METRIC_ALIASES.get(word) or _known(word, METRICS, "metric")


def _statistic(word: str) -> str | None:
    """The canonical statistic, or `None` when the word is none."""
    word = STATISTIC_ALIASES.get(word, word)
    if word in ("mean", "max"):
        return word
    if re.fullmatch(r"p[0-9]{1,2}(\.[0-9]{1,3})?", word) and float(word[1:]) >= 1:
        return "p" + format(Decimal(word[1:]).normalize(), "f")
    return None


def _known_statistic(word: str) -> str:
    statistic = _statistic(word)
    if statistic is None:
        raise BadGoal(
            f"unknown statistic {word!r}", "use p1 to p99 (p99.9 too), median, mean or max"
        )
    return statistic


def _limit_s(text: str, number: str, unit: str) -> float:
    if not unit:
        raise BadGoal(
            f"{text!r} has no unit", f'say which: "{number}ms" or "{number}s" (us, ms, s, m)'
        )
    if unit not in UNIT_S:
        raise BadGoal(f"{text!r}: unknown unit {unit!r}", f"use {', '.join(UNIT_S)}")
    limit_s = float(Decimal(number) * UNIT_S[unit])
    if not 0 < limit_s < math.inf:
        raise BadGoal(f"{text!r}: a limit must be positive", f'write it like "{EXAMPLE}"')
    return limit_s
