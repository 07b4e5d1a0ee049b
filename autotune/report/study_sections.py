"""Parts of a study's page about the search itself: its steps, trials, limits, failures, prices."""

from __future__ import annotations

from collections.abc import Mapping

from kvtune.autotune.prices import buys_text, cost_texts
from kvtune.autotune.report.page import (
    Block,
    Column,
    Details,
    Excerpt,
    KeyFigure,
    KeyFigures,
    Row,
    Table,
    Tone,
)
from kvtune.autotune.report.study_figures import margins_figure, progress_figures
from kvtune.autotune.report.study_findings import margins, progress
from kvtune.autotune.report.study_prices import failures, prices
from kvtune.autotune.report.study_trail import Step, trail
from kvtune.autotune.report.study_view import Standing, StudyView, name_of
from kvtune.autotune.words import amount, digits
from kvtune.types import Price

STANDING_TONE: Mapping[Standing, Tone] = {
    Standing.MET: "",
    Standing.UNPROVED: "",
    Standing.MISSED: "muted",
    Standing.OUT: "muted",
    Standing.FAILED: "bad",
}
KINDS: Mapping[str, str] = {
    "begin": "goal",
    "forecast": "forecast of",
    "trial": "trial",
    "verdict": "verdict",
    "quality": "quality of",
    "rung": "rung",
    "unlock": "unlock before",
    "note": "note",
    "stop": "end of trials",
    "finalists": "finalists",
    "confirm": "confirmation",
    "decide": "decision",
    "emit": "emitted",
}


def trail_blocks(view: StudyView) -> tuple[Block, ...]:
    """Every step from the goal to the emitted files."""
    columns = (
        Column("after", is_number=True),
        Column("step"),
        Column("what came of it", is_prose=True),
    )
    rows = tuple(Row(_step_cells(step), _step_tone(step)) for step in trail(view))
    return (
        "Every step in the order of time. L0 is the stock defaults, L1 lossless settings, L2 "
        "settings that may change answers a little, L3 lossy ones.",
        Table("From the goal to the decision", columns, rows),
    )


def _step_cells(step: Step) -> tuple[str, ...]:
    rung = f" ({step.rung})" if step.rung else ""
    is_named = step.trial is not None and step.kind not in ("verdict", "decide")
    kind = KINDS[step.kind]
    named = f"{kind} {step.trial}{rung}" if is_named else kind.removesuffix(" before")
    return (_clock(step.at_s), named, step.says)


def _step_tone(step: Step) -> Tone:
    return "muted" if step.kind in ("forecast", "confirm", "note") else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def trials_blocks(view: StudyView) -> tuple[Block, ...]:
    """Each trial with what became of it."""
    if not view.points:
        return ("No trial was begun.",)
    rejected = {} if view.decision is None else view.decision.rejected
    columns = (
        Column("trial", is_number=True),
        Column("settings", is_prose=True),
        Column(view.objective_text, is_number=True),
        Column("standing"),
        Column("why", is_prose=True),
    )
    rows = tuple(
        Row(
            (
                str(point.number),
                point.settings,
                amount(point.value),
                point.standing.value,
                point.why or rejected.get(point.number, ""),
            ),
            STANDING_TONE.get(point.standing, "muted"),
        )
        for point in view.points
    )
    return (Table("Trials in the order in which they were begun", columns, rows),)


def convergence_blocks(view: StudyView) -> tuple[Block, ...]:
    """How the best so far grew."""
    figures = progress_figures(view, progress(view))
    return tuple(figures) or ("No trial has a number, so there is nothing to draw.",)


def limits_blocks(view: StudyView) -> tuple[Block, ...]:
    """How near each trial came to the limits of the goal."""
    if not view.study.goal.slos:
        return ("The goal has no limits, so every completed request counts.",)
    figure = margins_figure(view, margins(view))
    return (figure,) if figure else ("No trial has a figure that a limit is about.",)


def failures_blocks(view: StudyView) -> tuple[Block, ...]:
    """What failed, by class, with what servers said."""
    found = failures(view)
    if not found:
        return ("No trial failed.",)
    blocks: list[Block] = [
        KeyFigures(
            tuple(
                KeyFigure(kind.value, str(len(failed)), tone="bad")
                for kind, failed in found.items()
            )
        )
    ]
    for kind, failed in found.items():
        rows = tuple(
            Row(
                (
                    str(each.trial),
                    each.settings
                    if each.parent is None
                    else f"{name_of(each.parent)} again: {each.settings}",
                    each.message,
                    each.fix or "-",
                )
            )
            for each in failed
        )
        columns = (
            Column("trial", is_number=True),
            Column("settings", is_prose=True),
            Column("message", is_prose=True),
            Column("fix", is_prose=True),
        )
        blocks.append(Table(kind.value, columns, rows))
        logs = tuple(
            Excerpt(f"trial {each.trial}", each.log_excerpt) for each in failed if each.log_excerpt
        )
        if logs:
            blocks.append(Details(f"From the server's log: {kind.value}", logs))
    return tuple(blocks)


def prices_blocks(view: StudyView) -> tuple[Block, ...]:
    """What each further rung bought and cost."""
    found = prices(view)
    if not found:
        return ("Nothing was measured.",)
    columns = (
        Column("rung"),
        Column("best trial", is_number=True),
        Column("settings", is_prose=True),
        Column(view.objective_text, is_number=True),
        Column("buys"),
        Column("costs", is_prose=True),
        Column("standing"),
    )
    rows = tuple(_price_row(view, price) for price in found)
    if len(found) == 1:
        note = "Only one rung was measured, so no step has a price."
    else:
        note = (
            "Each rung's best measured trial beside the best below it. A gain has an interval "
            "where both were confirmed in the same rounds; else it is the ratio of single trials."
        )
    return (note, Table("What each further step of harm bought", columns, rows))


def _price_row(view: StudyView, price: Price) -> Row:
    point = view.point(price.trial)
    standing = Standing.PLANNED if point is None else point.standing
    cells = (
        price.rung,
        str(price.trial),
        price.settings,
        digits(price.value),
        buys_text(price) or "-",
        "; ".join(cost_texts(price)) or "-",
        standing.value,
    )
    return Row(cells, STANDING_TONE.get(standing, "muted"))
