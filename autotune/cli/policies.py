"""`kvtune policies`: the catalogue of what can be done to a KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from kvtune.policies.catalogue import Entry

EPILOG = "Example: kvtune policies --axis bits"


def policies(
    axis: Annotated[
        str | None, typer.Option("--axis", help="Only one axis, such as token, bits or dim.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Only lever, method or architecture.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page of the documentation.")
    ] = False,
    json: options.Json = False,
) -> None:
    """List every policy: what it acts on, its harm, what it saves and needs, and where it runs."""
    from json import dumps

    from kvtune.autotune.cli.console import print_json
    from kvtune.errors import BadInput
    from kvtune.policies.catalogue import as_dict, as_markdown, catalogue

    every = catalogue()
    found = [entry for entry in every if axis in (None, entry.axis) and kind in (None, entry.kind)]
    if not found:
        axes = ", ".join(sorted({entry.axis for entry in every}))
        raise BadInput(
            f"no policy has axis {axis or 'any'} and kind {kind or 'any'}",
            fix=f"axes: {axes}; kinds: lever, method, architecture",
        )
    if json:
        print_json(dumps([as_dict(entry) for entry in found]))
    elif markdown:
        typer.echo(as_markdown(found), nl=False)
    else:
        _print(found)


def _print(entries: list[Entry]) -> None:
    from rich.table import Table

    from kvtune.autotune.cli.console import stdout
    from kvtune.policies.catalogue import BACKENDS

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "axis", "harm", "saves", "needs", "served by"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(
            entry.name,
            entry.axis,
            entry.harm,
            ", ".join(entry.saves),
            ", ".join(entry.needs) or "-",
            ", ".join(entry.engines),
        )
    stdout.print(table)
    stdout.print()
    stdout.print(f"[dim]{BACKENDS}[/dim]", soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(policies)
