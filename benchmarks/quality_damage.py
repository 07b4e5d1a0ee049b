"""Damage planted into recorded answers, and how often a report notices it.

An answer is replaced by a fluent wrong one: that of another item, in leakage by one that tells the
secret, in length-shift by one that does not end. In fidelity the scores of single tokens are
replaced by those of other tokens. None of it looks broken, so detectors of broken output do not
help. Items are drawn from the recorded ones with replacement, as many of each category as a size
has; the figures of all other suites count only for the correction for many figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy

from kvtune.profilers.quality import gate, paired
from kvtune.profilers.quality.compare import Asked, AskedSuite
from kvtune.profilers.quality.figures import LEAST_HEADROOM, SIGNIFICANT, Evidence, Row, evidence
from kvtune.profilers.quality.suite import Answer, Item, QualityMetric, Suite, TokenScores

RATES = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.6,
    0.8,
    1.0,
)

OTHER_ITEM = 7
"""Whose answer stands in for an item's: the neighbours are about the same text or call."""

OTHERS_TRIED = 20
"""The one that is worth least is taken; an answer that avoids a word avoids it anywhere."""

OTHER_TOKEN = 5

BYSTANDER = QualityMetric("bystander", "nats", "lower", "difference", 0.1, bounds=None)


@dataclass(frozen=True, slots=True)
class Unit:
    """A recorded item: its rows as they are, and as they are when each of its parts is damaged."""

    right: tuple[Row, ...]
    wrong: tuple[Row, ...]
    parts: int

    def rows(self, damaged_parts: int) -> Sequence[Row]:
        """The rows with some of the parts damaged; a mean over the parts lies between the two."""
        if damaged_parts == 0:
            return self.right
        if damaged_parts == self.parts:
            return self.wrong
        share = damaged_parts / self.parts
        return [
            replace(right, ours=right.ours + share * (wrong.ours - right.ours))
            for right, wrong in zip(self.right, self.wrong, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Pool:
    """A suite's recorded items by category."""

    units: Mapping[str, Sequence[Unit]]
    strongest: str


def pool_of(suite: Suite, theirs: Asked, again: Asked, ours: Asked) -> Pool:
    """The items of a suite that were answered all three times."""
    parts = [_part(asked, suite.name) for asked in (theirs, again, ours)]
    known = [
        (item, *answers)
        for item, *answers in zip(parts[0].items, *(part.answers for part in parts), strict=True)
        if all(answer.error is None for answer in answers)
    ]
    units: dict[str, list[Unit]] = {}
    for number, (item, base, second, own) in enumerate(known):
        others = [
            known[(number + OTHER_ITEM + step) % len(known)][3]
            for step in range(min(OTHERS_TRIED, len(known)))
        ]
        wrong = _damaged(suite, item, own, others)
        units.setdefault(item.category, []).append(
            Unit(
                _rows(suite, item, own, base, second),
                _rows(suite, item, wrong, base, second),
                1 if own.scores is None else len(own.scores.token_ids),
            )
        )
    strongest = max(units, key=lambda category: _headroom(units[category]), default="")
    return Pool(units, strongest)


def figures_of(pool: Pool, counts: Mapping[str, int]) -> int:
    """How many figures of a suite can make a report fail, by category and all together."""
    return len(
        _losable([row for name in counts for unit in pool.units[name] for row in unit.right])
    )


def caught_share(
    pool: Pool,
    counts: Mapping[str, int],
    damaged: Collection[str],
    rate: float,
    *,
    padding: int,
    simulations: int,
) -> float:
    """The share of reports that fail when each answer (or token) is damaged at a rate.

    `counts` are items of each category, `damaged` the categories that are damaged, `padding` the
    figures of other suites.
    """
    rng = numpy.random.default_rng(0)
    drawn = (list(_drawn(pool, counts, damaged, rate, rng)) for _ in range(simulations))
    return sum(fails(rows, padding) for rows in drawn) / simulations


def fails(rows: Sequence[Row], padding: int) -> bool:
    """Whether the gate fails a report of these rows beside `padding` figures that nothing happened
    to: what `gate.report` says, without the intervals that it builds for showing."""
    found = _losable(rows)
    adjusted = paired.holm([*(each.worse for each in found), *[1.0] * padding])
    return any(
        each.rule(probability, len(adjusted)).outcome == "fail"
        for each, probability in zip(found, adjusted, strict=False)
        if probability <= SIGNIFICANT
    )


def check_short_cut(
    pool: Pool, counts: Mapping[str, int], damaged: Collection[str], *, padding: int
) -> None:
    """Stop if `fails` and the gate disagree at any of the rates."""
    others = [_bystander(number) for number in range(padding)]
    for rate in (0.0, *RATES):
        rng = numpy.random.default_rng(1)
        rows = list(_drawn(pool, counts, damaged, rate, rng))
        by_gate = gate.report([*rows, *others]).outcome == "fail"
        if fails(rows, padding) != by_gate:
            raise SystemExit(f"at a rate of {rate:g} the gate says otherwise: {by_gate}")


def passing_share(
    drawn: Sequence[tuple[Pool, Mapping[str, int]]],
    open_figures: Counter[str],
    *,
    simulations: int,
) -> float:
    """The share of reports that pass when nothing is damaged.

    Of the others, `open_figures` gets the deciding figures that do not pass.
    """
    rng = numpy.random.default_rng(2)
    passed = 0
    for _ in range(simulations):
        rows = [row for pool, counts in drawn for row in _drawn(pool, counts, (), 0.0, rng)]
        report = gate.report(rows)
        passed += report.outcome == "pass"
        open_figures.update(
            f"{figure.suite}/{figure.category or 'all'} {figure.metric}"
            for figure in report.figures
            if figure.decides and figure.outcome != "pass"
        )
    return passed / simulations


def _drawn(
    pool: Pool,
    counts: Mapping[str, int],
    damaged: Collection[str],
    rate: float,
    rng: numpy.random.Generator,
) -> Iterator[Row]:
    """Rows of as many items of each category as `counts` says, drawn with replacement.

    Each draw is an item of its own. Where items of several categories are about one text, the
    n-th draws of all categories are.
    """
    for category, count in counts.items():
        units = pool.units[category]
        share = rate if category in damaged else 0.0
        for number, pick in enumerate(rng.integers(len(units), size=count)):
            unit = units[pick]
            key = f"{category}/{number}"
            for row in unit.rows(int(rng.binomial(unit.parts, share))):
                about = f"{row.suite}/{number}" if row.about else ""
                yield replace(row, item=key, about=about)


def _losable(rows: Sequence[Row]) -> list[Evidence]:
    """What decides a report and has something to lose, by category and all together."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.decides:
            for category in (row.category, ""):
                groups.setdefault((row.suite, row.metric.name, category), []).append(row)
    found = (evidence(own, own[0].metric.limit) for own in groups.values())
    return [each for each in found if each.something_to_lose]


def _part(asked: Asked, name: str) -> AskedSuite:
    return next(part for part in asked.suites if part.name == name)


def _damaged(suite: Suite, item: Item, own: Answer, others: Sequence[Answer]) -> Answer:
    if own.scores is not None:
        return replace(own, scores=_shifted(own.scores))
    if suite.name == "leakage":
        return replace(own, texts=(", ".join(item.check["secret"]),))
    if suite.name == "length-shift":
        turns = len(own.texts)
        return replace(
            own,
            texts=tuple(3 * f"{text} " for text in own.texts),
            output_tokens=(item.output_tokens,) * turns,
            finish_reasons=("length",) * turns,
        )
    headline = suite.metrics[0].name
    # Suites check turn by turn; one that an answer does not have is worth nothing.
    fitted = [replace(other, texts=other.texts[: len(own.texts)]) for other in others]
    return min(fitted, key=lambda other: suite.figures(item, other, own)[headline][0])


def _shifted(scores: TokenScores) -> TokenScores:
    """Each token scored by what was thought of a later one."""
    top = (*scores.top[OTHER_TOKEN:], *scores.top[:OTHER_TOKEN])
    logprobs = tuple(
        thought.get(token, min(thought.values()))
        for token, thought in zip(scores.token_ids, top, strict=True)
    )
    return TokenScores(scores.token_ids, logprobs, top)


def _rows(suite: Suite, item: Item, ours: Answer, theirs: Answer, again: Answer) -> tuple[Row, ...]:
    floor = suite.figures(item, again, theirs)
    metrics = {metric.name: metric for metric in suite.metrics}
    return tuple(
        Row(
            suite=suite.name,
            category=item.category,
            item=item.key,
            metric=metrics[name],
            headline=metrics[name] is suite.metrics[0],
            ours=mine,
            theirs=base,
            again=floor.get(name),
            about=item.about,
        )
        for name, (mine, base) in suite.figures(item, ours, theirs).items()
    )


def _headroom(units: Sequence[Unit]) -> float:
    """What a category's headline figure can lose, on average; 0 where that is hardly anything."""
    rows = [row for unit in units for row in unit.right if row.headline]
    room = sum(
        row.theirs if row.metric.better == "higher" else 1 - row.theirs for row in rows
    ) / max(1, len(rows))
    return room if room >= LEAST_HEADROOM else 0.0


def _bystander(number: int) -> Row:
    """A figure of its own that nothing happened to, and that could have made a report fail."""
    return Row(
        suite=f"another-{number}",
        category="",
        item="",
        metric=BYSTANDER,
        headline=True,
        ours=0.0,
        theirs=0.0,
    )
