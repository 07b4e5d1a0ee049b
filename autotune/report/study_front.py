"""The front of a study on its page."""

from __future__ import annotations

from kvtune.autotune.front_words import figure_text, remarks, roles, unlike_text
from kvtune.autotune.report.page import Block, Column, Row, Table
from kvtune.autotune.report.study_view import StudyView
from kvtune.autotune.words import interval


def front_blocks(view: StudyView) -> tuple[Block, ...]:
    """The trials that no other one beats, as the decision has them; empty if nobody asked."""
    decision = view.decision
    if decision is None or decision.front is None:
        return ()
    front = decision.front
    if not front.points:
        return tuple(remarks(front, decision))
    columns = (
        Column("trial", is_number=True),
        *(Column(name, is_number=True) for name in front.objectives),
        Column("confirmed", is_number=True),
        Column("settings", is_prose=True),
        Column("what it is", is_prose=True),
    )
    rows = []
    for point in front.points:
        known = view.point(point.trial)
        own = roles(point, front, decision.recommended)
        said = [text for text in (own, unlike_text(point), point.doubt) if text]
        cells = (
            str(point.trial),
            *(figure_text(point.figures[name]) for name in front.objectives),
            interval(point.confirmed),
            "" if known is None else known.settings,
            "; ".join(said),
        )
        rows.append(Row(cells, "good" if point.trial == decision.recommended else ""))
    caption = f"Front of {', '.join(front.objectives)}. No other trial beats these"
    return (Table(caption, columns, tuple(rows)), *remarks(front, decision))
