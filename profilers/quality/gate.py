"""The gate: every figure of a comparison, and one outcome that the worst category decides.

A pass needs every figure that counts to pass, so each is tested at 5% by itself. A failure needs
one figure that fails, so all p-values of a report are corrected together (Holm): a baseline
against itself fails in at most 5% of reports. By default each category counts with its suite's
headline metric and its levels; given limits, what they name counts and nothing else, besides broken
outputs. A category in which the baseline has nothing to lose counts only when a limit names it. All
items of a suite together (category "") count when a limit names them ("mean-..."), and
when they fail: a mean that lost more than the limit proves that some category did. They are taken
as independent; where categories ask about the same texts, their interval is a little too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from kvtune.profilers.quality import paired
from kvtune.profilers.quality.figures import Evidence, Row, Ruling, evidence
from kvtune.profilers.quality.limits import ANY, Limit, find_limit, limit_text
from kvtune.types import NegativeSample, QualityFigure, QualityPoint, QualityReport

Outcome = Literal["pass", "fail", "unclear"]


class _Counts(Enum):
    """What a figure may do to the report's outcome."""

    ALWAYS = auto()
    WHEN_IT_FAILS = auto()
    NEVER = auto()


@dataclass(frozen=True, slots=True)
class _Case:
    """The rows behind one figure."""

    suite: str
    category: str
    evidence: Evidence
    counts: _Counts


def judge(
    rows: Iterable[Row],
    limits: Sequence[Limit] = (),
    spoiled: Mapping[str, str] | None = None,
) -> tuple[QualityFigure, ...]:
    """The figures of all suites, categories and metrics, and of each suite's items together.

    `spoiled` says of suites that cannot be judged why; all their figures are unclear.
    """
    return tuple(figure for figure, _ in _judged(rows, limits, spoiled or {}))


def report(
    rows: Iterable[Row],
    limits: Sequence[Limit] = (),
    *,
    spoiled: Mapping[str, str] | None = None,
    skipped: Mapping[str, str] | None = None,
    samples: Sequence[NegativeSample] = (),
    points: Sequence[QualityPoint] = (),
    warnings: Sequence[str] = (),
) -> QualityReport:
    """The figures with the outcome of those that count; see the module's text.

    A suite that was skipped and a limit that nothing answers leave the outcome unclear.
    """
    judged = _judged(rows, limits, spoiled or {})
    outcomes: list[Outcome] = [
        figure.outcome
        for figure, counts in judged
        if counts is _Counts.ALWAYS
        or (counts is _Counts.WHEN_IT_FAILS and figure.outcome == "fail")
    ]
    warnings = [*warnings]
    for limit in limits:
        if not any(_answers(figure, limit) for figure, _ in judged):
            outcomes.append("unclear")
            warnings.append(f"nothing was asked that {limit_text(limit)!r} could be judged by")
    if skipped or not outcomes:
        outcomes.append("unclear")
    return QualityReport(
        outcome=next(each for each in ("fail", "unclear", "pass") if each in outcomes),
        figures=tuple(figure for figure, _ in judged),
        samples=tuple(samples),
        points=tuple(points),
        skipped=dict(skipped or {}),
        warnings=tuple(warnings),
    )


def _judged(
    rows: Iterable[Row], limits: Sequence[Limit], spoiled: Mapping[str, str]
) -> list[tuple[QualityFigure, _Counts]]:
    cases = [
        _case(group, suite, category, limits)
        for (suite, _, category), group in _grouped(rows).items()
    ]
    adjusted = paired.holm([case.evidence.worse for case in cases])
    judged = []
    for case, probability in zip(cases, adjusted, strict=True):
        ruling = (
            Ruling("unclear", spoiled[case.suite])
            if case.suite in spoiled
            else case.evidence.rule(probability, len(cases))
        )
        asked = ruling.has_something_to_lose or limits
        judged.append((_figure(case, ruling), case.counts if asked else _Counts.NEVER))
    return judged


def _grouped(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows by suite, metric and category; category "" has a suite's rows together."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        for category in dict.fromkeys((row.category, "")):
            groups.setdefault((row.suite, row.metric.name, category), []).append(row)
    return groups


def _case(rows: Sequence[Row], suite: str, category: str, limits: Sequence[Limit]) -> _Case:
    metric = rows[0].metric
    pooled = any(row.category != category for row in rows)
    limit = find_limit(limits, suite, metric.name, category, pooled=pooled)
    named = limit is not None if limits else rows[0].headline or metric.kind == "level"
    if not named and suite != ANY:
        counts = _Counts.NEVER
    elif pooled and not (limit and limit.pooled):
        counts = _Counts.WHEN_IT_FAILS
    else:
        counts = _Counts.ALWAYS
    value = metric.limit if limit is None else limit.value
    return _Case(suite, category, evidence(rows, value), counts)


def _figure(case: _Case, ruling: Ruling) -> QualityFigure:
    found = case.evidence
    return QualityFigure(
        suite=case.suite,
        category=case.category,
        metric=found.metric.name,
        unit=found.metric.unit,
        better=found.metric.better,
        kind=found.metric.kind,
        limit=found.limit,
        items=found.items,
        candidate=found.candidate,
        baseline=found.baseline,
        change=found.change,
        floor=found.floor,
        broken=found.broken,
        mended=found.mended,
        items_needed=ruling.items_needed,
        outcome=ruling.outcome,
        because=ruling.because,
    )


def _answers(figure: QualityFigure, limit: Limit) -> bool:
    """Whether a figure is what a limit is about."""
    return (figure.suite, figure.metric) == (limit.suite, limit.metric.name) and (
        limit.category in (None, figure.category)
    )
