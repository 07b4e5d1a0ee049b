"""Parts of a study's page: its verdict, trade-offs, settings, forecasts, quality, and its basis."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from kvtune.autotune.forecast.score import scores
from kvtune.autotune.quality import words
from kvtune.autotune.report.calibration_page import calibration_figure
from kvtune.autotune.report.figures_quality import changes_figure
from kvtune.autotune.report.forecast_words import COLUMNS, OUTSIDE, measured_levers
from kvtune.autotune.report.page import Block, Column, Figure, Row, Table, Tone
from kvtune.autotune.report.profile_page import evidence_blocks
from kvtune.autotune.report.study_figures import of_points
from kvtune.autotune.report.study_figures_space import (
    importance_figure,
    memory_figure,
    parallel_figure,
    quality_figure,
)
from kvtune.autotune.report.study_findings import (
    LEAST_TRIALS,
    importance,
    knobs,
    memory_front,
    quality_front,
    value_text,
)
from kvtune.autotune.report.study_front import front_blocks
from kvtune.autotune.report.study_view import StudyView
from kvtune.autotune.words import digits, duration, verdict_text
from kvtune.profilers.goal import goal_text
from kvtune.store.rows import QualityReportRow

TONE: Mapping[str, Tone] = {"pass": "good", "fail": "bad", "unclear": "muted"}


def verdict_blocks(view: StudyView) -> tuple[Block, ...]:
    """What the load on stock settings is bound by, and what that rests on."""
    if view.profile is None:
        return ("There is no verdict: the load of the stock defaults was not profiled.",)
    verdict = view.profile.profile.verdict
    said = verdict_text(verdict)
    return (
        f"{said[0].upper()}{said[1:]}. {verdict.summary}",
        *evidence_blocks(verdict.evidence),
    )


def tradeoff_blocks(view: StudyView) -> tuple[Block, ...]:
    """The objective against memory and against quality, where these differ."""
    memory = memory_figure(view, memory_front(view))
    quality = quality_figure(view, quality_front(view))
    if len(view.measured) < 2:
        return ("Fewer than two trials have a number, so there is nothing to trade.",)
    return (
        *front_blocks(view),
        memory
        or "Memory: the KV pool was of one size in all trials, so goodput was bought with none.",
        quality
        or "Quality: no trial that may change answers had its divergence from stock measured.",
    )


def space_blocks(view: StudyView) -> tuple[Block, ...]:
    """What each setting is worth by itself, and all trials over their settings."""
    found = knobs(view)
    if not found:
        return ("No setting was measured at two values.",)
    shares = importance_figure(view, importance(view))
    parallel = parallel_figure(view, found)
    if shares is None:
        text = (
            f"What each setting explains is told from {LEAST_TRIALS} measured trials on, when "
            f"values came more than once; here are {len(view.measured)}."
        )
    return tuple(block for block in (shares or text, parallel) if block is not None)


def forecast_blocks(view: StudyView) -> tuple[Block, ...]:
    """What was told of trials before they were measured, and how that came out."""
    levers = measured_levers(view.forecasts)
    if not levers:
        return ("No forecast was measured by this study.",)
    figure = calibration_figure(view.forecasts)
    columns = (
        Column("lever", is_prose=True),
        *(Column(title, is_number=True) for title in COLUMNS.values()),
    )
    rows = tuple(Row((one.lever, *(one.cell(metric) for metric in COLUMNS)), "") for one in levers)
    errors = "; ".join(
        f"{COLUMNS.get(score.metric, score.metric)} {digits(score.error_points)} points mean "
        f"error, {score.range_hits} of {score.measured} within the range"
        for score in scores(view.forecasts)
    )
    return (
        f"{errors}. Points are per cent of the stock defaults.",
        Figure(
            figure.caption,
            f"{figure.description} {of_points(view)}",
            figure.plot,
            figure.height_px,
        ),
        Table(
            f"Told -> measured, as changes; {OUTSIDE} is outside of the range that was told, - was "
            "not told or not measured",
            columns,
            rows,
        ),
    )


def quality_blocks(view: StudyView) -> tuple[Block, ...]:
    """Every quality report of the study by category, the newest first."""
    if not view.reports:
        return (
            "No quality suite was asked: no setting that may change answers was measured, or the "
            "search was told not to ask. kvtune quality compares any two configurations.",
        )
    return tuple(block for row in view.reports for block in _report_blocks(view, row))


def _report_blocks(view: StudyView, row: QualityReportRow) -> list[Block]:
    report = row.report
    point = view.point(row.trial)
    named = "" if point is None else f" ({point.settings})"
    items = f"{report.size} size, " if report.size else ""
    blocks: list[Block] = [
        f"Trial {row.trial}{named}, {items}{report.outcome}: {words.verdict(report)} "
        f"All of it: kvtune history quality {row.id[:8]} --html quality.html"
    ]
    deciding = [figure for figure in words.telling(report.figures) if figure.decides]
    for _, block in groupby(deciding, key=lambda figure: (figure.suite, figure.metric)):
        found = list(block)
        if len(found) > 1:
            drawn = changes_figure(found)
            asked = sum(figure.items for figure in found if figure.category)
            note = f"n = {asked} items; {view.engine_text}."
            blocks.append(
                Figure(
                    drawn.caption,
                    f"Trial {row.trial}: {drawn.description} {note}",
                    drawn.plot,
                    drawn.height_px,
                )
            )
    columns = (
        Column("figure"),
        Column("outcome"),
        Column("items", is_number=True),
        Column("stock", is_number=True),
        Column("candidate", is_number=True),
        Column("change, 90% interval", is_number=True),
        Column("limit", is_number=True),
    )
    rows = tuple(
        Row(
            (
                words.name(figure),
                figure.outcome if figure.decides else f"{figure.outcome} (informs only)",
                str(figure.items),
                words.level(figure.baseline, figure.unit),
                words.level(figure.candidate, figure.unit),
                words.change(figure.change, figure.unit),
                words.level(figure.limit, figure.unit),
            ),
            TONE[figure.outcome] if figure.decides else "muted",
        )
        for figure in words.telling(report.figures)
        if figure.decides or not figure.category
    )
    caption = f"Answers of trial {row.trial} beside those of stock, and all items of other suites"
    blocks.append(Table(caption, columns, rows))
    return blocks


def measured_blocks(view: StudyView) -> tuple[Block, ...]:
    """What all figures have in common."""
    study = view.study
    stock = view.stock.row.measurement if view.stock is not None else None
    facts = {
        "goal": goal_text(study.goal),
        "model": study.model,
        "workload": study.workload_name,
        "requests in the workload": f"{study.fingerprint.requests:,}",
        "engine": f"{view.engine_text} ({study.engine.platform})",
        "torch": study.engine.torch or "",
        "device": f"{study.device.count} x {study.device.name}",
        "begun": study.created_at[:19].replace("T", " "),
        "kvtune": study.kvtune_version,
        **{f"argument {name}": value_text(each) for name, each in study.base_arguments.items()},
        **{
            name.replace("_", " "): value_text(each)
            for name, each in study.settings.items()
            if isinstance(each, str | int | float) and name != "identity"
        },
    }
    if stock is not None and stock.start_s is not None:
        facts["start of the stock server"] = duration(stock.start_s)
    blocks: list[Block] = [
        f"Every load finds an empty prefix cache, warm-up requests are not counted, and prompts of "
        f"every repeat differ. {_servers(view)} A trial that failed has no value.",
        Table(
            "What all trials have in common",
            (Column("what"), Column("value", is_prose=True)),
            tuple(Row((name, text)) for name, text in facts.items() if text),
        ),
    ]
    warned = _warnings(view)
    if warned:
        blocks.append(
            Table(
                "Warnings",
                (Column("trial"), Column("warning", is_prose=True)),
                tuple(Row((", ".join(numbers), text)) for text, numbers in warned.items()),
            )
        )
    return tuple(blocks)


def _servers(view: StudyView) -> str:
    """Which servers the trials had: their own, or one that ran already and was changed."""
    found = [point.row.measurement for point in view.points]
    ran = [one.effective for one in found if one is not None and one.effective is not None]
    live = sum(effective.start_kind == "live" for effective in ran)
    if not live:
        return "Every trial, and every round of the confirmation, had a server of its own."
    return (
        f"{live} of {len(ran)} trials had the running server of the trial before, which was "
        "changed and read back; the others, and every round of the confirmation, started one."
    )


def _warnings(view: StudyView) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in view.rows:
        for warning in () if row.measurement is None else row.measurement.warnings:
            found.setdefault(warning, []).append(str(row.number))
    return found
