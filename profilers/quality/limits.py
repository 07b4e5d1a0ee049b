"""Read and write quality limits: "needle >= -1pt", "kl <= 0.02", "worst-instructions >= -2pt".

A limit is `NAME >= NUMBER UNIT` or `NAME <= NUMBER UNIT`. A name is a suite (its headline metric in
each category; "worst-needle" says the same), a metric ("kl"), "SUITE.METRIC", "SUITE/CATEGORY", or
one of these with "mean-" in front: all categories together. Changes of shares are in points ("pt";
"%" means the same), levels of shares in "%", everything else in the metric's own unit.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from kvtune.errors import BadGoal
from kvtune.profilers.quality.suite import QualityMetric, Suite
from kvtune.profilers.quality.suite import suites as all_suites

ANY = "any"
"""The suite name of what is judged over the items of all suites."""

BROKEN_OUTPUT = QualityMetric("broken-output", "share", "lower", "difference", 0.02)
"""Share of answers that never came, or are empty, unreadable or a loop."""

EXAMPLE = "needle >= -1pt"

_LIMIT = re.compile(
    r"(?P<name>[^\s<>=]+)\s*(?P<sign>[<>=]+)\s*(?P<number>[-+]?[0-9]*\.?[0-9]+)\s*(?P<unit>\S*)"
)
_NAME = re.compile(
    r"(?P<over>worst-|mean-)?(?P<head>[^./]+)(?:/(?P<category>[^.]+))?(?:\.(?P<metric>[^/]+))?"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a metric of a suite may be at worst: the margin of a change, or the bound of a level.

    `value` is positive and in the metric's unit. It holds in `category`, or in each one if that is
    `None`, or (`pooled`) for all items of the suite together. Categories are written in any case.
    """

    suite: str
    metric: QualityMetric
    value: float
    category: str | None = None
    pooled: bool = False

    def is_of(self, category: str) -> bool:
        """Whether it is for this category and no other."""
        return self.category is not None and self.category.casefold() == category.casefold()


def parse_limits(
    texts: Sequence[str], suites: Mapping[str, Suite] | None = None
) -> tuple[Limit, ...]:
    """Read limits on the metrics of `suites` (all known ones by default).

    Categories are not checked: they are known only once a suite has made its items.

    Raises:
        BadGoal: a text is no limit, a name or unit is unknown, or two limits contradict.
    """
    known = all_suites() if suites is None else suites
    limits: dict[tuple[str, str, str | None, bool], Limit] = {}
    for text in texts:
        for part in re.split(r"\band\b|,", text):
            limit = _parse(part.strip().lower(), known)
            key = (limit.suite, limit.metric.name, limit.category, limit.pooled)
            if limits.setdefault(key, limit) != limit:
                raise BadGoal(
                    f"two limits for the same: {limit_text(limits[key])!r} and "
                    f"{limit_text(limit)!r}",
                    "keep one of them",
                )
    return tuple(limits.values())


def limit_text(limit: Limit) -> str:
    """The limit as `parse_limits` reads it back, exactly."""
    name = ("mean-" if limit.pooled else "") + limit.suite
    if limit.category is not None:
        name += f"/{limit.category}"
    change = limit.metric.kind == "difference"
    number = Decimal(repr(limit.value))
    unit = "" if limit.metric.unit == "share" else limit.metric.unit
    if limit.metric.unit == "share":
        number, unit = number * 100, "pt" if change else "%"
    signed = -number if change and limit.metric.better == "higher" else number
    sign = ">=" if limit.metric.better == "higher" else "<="
    return f"{name}.{limit.metric.name} {sign} {format(signed.normalize(), 'f')}{unit}"


def own_limits(suites: Iterable[Suite]) -> tuple[Limit, ...]:
    """What suites themselves allow of the metrics that count without being named."""
    return tuple(
        Limit(suite.name, metric, metric.limit)
        for suite in suites
        for metric in suite.metrics
        if metric is suite.metrics[0] or metric.decides or metric.kind == "level"
    )


def suite_counts(suite: str, limits: Sequence[Limit]) -> bool:
    """Whether a suite's answers decide: all do without limits, and where one is on broken outputs.

    Broken outputs are judged over the items of whatever is asked.
    """
    return not limits or any(limit.suite in (suite, ANY) for limit in limits)


def find_limit(
    limits: Sequence[Limit], suite: str, metric: str, category: str, *, pooled: bool
) -> Limit | None:
    """The limit that a figure is judged by, the most specific one; `None` without any.

    Items of all categories together (`pooled`) have their own or that of each category.
    """
    about = [limit for limit in limits if (limit.suite, limit.metric.name) == (suite, metric)]
    own = [limit for limit in about if limit.pooled] if pooled else []
    if not pooled:
        own = [limit for limit in about if limit.is_of(category)]
    each = [limit for limit in about if limit.category is None and not limit.pooled]
    return next(iter([*own, *each]), None)


def _parse(text: str, known: Mapping[str, Suite]) -> Limit:
    match = _LIMIT.fullmatch(text)
    name = _NAME.fullmatch(match["name"]) if match else None
    if match is None or name is None:
        raise BadGoal(f"{text!r} is not a quality limit", f'write it like "{EXAMPLE}"')
    suite, metric = _target(name, known)
    sign, wanted = match["sign"], ">=" if metric.better == "higher" else "<="
    value = _value(text, Decimal(match["number"]), match["unit"], metric)
    if sign not in (wanted, wanted[0]):
        raise BadGoal(
            f"{text!r}: {metric.name} is {metric.better} when better, got {sign!r}",
            f'write it like "{_example(match["name"], metric)}"',
        )
    return Limit(suite, metric, value, name["category"], name["over"] == "mean-")


def _example(name: str, metric: QualityMetric) -> str:
    _, _, right = limit_text(Limit(ANY, metric, metric.limit)).partition(" ")
    return f"{name} {right}"


def _target(name: re.Match[str], known: Mapping[str, Suite]) -> tuple[str, QualityMetric]:
    """The suite and metric that a name means."""
    metrics = {suite: known[suite].metrics for suite in known} | {ANY: (BROKEN_OUTPUT,)}
    if found := _same(name["head"], metrics):
        if name["metric"] is None:
            return found, metrics[found][0]
        named = {metric.name: metric for metric in metrics[found]}
        if (metric_name := _same(name["metric"], named)) is None:
            raise _unknown(name["metric"], list(named), f"metric of {found}")
        return found, named[metric_name]
    owners = list(_owners(name["head"], metrics))
    if len(owners) > 1:
        raise BadGoal(
            f"{name['head']!r} is a metric of {' and '.join(suite for suite, _ in owners)}",
            f'say which: "{owners[0][0]}.{owners[0][1].name}"',
        )
    if not owners or name["metric"] is not None:
        names = sorted({*metrics, *(each.name for own in metrics.values() for each in own)})
        raise _unknown(name["head"], names, "suite or metric")
    return owners[0]


def _owners(
    name: str, metrics: Mapping[str, Sequence[QualityMetric]]
) -> Iterator[tuple[str, QualityMetric]]:
    for suite, own in metrics.items():
        for metric in own:
            if _plain(metric.name) == _plain(name):
                yield suite, metric


def _same(word: str, names: Mapping[str, object]) -> str | None:
    return next((name for name in names if _plain(name) == _plain(word)), None)


def _plain(name: str) -> str:
    """A name as people may write it: "instruction" and "multi_turns" find the suites they mean."""
    return name.replace("_", "-").removesuffix("s")


def _unknown(word: str, choices: Sequence[str], what: str) -> BadGoal:
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return BadGoal(f"unknown {what} {word!r}", f"{hint}choose from {', '.join(choices)}")


def _value(text: str, number: Decimal, unit: str, metric: QualityMetric) -> float:
    """The margin or bound in the metric's unit, always positive."""
    change, share = metric.kind == "difference", metric.unit == "share"
    units = ("", "pt", "pts", "%") if share else ("", metric.unit.lower())
    if unit not in units:
        allowed = "pt" if share and change else "%" if share else metric.unit or "no unit"
        raise BadGoal(f"{text!r}: unknown unit {unit!r}", f"{metric.name} is in {allowed}")
    if share and not unit and abs(number) >= 1:
        raise BadGoal(
            f"{text!r} has no unit",
            f'say which: "{format(number, "f")}{"pt" if change else "%"}"',
        )
    if share and unit:
        number /= 100
    value = float(-number if change and metric.better == "higher" else number)
    if not 0 < value < math.inf:
        what = "the change for the worse that is allowed, above 0" if change else "above 0"
        raise BadGoal(
            f"{text!r}: a limit is {what}",
            f'write it like "{_example(text.split()[0], metric)}"',
        )
    return value
