"""A profile as a page: the verdict first, then what it rests on and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtune.autotune.forecast.calibrate import GOODPUT
from kvtune.autotune.report.figures_profile import (
    forecasts_figure,
    parts_figure,
    roofline_figure,
)
from kvtune.autotune.report.figures_workload import reuse_figure
from kvtune.autotune.report.forecast_words import COLUMNS
from kvtune.autotune.report.page import (
    Block,
    Bullets,
    Column,
    KeyFigure,
    KeyFigures,
    Page,
    Row,
    Section,
    Table,
    Tone,
)
from kvtune.autotune.report.view import ProfileView, prefix_notes, rate_text, work_text
from kvtune.autotune.report.workload_page import arrival_blocks, length_blocks, reuse_table
from kvtune.autotune.words import amount, digits, duration, percent_change, span
from kvtune.profilers.metrics.base import metric_of
from kvtune.types import Bottleneck, Evidence, Forecast, Profile, StepTimeModel, Verdict

KEY_METRICS = {
    "goodput_requests_per_s": "goodput",
    "output_tokens_per_s": "output tokens",
    "ttft_p95_s": "p95 time to first token",
    "itl_p95_s": "p95 time between tokens",
}


def profile_page(view: ProfileView) -> Page:
    """All that is known of a profile, and for what is not, why."""
    profile = view.profile
    sections = [
        Section("Verdict", _verdict(profile)),
        Section("Where a step's time goes", _step(view)),
        Section("Evidence", evidence_blocks(profile.verdict.evidence)),
        Section("Requests", (*length_blocks(view.workload), *arrival_blocks(view.workload))),
        Section("Prefix reuse", _reuse(view)),
        Section("Roofline", _roofline(view)),
    ]
    if view.forecasts:
        sections.append(Section("Forecasts", _forecasts(view.forecasts)))
    if missing := missing_of(view):
        sections.append(Section("Not known", (Bullets(missing),)))
    sections.append(Section("Server", _server(profile)))
    subtitle = ", ".join(
        part
        for part in (
            view.workload.name and f"{view.workload.name}: {view.workload.summary}",
            profile.device.name if profile.device else "",
            profile.measured_at[:16].replace("T", " "),
        )
        if part
    )
    return Page(f"Profile of {_short_name(profile.model)}", subtitle, tuple(sections))


def _short_name(model: str) -> str:
    """A model's name; of a directory only the last part, the whole stands below."""
    path = Path(model)
    return path.name if path.is_absolute() else model


def missing_of(view: ProfileView) -> tuple[str, ...]:
    """What is not known, each with the reason or with what would tell it."""
    verdict = view.profile.verdict
    return (
        *verdict.missing,
        *(f"roofline: {entry}" for entry in view.roofline.missing),
        *view.workload.missing,
        *(() if view.parts is not None else ("division of a step: see the step-time model",)),
        *(() if view.forecasts else ("forecasts: they need a workload to replay",)),
    )


def _verdict(profile: Profile) -> tuple[Block, ...]:
    verdict = profile.verdict
    figures = [KeyFigure(*_headline(verdict))]
    for name, label in KEY_METRICS.items():
        if values := profile.metrics.get(name):
            unit = metric_of(name).unit
            value = duration(values[-1]) if unit == "s" else amount(values[-1], unit)
            figures.append(KeyFigure(label, value))
    blocks: list[Block] = [KeyFigures(tuple(figures)), verdict.summary]
    if verdict.next_experiment:
        blocks.append(f"Next: {verdict.next_experiment}")
    if profile.warnings:
        blocks.append("To be kept in mind:")
        blocks.append(Bullets(profile.warnings))
    return tuple(blocks)


def _headline(verdict: Verdict) -> tuple[str, str, str]:
    note = f"{verdict.confidence} confidence"
    if verdict.bottleneck is Bottleneck.ABSTAIN:
        return ("verdict", "none", "too little is known")
    if verdict.bottleneck is Bottleneck.IDLE:
        return ("the server is", "idle", note)
    return ("bound by", verdict.bottleneck.value, note)


def _step(view: ProfileView) -> tuple[Block, ...]:
    blocks: list[Block] = []
    if view.parts is not None:
        blocks.append(parts_figure(view.parts))
    if (model := view.profile.step_time) is not None:
        blocks.append(_step_table(model))
    return tuple(blocks) or ("It is not known; see what is missing below.",)


def _step_table(model: StepTimeModel) -> Table:
    origin = "the probe" if model.source == "probe" else "the load itself"
    rows = [
        Row(("in any case", span(model.fixed_s))),
        Row(("for each sequence", span(model.per_sequence_s))),
        Row(("for each resident token", span(model.per_kv_token_s))),
    ]
    if model.weight_read_s is not None:
        weights = duration(model.weight_read_s, model.fixed_s)
        rows.insert(1, Row(("of which reading the weights", weights)))
    if model.kv_bytes_per_s is not None and model.per_kv_token_s.low:
        rows.append(Row(("KV is read at", rate_text(model.kv_bytes_per_s.estimate, "B/s"))))
    caption = (
        f"What a decode step costs, from {model.observations:,} steps seen in {origin}; half of "
        f"them are within {digits(100 * model.error_share)}%"
    )
    return Table(caption, (Column("part"), Column("time", is_number=True)), tuple(rows))


def evidence_blocks(evidence: Sequence[Evidence]) -> tuple[Block, ...]:
    """What a verdict weighs, in a table; at last what it could not know."""
    columns = (
        Column("metric"),
        Column("value", is_number=True),
        Column("threshold", is_number=True),
        Column("holds"),
        Column("says", is_prose=True),
        Column("source", is_prose=True),
    )
    known = [row for row in evidence if row.value is not None]
    known.sort(key=lambda row: row.holds is not True)
    table = Table(
        "What the verdict weighs, signs that hold first",
        columns,
        tuple(_evidence_row(row) for row in known),
    )
    unknown = ", ".join(row.metric for row in evidence if row.value is None)
    return (table, f"Not known: {unknown}.") if unknown else (table,)


def _evidence_row(row: Evidence) -> Row:
    words = {True: "yes", False: "no", None: "cannot be told"}
    value, threshold = amount(row.value, row.unit), amount(row.threshold, row.unit)
    cells = (row.metric, value, threshold, words[row.holds], row.says, row.source)
    return Row(cells, "" if row.holds else "muted")


def _reuse(view: ProfileView) -> tuple[Block, ...]:
    blocks: list[Block] = []
    use = view.prefix
    possible = view.workload.reusable.get(view.block_tokens or 0)
    figures = [
        KeyFigure(label, amount(share, "share"), note)
        for label, share, note in (
            ("served from the cache", use.hits, "of the prompt tokens"),
            ("comes again", possible, "in blocks as large as this server's"),
        )
        if share is not None
    ]
    if figures:
        blocks.append(KeyFigures(tuple(figures)))
    if notes := prefix_notes(view):
        blocks.append(Bullets(notes))
    if view.workload.reusable:
        blocks.append(reuse_figure(view.workload.reusable, view.block_tokens, use.hits))
        blocks.append(reuse_table(view.workload, view.block_tokens))
    return tuple(blocks) or ("It is not known; see below.",)


def _roofline(view: ProfileView) -> tuple[Block, ...]:
    found = view.roofline
    if not found.work:
        return ("It cannot be drawn; see what is missing below.",)
    rows = tuple(
        Row(
            (
                work.kind,
                work_text(work),
                digits(work.intensity),
                found.held_by(work) or "-",
                "-" if work.flop_per_s is None else rate_text(work.flop_per_s, "flop/s"),
                "-" if (reached := found.reached(work)) is None else f"{reached:.0%}",
            )
        )
        for work in found.work
    )
    columns = (
        Column("work"),
        Column("holds"),
        Column("flop/byte", is_number=True),
        Column("held by"),
        Column("speed", is_number=True),
        Column("of its roof", is_number=True),
    )
    table = Table("The workload's steps under the ceilings of one device", columns, rows)
    figure = roofline_figure(found)
    return (table,) if figure is None else (figure, table)


def _forecasts(told: Sequence[Forecast]) -> tuple[Block, ...]:
    by_lever: dict[str, dict[str, Forecast]] = {}
    for one in told:
        by_lever.setdefault(one.lever, {})[one.metric] = one
    levers = sorted(by_lever.items(), key=_promise)
    columns = (
        Column("lever"),
        *(Column(title, is_number=True) for title in COLUMNS.values()),
    )
    rows = tuple(_forecast_row(name, found) for name, found in levers)
    reasons: dict[str, list[str]] = {}
    for name, found in levers:
        reasons.setdefault(found[GOODPUT].reason, []).append(name)
    because = tuple(Row((", ".join(names), reason)) for reason, names in reasons.items())
    figure = forecasts_figure([one for one in told if one.metric == GOODPUT], "goodput")
    return (
        *(() if figure is None else (figure,)),
        Table("Each as a change from what was measured, with its range", columns, rows),
        Table("Why", (Column("lever"), Column("because", is_prose=True)), because),
    )


def _promise(lever: tuple[str, dict[str, Forecast]]) -> tuple[bool, float]:
    """What the engine serves comes first, and what helps goodput most."""
    goodput = lever[1][GOODPUT]
    gain = 0.0 if goodput.ratio is None else goodput.ratio.estimate
    return goodput.served_by == "reference", -gain


def _forecast_row(name: str, found: dict[str, Forecast]) -> Row:
    cells = [percent_change(found[metric].ratio) if metric in found else "-" for metric in COLUMNS]
    unserved: Tone = "muted" if found[GOODPUT].served_by == "reference" else ""
    return Row((name, *cells), unserved)


def _server(profile: Profile) -> tuple[Block, ...]:
    known = [("model", profile.model), ("address", profile.endpoint_url)]
    if (engine := profile.engine) is not None:
        known.append(("engine", f"{engine.name} {engine.version} ({engine.platform})"))
    if (device := profile.device) is not None:
        known.append(("device", f"{device.count} x {device.name}"))
    if (ceilings := profile.ceilings) is not None:
        known.append(("memory read ceiling", rate_text(ceilings.read_bytes_per_s, "B/s")))
        rate = rate_text(ceilings.matrix_flop_per_s, "flop/s")
        known.append(("matrix ceiling", f"{rate} in {ceilings.matrix_dtype}"))
    if (effective := profile.effective) is not None:
        settings = effective.model_dump(exclude={"schema_version", "source"})
        known += [(name, str(value)) for name, value in settings.items() if value is not None]
    rows = tuple(Row(pair) for pair in known if pair[1])
    caption = "What the server runs with, as it reports it"
    return (Table(caption, (Column("setting"), Column("value")), rows),)
