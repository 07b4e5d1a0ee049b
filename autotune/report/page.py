"""A self-contained HTML page: headings, prose, tables, Plotly figures and foldable texts.

All text is escaped, so names and answers of a model may hold markup. plotly.js is part of the file
(once, and only where there is a figure), and the page's own policy forbids it to load anything.
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from kvtune.errors import BadInput

Tone: TypeAlias = Literal["", "good", "bad", "muted"]
"""How a row or figure is meant; a colour only, so its text has to say the same."""


class PlotlyFigure(Protocol):
    """What is asked of a figure that Plotly's Python classes made."""

    def to_json(self) -> str:
        """The figure as JSON with `data` and `layout`."""


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """One number that a reader should see first, with its unit in `value`."""

    label: str
    value: str
    note: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class KeyFigures:
    """Key figures side by side."""

    kind: ClassVar[str] = "key_figures"
    figures: tuple[KeyFigure, ...]


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of short texts."""

    kind: ClassVar[str] = "bullets"
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a table's column: numbers are aligned to the right, prose gets room."""

    title: str
    is_number: bool = False
    is_prose: bool = False

    @property
    def style(self) -> str:
        """The class of the column's cells."""
        return "number" if self.is_number else "prose" if self.is_prose else ""


@dataclass(frozen=True, slots=True)
class Row:
    """A table's row, one text a column."""

    cells: tuple[str, ...]
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its caption. A cell of the first column names its row."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A Plotly figure: a mapping with `data` and `layout`, or an object of Plotly's own.

    `description` says what it shows to a reader who does not see it. Colours of text, grid and
    background follow the reader's light or dark mode, so `plot` should leave them out.
    """

    kind: ClassVar[str] = "figure"
    caption: str
    description: str
    plot: Mapping[str, Any] | PlotlyFigure
    height_px: int = 380

    @property
    def json(self) -> str:
        """The figure for a script element: nothing in it can end that element.

        Raises:
            ValueError: a number is not finite, which JSON cannot say.
        """
        plot = self.plot
        found = plot if isinstance(plot, Mapping) else json.loads(plot.to_json())
        kept = {"data": found["data"], "layout": found.get("layout", {})}
        return json.dumps(kept, allow_nan=False).replace("<", "\\u003c")


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text that is shown as it is: an answer, a log."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Details:
    """Texts that are folded away until the reader asks for them; side by side where they fit."""

    kind: ClassVar[str] = "details"
    summary: str
    excerpts: tuple[Excerpt, ...]


Block: TypeAlias = str | KeyFigures | Bullets | Table | Figure | Details
"""What a section is made of; a string is a paragraph."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page. `anchor` is made of the heading where it is not given."""

    heading: str
    blocks: tuple[Block, ...]
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page; its table of contents is made of the sections."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]


def plain(text: str) -> str:
    """A text for a label in a figure, where Plotly would else take `<b>` and the like as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def render_page(page: Page) -> str:
    """The page as HTML. The same page always gives the same text.

    Raises:
        ValueError: a figure holds a number that is not finite, or a row has not one cell a column.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    _check_rows(page)
    environment = Environment(
        loader=PackageLoader("kvtune.autotune.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    blocks = [block for section in page.sections for block in section.blocks]
    return environment.get_template("page.html").render(
        page=replace(page, sections=_anchored(page.sections)),
        plotly_js=get_plotlyjs() if any(isinstance(block, Figure) for block in blocks) else "",
    )


def write_page(page: Page, path: Path) -> None:
    """Write the page to a file, which appears whole or not at all; an older one is replaced.

    Raises:
        BadInput: the path cannot be written.
        ValueError: as `render_page`.
    """
    text = render_page(page)
    check_path(path)
    with _complaining(path):
        # Not by tempfile: who may read the page is for the user's umask to say.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def check_path(path: Path) -> None:
    """Refuse a path to which no page can be written, before the work that the page is about.

    Raises:
        BadInput: the path cannot be written.
    """
    with _complaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise BadInput(f"{path} cannot be written: it is no file", fix="choose another one")
        tempfile.TemporaryFile(dir=path.parent).close()


@contextmanager
def _complaining(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written: {error.strerror}", fix="choose another file"
        ) from error


def _check_rows(page: Page) -> None:
    for section in page.sections:
        for block in section.blocks:
            if not isinstance(block, Table):
                continue
            for row in block.rows:
                if len(row.cells) != len(block.columns):
                    raise ValueError(
                        f"table {block.caption!r} has {len(block.columns)} columns, but a row of "
                        f"{len(row.cells)} cells: {row.cells}"
                    )


def _anchored(sections: tuple[Section, ...]) -> tuple[Section, ...]:
    """The sections with anchors, each its own."""
    taken: set[str] = set()
    found = []
    for section in sections:
        wanted = re.sub(r"[^a-z0-9]+", "-", (section.anchor or section.heading).lower()).strip("-")
        anchor, number = wanted or "section", 2
        while anchor in taken:
            anchor, number = f"{wanted or 'section'}-{number}", number + 1
        taken.add(anchor)
        found.append(replace(section, anchor=anchor))
    return tuple(found)
