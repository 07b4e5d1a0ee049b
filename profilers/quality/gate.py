"""The gate: every figure of a comparison, and one outcome that the worst category decides.

A pass needs every figure that counts to pass, so each is tested at 5% by itself. A failure needs
one figure that fails, so the p-values of all that can make a report fail are corrected together
(Holm): a baseline against itself fails in at most 5% of reports. Those that only inform are
corrected among themselves, so that they cost the others no power. By default each category counts
with its suite's headline metric, those that decide and its levels; given limits, what they name
counts and nothing else, besides broken outputs, which alone are no pass. A category in which the
baseline has nothing to lose never fails, and counts only when a limit names it; else it is left out
with a warning, unless no category is left. All items of a suite together (category "") count when a
limit names them ("mean-..."), and when they fail: a mean that lost more than the limit proves that
some category did. Where categories ask about the same texts, the interval of all items together is
also that of the texts' means, so for a pass a text whose items all broke is one observation, not
many. P-values take each item for one of its own, also where items share a text, because the few
texts of a screen could prove no failure: of all items together they are too sure if items break
text by text, of a category, which has one item of a text, they are not. The second run stands
against that: a failure has to exceed its losses too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from kvtune.profilers.quality import paired
from kvtune.profilers.quality.figures import Evidence, Row, Ruling, evidence
from kvtune.profilers.quality.limits import ANY, Limit, find_limit, limit_text, suite_counts
from kvtune.types import NegativeSample, QualityFigure, QualityPoint, QualityReport

Outcome = Literal["pass", "fail", "unclear"]


class _Counts(Enum):
    """What a figure may do to the report's outcome."""

    ALWAYS = auto()
    WHEN_IT_FAILS = auto()
    NEVER = auto()


@dataclass(frozen=True, slots=True)
class _Case:
    """The rows behind one figure; `wanted`: it would count if there was something to lose."""

    suite: str
    category: str
    evidence: Evidence
    counts: _Counts
    wanted: bool
    spoiled: str | None

    @property
    def is_left_out(self) -> bool:
        """Whether it does not count because the baseline has nothing to lose."""
        return self.wanted and self.counts is _Counts.NEVER and bool(self.category)

    @property
    def can_fail(self) -> bool:
        """Whether any answers could have made it fail."""
        return self.spoiled is None and self.evidence.something_to_lose


def judge(
    rows: Iterable[Row],
    limits: Sequence[Limit] = (),
    spoiled: Mapping[str, str] | None = None,
) -> tuple[QualityFigure, ...]:
    """The figures of all suites, categories and metrics, and of each suite's items together.

    `spoiled` says of suites that cannot be judged why; all their figures are unclear.
    """
    return _judged(_cases(rows, limits, spoiled or {}))


def _cases(rows: Iterable[Row], limits: Sequence[Limit], spoiled: Mapping[str, str]) -> list[_Case]:
    return [
        _case(group, suite, category, limits, spoiled.get(suite))
        for (suite, _, category), group in _grouped(rows).items()
    ]


def _judged(cases: Sequence[_Case]) -> tuple[QualityFigure, ...]:
    rulings: dict[int, Ruling] = {}
    for informs in (False, True):
        family = [
            number
            for number, case in enumerate(cases)
            if case.can_fail and (case.counts is _Counts.NEVER) is informs
        ]
        adjusted = paired.holm([cases[number].evidence.worse for number in family])
        for number, probability in zip(family, adjusted, strict=True):
            rulings[number] = cases[number].evidence.rule(probability, len(family))
    return tuple(
        _figure(case, rulings.get(number) or _unjudged(case)) for number, case in enumerate(cases)
    )


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

    A suite that counts and was skipped leaves the outcome unclear, and so does a limit that nothing
    answers, or only what the baseline has nothing to lose in.
    """
    cases = _cases(rows, limits, spoiled or {})
    figures = _judged(cases)
    outcomes: list[Outcome] = [figure.outcome for figure in figures if figure.decides]
    warnings = [*warnings]
    for limit in limits:
        answers = [figure for figure in figures if _answers(figure, limit)]
        if not any(figure.decides for figure in answers):
            outcomes.append("unclear")
            warnings.append(
                f"the baseline has nothing to lose in anything that {limit_text(limit)!r} is about"
                if answers
                else f"nothing was asked that {limit_text(limit)!r} could be judged by"
            )
    if left_out := [case for case in cases if case.is_left_out]:
        names = (f"{case.suite}/{case.category} {case.evidence.metric.name}" for case in left_out)
        warnings.append(
            f"left out, because the baseline itself has nothing to lose there: {', '.join(names)}"
        )
    judges_answers = any(figure.decides and figure.suite != ANY for figure in figures)
    missing = any(suite_counts(suite, limits) for suite in skipped or ())
    if missing or not (judges_answers or limits):
        outcomes.append("unclear")
    return QualityReport(
        outcome=next(each for each in ("fail", "unclear", "pass") if each in outcomes),
        figures=figures,
        samples=tuple(samples),
        points=tuple(points),
        skipped=dict(skipped or {}),
        warnings=tuple(warnings),
    )


def _grouped(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows by suite, metric and category; category "" has a suite's rows together."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        for category in dict.fromkeys((row.category, "")):
            groups.setdefault((row.suite, row.metric.name, category), []).append(row)
    return groups


def _case(
    rows: Sequence[Row],
    suite: str,
    category: str,
    limits: Sequence[Limit],
    spoiled: str | None,
) -> _Case:
    metric = rows[0].metric
    pooled = any(row.category != category for row in rows)
    limit = find_limit(limits, suite, metric.name, category, pooled=pooled)
    value = metric.limit if limit is None else limit.value
    found = evidence(rows, value)
    wanted = suite == ANY or (limit is not None if limits else rows[0].decides)
    by_name = limit is not None and (limit.is_of(category) or (pooled and limit.pooled))
    if not wanted or not (by_name or found.something_to_lose):
        counts = _Counts.NEVER
    elif pooled and not (limit and limit.pooled):
        counts = _Counts.WHEN_IT_FAILS
    else:
        counts = _Counts.ALWAYS
    return _Case(suite, category, found, counts, wanted, spoiled)


def _unjudged(case: _Case) -> Ruling:
    """The ruling on what cannot fail; unclear."""
    if case.spoiled is not None:
        return Ruling("unclear", case.spoiled)
    return case.evidence.rule(1.0, 1)


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
        decides=case.counts is _Counts.ALWAYS
        or (case.counts is _Counts.WHEN_IT_FAILS and ruling.outcome == "fail"),
        outcome=ruling.outcome,
        because=ruling.because,
    )


def _answers(figure: QualityFigure, limit: Limit) -> bool:
    """Whether a figure is what a limit is about."""
    return (figure.suite, figure.metric) == (limit.suite, limit.metric.name) and (
        limit.category is None or limit.is_of(figure.category)
    )
