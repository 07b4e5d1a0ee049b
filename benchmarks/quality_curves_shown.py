"""The curves of `quality_curves.py`: what one consists of, as a table, and drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtune.profilers.quality.suite import Suite


@dataclass(frozen=True, slots=True)
class Sweep:
    """A method at several strengths: `stack` is filled with each of `kept`, tokens or a share.

    For shares, `{tokens}` in it are those of an average prompt.
    """

    method: str
    stack: str
    kept: tuple[float, ...]

    def stacks(self, prompt_tokens: float) -> Iterator[tuple[float, str]]:
        """What is kept, and the stack that keeps so much, from the weakest on."""
        for kept in self.kept:
            yield kept, self.stack.format(kept=kept, tokens=round(kept * prompt_tokens))


@dataclass(frozen=True, slots=True)
class Line:
    """A figure that is drawn; category "" has all items of a suite together."""

    label: str
    suite: str
    category: str
    metric: str


@dataclass(frozen=True, slots=True)
class Curve:
    """What is asked under which sweeps, and what of it is shown."""

    name: str
    title: str
    suites: tuple[Suite, ...]
    items: int
    sweeps: tuple[Sweep, ...]
    lines: tuple[Line, ...]
    each_category_of: str | None = None


def share(point: Mapping[str, Any], prompt_tokens: float) -> float:
    """The kept share of an average prompt; budgets are in tokens, ratios are shares already."""
    kept = float(point["kept"])
    return kept if kept <= 1 else min(1.0, kept / prompt_tokens)


def figure_of(point: Mapping[str, Any], line: Line) -> Mapping[str, Any] | None:
    """A line's figure at a point, if it was measured."""
    wanted = (line.suite, line.category, line.metric)
    found = (
        figure
        for figure in point["figures"]
        if (figure["suite"], figure["category"], figure["metric"]) == wanted
    )
    return next(found, None)


def value(point: Mapping[str, Any], line: Line, who: str = "candidate") -> float | None:
    """What a line is at a point."""
    figure = figure_of(point, line)
    return None if figure is None else figure[who]


def table(curve: Curve, found: Mapping[str, Any]) -> str:
    """A curve's points as Markdown."""
    tokens = found["prompt_tokens"]
    points = found["points"]
    long = ", ".join(f"{length:.0f} in {suite}" for suite, length in tokens.items())
    labels = [f"{line.label} ({_items_of(points[0], line)})" for line in curve.lines]
    lines = [
        f"### {curve.title}",
        "",
        f"Tokens of an average prompt: {long}.",
        "",
        "| method | kept | of a prompt | " + " | ".join(labels) + " |",
        "|---" * (3 + len(curve.lines)) + "|",
        _row("full cache", "all", "100%", [_full(points, line) for line in curve.lines]),
        *(
            _row(
                point["method"],
                f"{point['kept']:g}",
                " / ".join(f"{100 * share(point, length):.0f}%" for length in tokens.values()),
                [_cell(point, line) for line in curve.lines],
            )
            for point in points
        ),
    ]
    if curve.each_category_of is not None:
        lines += ["", *_by_category(curve.each_category_of, points)]
    return "\n".join(lines)


def _row(method: str, kept: str, of_prompt: str, cells: Sequence[str]) -> str:
    return f"| {method} | {kept} | {of_prompt} | " + " | ".join(cells) + " |"


def _items_of(point: Mapping[str, Any], line: Line) -> int:
    figure = figure_of(point, line)
    return 0 if figure is None else figure["items"]


def _full(points: Sequence[Mapping[str, Any]], line: Line) -> str:
    """A line with the full cache."""
    found = value(points[0], line, "baseline")
    return "-" if found is None else f"{found:.3g}"


def _cell(point: Mapping[str, Any], line: Line) -> str:
    """A line at a point, and the interval of its change."""
    figure = figure_of(point, line)
    if figure is None:
        return "-"
    _, low, high = figure["change"]
    change = "" if low is None or high is None else f" ({low:+.2g} to {high:+.2g})"
    return f"{figure['candidate']:.3g}{change}"


def _by_category(suite: str, points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The headline figure of every category, the ones that go first at the top."""
    headline = next(figure["metric"] for figure in points[0]["figures"] if figure["suite"] == suite)
    names = sorted(
        {figure["category"] for figure in points[0]["figures"] if figure["suite"] == suite} - {""}
    )
    rows = []
    for name in names:
        line = Line(name, suite, name, headline)
        full = value(points[0], line, "baseline") or 0.0
        left = [value(point, line) for point in points]
        lost = next(
            (n for n, each in enumerate(left) if each is not None and each <= full / 2), len(left)
        )
        rows.append((lost if full else len(left) + 1, line))
    yield "Types of instructions, those that lose half first at the top (tokens kept):"
    yield ""
    yield "| type | full cache | " + " | ".join(f"{point['kept']:g}" for point in points) + " |"
    yield "|---" * (2 + len(points)) + "|"
    for _, line in sorted(rows, key=lambda row: (row[0], row[1].label)):
        cells = [_full(points, line), *(_cell(point, line) for point in points)]
        yield f"| {line.label} ({_items_of(points[0], line)}) | " + " | ".join(cells) + " |"


def draw(curves: Sequence[Curve], results: Mapping[str, Any], page: Path) -> None:
    """Draw all curves into one page that needs nothing else."""
    from plotly.graph_objects import Figure, Scatter

    parts: list[str] = []
    for curve in curves:
        if curve.name not in results:
            continue
        found = results[curve.name]
        tokens = found["prompt_tokens"]
        figure = Figure(layout={"title": curve.title, "xaxis_title": "kept share of a prompt"})
        for sweep in curve.sweeps:
            own = [point for point in found["points"] if point["method"] == sweep.method]
            for line in curve.lines if own else ():
                full = value(own[0], line, "baseline")
                figure.add_trace(
                    Scatter(
                        name=f"{sweep.method}: {line.label}",
                        x=[1.0, *(share(point, tokens[line.suite]) for point in own)],
                        y=[full, *(value(point, line) for point in own)],
                        mode="lines+markers",
                    )
                )
        parts.append(figure.to_html(full_html=False, include_plotlyjs=not parts))
    page.write_text(f'<!doctype html><meta charset="utf-8"><title>Curves</title>{"".join(parts)}\n')
