"""Results of replayed searches: kept, put into tables, and drawn as curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from pydantic import Field
from surface_bench import Surface

from kvtune.autotune.report.page import Column, Figure, Page, Row, Section, Table, write_page
from kvtune.profilers.goal import goal_text
from kvtune.profilers.statistics import sorted_percentile
from kvtune.types import Stored

AT = (15, 30)
"""After how many trials searches are compared."""

DRAWS = 1000
"""Of seeds, for intervals."""

ALL = "all surfaces"


class Replay(Stored):
    """One search: what its recommendation after each trial was worth, as a share of the best.

    `failed` are the trials, from 0, that gave no figures. `stops_at` is after how many trials it
    would have ended by its own rule. `points` were measured, some perhaps more than once. `ask_s`
    is what it thought a trial.
    """

    surface: str
    method: str
    seed: int
    worth: tuple[float, ...]
    failed: tuple[int, ...]
    walls_s: tuple[float, ...]
    stops_at: int | None
    points: int
    ask_s: float

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells a search from another one."""
        return self.surface, self.method, self.seed


class Results(Stored):
    """All searches so far. `surfaces` maps a name to its size and goal, `methods` to what it is."""

    surfaces: dict[str, str] = Field(default_factory=dict)
    methods: dict[str, str] = Field(default_factory=dict)
    replays: tuple[Replay, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Results:
        """What is in a file; nothing if there is none."""
        return cls.model_validate_json(path.read_text()) if path.exists() else cls()

    def write(self, path: Path) -> None:
        """Write all of it in the place of what was there."""
        part = path.with_suffix(".part")
        part.write_text(self.model_dump_json(exclude_defaults=True) + "\n")
        part.replace(path)

    def has(self, surface: str, method: str, seed: int, trials: int) -> bool:
        """Whether this search was run for so many trials."""
        return any(
            one.key == (surface, method, seed) and len(one.worth) >= trials for one in self.replays
        )

    def with_more(
        self, found: Iterable[Replay], surface: Surface, says: Mapping[str, str]
    ) -> Results:
        """These and others, on one surface; a search that was run before is replaced."""
        found = list(found)
        keys = {one.key for one in found}
        told = f"{len(surface.points):,} points, {goal_text(surface.goal)}"
        return self.model_copy(
            update={
                "surfaces": {**self.surfaces, surface.name: told},
                "methods": dict(says),
                "replays": (*(one for one in self.replays if one.key not in keys), *found),
            }
        )

    def of(self, surface: str, method: str) -> list[Replay]:
        """The searches of a method on a surface, or on all of them."""
        return [
            one for one in self.replays if one.method == method and surface in (one.surface, ALL)
        ]

    def methods_on(self, surface: str) -> list[str]:
        """The methods that were run there, or on each of all surfaces, in their order."""
        on = tuple(self.surfaces) if surface == ALL else (surface,)
        return [name for name in self.methods if all(self.of(one, name) for one in on)]


def markdown(results: Results) -> str:
    """All tables as a document."""
    lines = [
        "# How close searches come to the best configuration",
        "",
        "Made by [`benchmarks/regret.py`](../benchmarks/README.md) from replayed searches. Shares "
        "are of the best point of a surface, by its truth; a recommendation that misses a limit "
        "counts as 0. Medians are over seeds, with 95% intervals from drawing seeds anew; the "
        "tenth percentile is the worst tenth of seeds.",
        "",
        *(f"- `{name}`: {says}" for name, says in results.methods.items() if results.of(ALL, name)),
    ]
    for surface in (*results.surfaces, ALL):
        lines += ["", f"## {surface}", "", results.surfaces.get(surface, "Taken together."), ""]
        lines += [_line(HEADS), "|" + "---|" * len(HEADS), *map(_line, _rows(results, surface))]
    return "\n".join(lines) + "\n"


HEADS = (
    "search",
    *(f"{what}, {at} trials" for at in AT for what in ("median", "tenth percentile")),
    "beats random",
    "failed launches",
    "server time",
    "seconds an ask",
    "seeds",
)


def html(results: Results, path: Path) -> None:
    """The tables with the curves, as one page."""
    sections = [
        Section(
            surface,
            (
                results.surfaces.get(surface, "Taken together."),
                _curves(results, surface),
                _table(results, surface),
            ),
        )
        for surface in (ALL, *results.surfaces)
    ]
    title = "How close searches come to the best configuration"
    write_page(Page(title, "replayed searches", tuple(sections)), path)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rows(results: Results, surface: str) -> list[list[str]]:
    rows = []
    random = {(one.surface, one.seed): one for one in results.of(surface, "random")}
    for name in results.methods_on(surface):
        found = results.of(surface, name)
        cells = [name]
        for at in AT:
            values = [one.worth[min(at, len(one.worth)) - 1] for one in found]
            low, high = interval(values)
            cells.append(f"{median(values):.1%} ({low:.1%} to {high:.1%})")
            cells.append(f"{percentile(values, 10):.1%}")
        rows.append([*cells, *_costs(found, random)])
    return rows


def _costs(found: Sequence[Replay], random: Mapping[tuple[str, int], Replay]) -> list[str]:
    """What searches cost, and how often they were ahead of random ones with the same seed."""
    pairs = [
        (one.worth[AT[0] - 1], random[one.surface, one.seed].worth[AT[0] - 1])
        for one in found
        if (one.surface, one.seed) in random and len(one.worth) >= AT[0]
    ]
    ahead = fmean((mine > other) + 0.5 * (mine == other) for mine, other in pairs) if pairs else 0
    launches = sum(len(one.walls_s) for one in found)
    failed = sum(len(one.failed) for one in found)
    used = [sum(one.walls_s[: one.stops_at]) / sum(one.walls_s) for one in found]
    return [
        f"{ahead:.0%}",
        f"{failed / launches:.1%}",
        f"{median(used):.0%}",
        f"{fmean(one.ask_s for one in found):.2f}",
        str(len({one.seed for one in found})),
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile of values in any order."""
    return sorted_percentile(sorted(values), percent)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of a median, from drawing values anew."""
    random = Random(0)
    drawn = sorted(median(random.choices(values, k=len(values))) for _ in range(DRAWS))
    return sorted_percentile(drawn, 2.5), sorted_percentile(drawn, 97.5)


def _table(results: Results, surface: str) -> Table:
    return Table(
        "What searches found and cost. Server time is what is used until a search would end by "
        "its own rule, as a share of all trials.",
        tuple(Column(head, is_number=head != "search") for head in HEADS),
        tuple(Row(tuple(row)) for row in _rows(results, surface)),
    )


def _curves(results: Results, surface: str) -> Figure:
    traces: list[dict[str, Any]] = []
    for name in results.methods_on(surface):
        found = results.of(surface, name)
        trials = list(range(1, 1 + max(len(one.worth) for one in found)))
        at = [[one.worth[min(n, len(one.worth)) - 1] for one in found] for n in trials]
        traces += [
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{name}{said}",
                "x": trials,
                "y": [percentile(values, percent) for values in at],
                "line": {"dash": dash, "width": 3 if name == "product" else 1.5},
                "legendgroup": name,
                "visible": True if percent == 50 else "legendonly",
            }
            for percent, said, dash in ((50, "", "solid"), (10, ", tenth percentile", "dot"))
        ]
    return Figure(
        f"Share of the best after each trial, {surface}: medians over seeds",
        "Curves of the share of the best point that each search recommends, by number of trials.",
        {
            "data": traces,
            "layout": {
                "xaxis": {"title": {"text": "trials"}},
                "yaxis": {"title": {"text": "share of the best"}, "tickformat": ".0%"},
            },
        },
    )
