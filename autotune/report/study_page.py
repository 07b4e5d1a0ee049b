"""A study as a page: the decision first, then the whole evidence behind it, in reading order."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from kvtune.autotune.decide import REPORTED
from kvtune.autotune.emit.vllm_yaml import VllmYaml
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
from kvtune.autotune.report.study_evidence import (
    forecast_blocks,
    measured_blocks,
    quality_blocks,
    space_blocks,
    tradeoff_blocks,
    verdict_blocks,
)
from kvtune.autotune.report.study_figures import rounds_figure
from kvtune.autotune.report.study_findings import confirmations
from kvtune.autotune.report.study_sections import (
    convergence_blocks,
    failures_blocks,
    limits_blocks,
    prices_blocks,
    trail_blocks,
    trials_blocks,
)
from kvtune.autotune.report.study_view import STOCK, Standing, StudyView, name_of
from kvtune.autotune.words import digits, duration, interval
from kvtune.errors import BadInput
from kvtune.profilers.goal import goal_text, slo_key
from kvtune.types import Bottleneck, Decision, Interval, Outcome, ServingConfig, Verdict

OUTCOMES: Mapping[Outcome, tuple[str, Tone]] = {
    Outcome.WINNER: ("winner", "good"),
    Outcome.KEEP_BASELINE: ("keep the stock defaults", ""),
    Outcome.NO_CLEAR_WINNER: ("no clear winner", "muted"),
    Outcome.INFEASIBLE: ("infeasible", "bad"),
    Outcome.NOTHING_MEASURED: ("nothing was measured", "bad"),
}


def study_page(view: StudyView) -> Page:
    """All that is known of a study; what is not is said in its place."""
    study = view.study
    sections = (
        Section("Decision", _decision(view)),
        Section("Winner against stock", _against_stock(view)),
        Section("Decision trail", trail_blocks(view)),
        Section("Trials", trials_blocks(view)),
        Section("Convergence", convergence_blocks(view)),
        Section("Trade-offs", tradeoff_blocks(view)),
        Section("Settings", space_blocks(view)),
        Section("Limits", limits_blocks(view)),
        Section("Failures", failures_blocks(view)),
        Section("Price of harm", prices_blocks(view)),
        Section("Verdict", verdict_blocks(view)),
        Section("Forecasts", forecast_blocks(view)),
        Section("Quality", quality_blocks(view)),
        Section("How it was measured", measured_blocks(view)),
    )
    subtitle = (
        f"{_short_name(study.model)} on {study.device.count} x {study.device.name}, "
        f"{view.engine_text}, {study.created_at[:16].replace('T', ' ')}"
    )
    return Page(f"Study {study.name}", subtitle, sections)


def _short_name(model: str) -> str:
    """A model's name; of a directory only the last part, the whole stands below."""
    path = Path(model)
    return path.name if path.is_absolute() else model


# --- decision ---------------------------------------------------------------------------------


def _decision(view: StudyView) -> tuple[Block, ...]:
    blocks: list[Block] = [_headline(view)]
    decision = view.decision
    if decision is None:
        blocks.append(
            "There is no decision: the search has not ended, or was killed. The same kvtune search "
            "command goes on where it stopped; what is below is what was measured so far."
        )
        return tuple(blocks)
    blocks.append(_sentence(view, decision))
    if decision.reasons:
        blocks.append(Bullets(decision.reasons))
    if view.config is not None and decision.outcome is not Outcome.INFEASIBLE:
        blocks += _what_to_run(view, view.config)
    return tuple(blocks)


def _headline(view: StudyView) -> KeyFigures:
    decision = view.decision
    figures = [KeyFigure("outcome", "no decision yet")]
    if decision is not None:
        text, tone = OUTCOMES[decision.outcome]
        figures = [KeyFigure("outcome", text, tone=tone)]
    if decision is not None and decision.recommended is not None:
        is_closest = decision.outcome is Outcome.INFEASIBLE
        point = view.point(decision.recommended)
        figures.append(
            KeyFigure(
                "closest trial" if is_closest else "recommended trial",
                str(decision.recommended),
                "" if point is None else point.settings,
            )
        )
        if (value := decision.figures.get(view.metric)) is not None:
            figures.append(
                KeyFigure(
                    view.objective_text, digits(value.estimate), _bounds(value) or "measured once"
                )
            )
        if (gain := decision.gain_ratio) is not None:
            without = "measured once" if gain.repeats < 2 else "too few good requests"
            note = _bounds(gain) or f"{without}, no interval"
            figures.append(KeyFigure("times stock", digits(gain.estimate), note))
    if view.profile is not None:
        figures.append(_verdict_figure(view.profile.profile.verdict))
    failed = sum(point.standing is Standing.FAILED for point in view.points)
    note = f"{failed} failed" if failed else "none failed"
    if cut := sum(point.standing is Standing.CUT for point in view.points):
        note += f", {cut} given up early"
    if view.rounds:
        most = max(each.number for each in view.rounds)
        note += f"; then {most} round{'' if most == 1 else 's'} of confirmation"
    figures.append(KeyFigure("trials", str(len(view.points)), note))
    return KeyFigures(tuple(figures))


def _verdict_figure(verdict: Verdict) -> KeyFigure:
    if verdict.bottleneck is Bottleneck.ABSTAIN:
        return KeyFigure("verdict on stock", "none", "too little is known")
    label = "stock is" if verdict.bottleneck is Bottleneck.IDLE else "stock is bound by"
    return KeyFigure(label, verdict.bottleneck.value, f"{verdict.confidence} confidence")


def _bounds(value: Interval) -> str:
    if value.low is None:
        return ""
    if value.high is None:
        return f"{value.confidence:.0%}: at least {digits(value.low)}"
    return f"{value.confidence:.0%}: {digits(value.low)} to {digits(value.high)}"


def _sentence(view: StudyView, decision: Decision) -> str:
    """The decision as a person would tell it."""
    goal = goal_text(view.study.goal)
    if decision.outcome is Outcome.NOTHING_MEASURED:
        return f"For {goal} no trial gave a number, so nothing is recommended."
    point = view.point(decision.recommended)
    settings = "the stock defaults"
    if point is not None and point.number != STOCK:
        settings = point.settings
    gain = ""
    if decision.gain_ratio is not None:
        objective = view.study.goal.objective.capitalize()
        gain = f" {objective} is {interval(decision.gain_ratio)} times that of the stock defaults."
    ties = ""
    if decision.ties:
        ties = f" It cannot be told from {', '.join(map(name_of, decision.ties))}."
    if decision.outcome is Outcome.WINNER:
        return f"For {goal}: run {settings}.{gain}{ties}"
    if decision.outcome is Outcome.KEEP_BASELINE:
        return f"For {goal}: stay with the stock defaults.{ties}"
    if decision.outcome is Outcome.INFEASIBLE:
        return f"Nothing that was measured meets {goal}. The closest is {settings}.{gain}"
    return f"For {goal} nothing is proved. The careful choice is {settings}.{gain}{ties}"


def _what_to_run(view: StudyView, config: ServingConfig) -> list[Block]:
    tuned = [setting for setting in config.settings if setting.origin == "tuned"]
    blocks: list[Block] = []
    if tuned:
        blocks.append(
            Table(
                "What to set, beside the arguments that every trial had",
                (Column("setting"), Column("value"), Column("because", is_prose=True)),
                tuple(Row((each.name, str(each.value), each.because)) for each in tuned),
            )
        )
    name = shlex.quote(view.study.name)
    blocks.append(f"Start it with: kvtune serve --study {name}")
    if view.emitted:
        blocks.append(
            Table(
                "What was written out, with the start of each file's SHA-256",
                (
                    Column("file"),
                    Column("format"),
                    Column("SHA-256"),
                    Column("trial", is_number=True),
                    Column("when"),
                ),
                tuple(
                    Row(
                        (
                            f"{row.directory.rstrip('/')}/{file}",
                            row.format,
                            digest[:12],
                            str(row.trial),
                            row.created_at[:16].replace("T", " "),
                        )
                    )
                    for row in view.emitted
                    for file, digest in row.files.items()
                ),
            )
        )
    else:
        blocks.append(f"No file was written yet: kvtune emit --study {name} -o deploy writes it.")
    try:
        files = VllmYaml().render(config)
    except BadInput as error:
        return [*blocks, f"It cannot be written as a vLLM config file: {error.message}."]
    excerpts = tuple(Excerpt(file, text) for file, text in files.items())
    return [*blocks, Details("The config file for vllm serve --config", excerpts)]


def _against_stock(view: StudyView) -> tuple[Block, ...]:
    found = confirmations(view)
    figure = rounds_figure(view, found)
    blocks: list[Block] = []
    if figure is None:
        blocks.append(
            "Nothing was confirmed: no finalist was measured again beside the stock defaults, so "
            "the figures are those of single trials, and chance is not ruled out."
        )
    elif len(found) == 1:
        alone = f"Only {name_of(found[0].trial)} was measured again, so nothing is compared."
        blocks += [alone, figure]
    else:
        blocks.append(figure)
    if view.decision is not None and view.decision.figures:
        blocks.append(_figures_table(view, view.decision))
    return tuple(blocks)


def _figures_table(view: StudyView, decision: Decision) -> Table:
    limits = {slo_key(slo): slo.limit_s for slo in view.study.goal.slos}
    sides = [("stock defaults", decision.baseline_figures)]
    if decision.recommended != decision.baseline:
        sides.insert(0, (f"trial {decision.recommended}", decision.figures))
    names = [
        name
        for name in dict.fromkeys([*REPORTED, *limits])
        if any(name in figures for _, figures in sides)
    ]
    rows = []
    for name in names:
        limit = limits.get(name)
        first = sides[0][1].get(name)
        misses = limit is not None and first is not None and first.estimate > limit
        rows.append(
            Row(
                (
                    name,
                    *(interval(figures.get(name)) for _, figures in sides),
                    "-" if limit is None else duration(limit),
                ),
                "bad" if misses else "",
            )
        )
    columns = (
        Column("metric"),
        *(Column(title, is_number=True) for title, _ in sides),
        Column("limit", is_number=True),
    )
    return Table("Measured figures with 95% intervals where there are rounds", columns, tuple(rows))
