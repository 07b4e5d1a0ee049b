"""The front of a study as a table."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from kvtune.autotune.cli.console import stdout
from kvtune.autotune.words import digits, interval
from kvtune.types import Decision, Front, FrontPoint, Interval

MIB = 1 << 20


def print_front(decision: Decision, settings: Mapping[int, str]) -> None:
    """Show the front of a decision, if one was asked for; `settings` are by number of a trial."""
    front = decision.front
    if front is None:
        return
    wanted = ", ".join(front.objectives)
    stdout.print(f"\n[bold]Front[/bold] ({wanted}): no other trial beats these", soft_wrap=True)
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
            *(_text(point.figures[name]) for name in front.objectives),
            interval(point.confirmed),
            "\n".join(said),
        )
    stdout.print(table)
    by = None if decision.recommended is None else front.beaten.get(decision.recommended)
    if by is not None:
        stdout.print(
            f"- trial {decision.recommended} is recommended by {front.objectives[0]} alone: trial "
            f"{by} beats it",
            soft_wrap=True,
        )
    for trial, reason in sorted(front.unplaced.items()):
        stdout.print(f"- trial {trial} has no place: {escape(reason)}", soft_wrap=True)
    for reason in front.reasons:
        stdout.print(f"- {escape(reason)}", soft_wrap=True)


def _marks(point: FrontPoint, front: Front, decision: Decision) -> list[str]:
    """What is to be said of a point beside its figures."""
    number = point.trial
    roles = ["recommended"] if number == decision.recommended else []
    roles += [f"best {name}" for name, trial in front.ends.items() if trial == number]
    roles += ["knee"] if number == front.knee else []
    said = [f"[bold]{', '.join(roles)}[/bold]"] if roles else []
    if point.no_better_than:
        named = ", ".join(map(str, point.no_better_than))
        said.append(f"[dim]beyond noise no better than {named}[/dim]")
    if point.doubt:
        said.append(f"[yellow]{escape(point.doubt)}[/yellow]")
    return said


def _text(figure: Interval) -> str:
    """A figure in few characters: bytes in MiB, what is exact without its interval."""
    if figure.unit == "bytes":
        return f"{digits(figure.estimate / MIB)} MiB"
    return "0" if figure.unit == "nats" and figure.estimate == 0 else interval(figure)
