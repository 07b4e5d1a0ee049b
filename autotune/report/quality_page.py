"""A quality report as a page: the outcome, each suite's figures and maps, answers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvtune.autotune.quality import words
from kvtune.autotune.report.figures_quality import (
    changes_figure,
    lengths_figure,
    map_figure,
    ratios_figure,
)
from kvtune.autotune.report.page import (
    Block,
    Bullets,
    Column,
    Details,
    Excerpt,
    KeyFigure,
    KeyFigures,
    Page,
    Row,
    Section,
    Table,
    Tone,
)
from kvtune.autotune.words import duration
from kvtune.profilers.quality.limits import ANY
from kvtune.types import NegativeSample, QualityFigure, QualityReport

TONE: dict[str, Tone] = {"pass": "good", "fail": "bad", "unclear": "muted"}

LENGTHS = "length-shift"
"""The suite whose points are logarithms of lengths."""

NOTES = {
    "fidelity": "KL is known from the 20 most likely tokens of each side and what is left beside "
    "them, so the true divergence is rather higher than lower.",
    ANY: "Broken is what can be seen in an answer alone: it is empty, a loop or unreadable. Real "
    "words in no order are not; other suites notice those.",
}

COLUMNS = (
    Column("category"),
    Column("metric"),
    Column("outcome"),
    Column("items", True),
    Column("baseline", True),
    Column("candidate", True),
    Column("change, 90% interval", True),
    Column("noise floor", True),
    Column("because"),
)


def quality_page(report: QualityReport) -> Page:
    """All that a report holds."""
    sections = [Section("Outcome", _outcome(report))]
    for suite in dict.fromkeys(figure.suite for figure in report.figures):
        figures = [figure for figure in report.figures if figure.suite == suite]
        sections.append(Section(suite, _suite(report, suite, figures)))
    if report.samples:
        sections.append(Section("Broken answers", _samples(report.samples)))
    sections.append(Section("How it was measured", _measured(report)))
    return Page(
        f"Quality of {report.candidate}",
        f"{report.model} beside {report.baseline}, {report.measured_at[:16].replace('T', ' ')}",
        tuple(sections),
    )


def _outcome(report: QualityReport) -> tuple[Block, ...]:
    counts = {
        outcome: sum(each.outcome == outcome for each in report.figures if each.decides)
        for outcome in TONE
    }
    shown = KeyFigures(
        (
            KeyFigure("outcome", report.outcome, tone=TONE[report.outcome]),
            KeyFigure("deciding figures that fail", str(counts["fail"])),
            KeyFigure("that are unclear", str(counts["unclear"])),
            KeyFigure("that pass", str(counts["pass"])),
        )
    )
    reasons = tuple(
        f"{words.name(figure)}: {figure.because}"
        for figure in words.telling(report.figures)
        if figure.outcome == "fail"
    )
    skipped = tuple(f"{suite} was not judged: {why}" for suite, why in report.skipped.items())
    listed = reasons + skipped + report.warnings
    return (shown, words.verdict(report), *((Bullets(listed),) if listed else ()))


def _suite(
    report: QualityReport, suite: str, figures: Sequence[QualityFigure]
) -> tuple[Block, ...]:
    points = [point for point in report.points if point.suite == suite]
    telling = words.telling(figures)
    drawn = [list(block) for _, block in groupby(telling, key=lambda figure: figure.metric)]
    blocks: list[Block | None] = [changes_figure(block) for block in drawn]
    blocks.append(map_figure(suite, points))
    if telling and telling[0].kind == "level":
        blocks.append(lengths_figure(points, telling[0]))
    if suite == LENGTHS:
        blocks.append(ratios_figure(suite, points))
    blocks.append(NOTES.get(suite))
    blocks.append(
        Table(f"All figures of {suite}.", COLUMNS, tuple(_row(figure) for figure in figures))
    )
    return tuple(block for block in blocks if block is not None)


def _row(figure: QualityFigure) -> Row:
    return Row(
        (
            figure.category or "all",
            figure.metric,
            figure.outcome if figure.decides else f"{figure.outcome} (informs only)",
            str(figure.items),
            words.level(figure.baseline, figure.unit),
            words.level(figure.candidate, figure.unit),
            words.change(figure.change, figure.unit),
            words.span(figure.floor, figure.unit),
            figure.because,
        ),
        TONE[figure.outcome] if figure.decides else "muted",
    )


def _samples(samples: Sequence[NegativeSample]) -> tuple[Block, ...]:
    return (
        "Items that were fine with the baseline and are not now.",
        *(
            Details(
                f"{sample.suite}/{sample.item}" + (f": {sample.detail}" if sample.detail else ""),
                (
                    Excerpt("baseline", sample.baseline),
                    Excerpt("candidate", sample.candidate),
                    Excerpt("asked", sample.asked),
                ),
            )
            for sample in samples
        ),
    )


def _measured(report: QualityReport) -> tuple[Block, ...]:
    took = "" if report.wall_s is None else duration(report.wall_s)
    facts = {
        "model": report.model,
        "baseline": report.baseline,
        "candidate": report.candidate,
        "size": report.size,
        "seed": str(report.seed),
        "time to ask the candidate": took,
        **{f"version of {name}": version for name, version in report.versions.items()},
    }
    rows = tuple(Row((name, value)) for name, value in facts.items() if value)
    return (
        "The baseline was asked twice, what is sampled drawn anew and in other batches the second "
        "time: what it differs from itself is the noise floor. Changes are paired, item by item.",
        Table("What was compared.", (Column("what"), Column("value")), rows),
    )
