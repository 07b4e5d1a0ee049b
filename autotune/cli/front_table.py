"""The front of a study as a table."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from kvtune.autotune.cli.console import stdout
from kvtune.autotune.front_words import figure_text, remarks, roles, unlike_text
from kvtune.autotune.words import interval
from kvtune.types import Decision, Front, FrontPoint


def print_front(decision: Decision, settings: Mapping[int, str]) -> None:
    """Show the front of a decision, if one was asked for; `settings` are by number of a trial."""
    front = decision.front
    if front is None:
        return
    wanted = ", ".join(front.objectives)
    told = "no other trial beats these" if front.points else "nobody is on it"
    stdout.print(f"\n[bold]Front[/bold] ({wanted}): {told}", soft_wrap=True)
    if front.points:
        stdout.print(_table(decision, front, settings))
    for remark in remarks(front, decision):
        stdout.print(f"- {escape(remark)}", soft_wrap=True)


def _table(decision: Decision, front: Front, settings: Mapping[int, str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("trial")
    for name in front.objectives:
        table.add_column(name, justify="right")
    table.add_column("confirmed", justify="right")
    table.add_column("", overflow="fold")
    for point in front.points:
        said = [escape(settings.get(point.trial, "")), *_marks(point, front, decision)]
        table.add_row(
            str(point.trial),
            *(figure_text(point.figures[name]) for name in front.objectives),
            interval(point.confirmed),
            "\n".join(said),
        )
    return table


def _marks(point: FrontPoint, front: Front, decision: Decision) -> list[str]:
    styled = {
        "bold": roles(point, front, decision.recommended),
        "dim": unlike_text(point),
        "yellow": point.doubt,
    }
    return [f"[{style}]{escape(said)}[/{style}]" for style, said in styled.items() if said]
