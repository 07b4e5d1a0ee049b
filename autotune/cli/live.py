"""The live view of a search: a few lines at the foot of the terminal that always say where it is.

What is printed meanwhile scrolls by above them and stays readable, as does their last state. One
thread draws them once a second from what was noted: whoever measures only notes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Group
from rich.live import Live
from rich.text import Text

from kvtune.autotune.cli import console
from kvtune.autotune.cli.console import TerminalReporter
from kvtune.autotune.cli.standing_words import MET, best_text, left_text, plan_text, used_text
from kvtune.autotune.rounds import Confirming
from kvtune.autotune.search_view import Incumbent, Margin, RungState, SearchView
from kvtune.autotune.words import digits
from kvtune.profilers.load.progress import Progress
from kvtune.types import Goal

DRAWS_PER_S = 1
"""A draw takes milliseconds from a load client in the same process."""

WIDEST, LABEL, ROWS_ABOVE = 100, 8, 4
"""Columns that are used at most, columns of the names at the left, and rows left to what is printed
above."""

NEAR_LIMIT = 0.9
"""Share of a limit from which on it is nearly used up."""

STATE_STYLES = {"done": "green", "open": "cyan", "closed": "dim"}

Part = tuple[int, Text]
"""A line with its rank: the last ones are left out first where the terminal is low."""


def search_reporter(
    *, plain: bool, price_per_hour: float | None = None, goal: Goal | None = None
) -> TerminalReporter:
    """The live view where there is a terminal that can draw it; lines where not, or if `plain`."""
    stderr = console.stderr
    if plain or not stderr.is_terminal or stderr.is_dumb_terminal:
        return TerminalReporter(price_per_hour=price_per_hour, goal=goal)
    return LiveReporter(price_per_hour=price_per_hour, goal=goal)


class LiveReporter(TerminalReporter):
    """Draws where a search stands below the lines that it prints."""

    def __init__(self, *, price_per_hour: float | None = None, goal: Goal | None = None) -> None:
        super().__init__(price_per_hour=price_per_hour, goal=goal)
        self._now = self._doing = ""
        self._share: tuple[int, int] | None = None
        self._view: SearchView | None = None
        self._rounds: Confirming | None = None
        self._asking_s = 0.0
        self._seen_s = self._began_s

    @contextmanager
    def live(self) -> Iterator[LiveReporter]:
        """Draw for as long as the block runs; what was drawn last stays."""
        with (
            self._closing(),
            Live(
                self,
                console=console.stderr,
                refresh_per_second=DRAWS_PER_S,
                vertical_overflow="crop",
            ),
        ):
            yield self
            self._now = self._doing = ""
            self._share = None

    def phase(self, title: str) -> None:
        """Print the title of a step; its progress begins anew."""
        self._share, self._now = None, title
        super().phase(title)

    def load(self, progress: Progress) -> None:
        """Note how far a replay is."""
        self._share = (progress.done, progress.total)
        super().load(progress)

    def asked(self, done: int, total: int) -> None:
        """Note how many questions are answered."""
        self._share = (done, total)
        super().asked(done, total)

    def standing(self, view: SearchView) -> None:
        """Note where the search stands."""
        self._rounds, self._asking_s = None, view.plan.asking_s
        self._view, self._seen_s = view, time.monotonic()

    def confirming(self, state: Confirming) -> None:
        """Note where the confirmation stands, and what is left of it in the plan."""
        self._rounds, now_s = state, time.monotonic()
        if (view := self._view) is not None:
            plan = replace(
                view.plan,
                left_s=view.plan.left_s - (now_s - self._seen_s),
                confirming_s=state.left_s,
                asking_s=max(0.0, self._asking_s - state.asked_s),
            )
            self._view, self._seen_s = replace(view, plan=plan), now_s

    def __rich__(self) -> Group:
        """All lines that there is room for, as a terminal of this size shows them."""
        stderr = console.stderr
        width = min(stderr.width, WIDEST)
        parts = [(0, self._title_line(width))]
        if self._now:
            parts += [(1, _line("now", Text(self._now, "bold")))]
        if self._doing:
            parts += [(4, _line("", self._progress(width)))]
        if (view := self._view) is not None:
            parts += self._standing_lines(view, width)
        return Group(*_fitting(parts, stderr.height - ROWS_ABOVE))

    # --- the parts, in order ---

    def _update(self, text: str) -> None:
        self._doing = text

    @property
    def _glyphs(self) -> str:
        """The two characters that bars are made of."""
        return "#." if console.stderr.options.ascii_only else "█░"

    def _progress(self, width: int) -> Text:
        share = self._share  # Whoever measures may take it away meanwhile.
        if share is None:
            return Text(self._doing)
        done, total = share
        bar = _bar(done / total if total else 0.0, width // 6, "cyan", self._glyphs)
        return Text.assemble(bar, " ", self._doing)

    def _title_line(self, width: int) -> Text:
        name = "kvtune search" if self._view is None else f"kvtune search, max {self._objective}"
        rule = "-" if console.stderr.options.ascii_only else "─"
        shown, clock = f"{rule * 2} {name} ", f" {self._elapsed()} {rule * 2}"
        return _cut(Text(shown + rule * max(0, width - len(shown) - len(clock)) + clock, "bold"))

    @property
    def _objective(self) -> str:
        return "" if self._view is None else self._view.objective

    def _standing_lines(self, view: SearchView, width: int) -> list[Part]:
        parts: list[Part] = []
        if view.best is None:
            parts.append((2, _line("best", Text("nothing has a number yet"))))
        else:
            parts += [(2, _line("best", _incumbent(view, view.best)))]
            parts += [(6, _line("", Text(view.best.settings, "bold")))]
            if view.best.load:
                parts += [(6, _line("", Text(view.best.load)))]
            names = max((len(margin.limit) for margin in view.best.margins), default=0)
            parts += [
                (5, _line("", _margin(margin, names, width, self._glyphs)))
                for margin in view.best.margins
            ]
        if (state := self._rounds) is not None:
            parts.append((4, _line("rounds", _rounds(state))))
        for place, rung in enumerate(view.ladder):
            parts.append((7, _line("" if place else "ladder", _rung(rung))))
        parts.append((3, _line("left", self._left(view))))
        parts.append((8, _line("for", Text(plan_text(view.plan)))))
        if view.failures:
            parts.append((6, _line("failed", Text(_counted(view.failures), "red"))))
        if view.out:
            parts.append((6, _line("out", Text(_counted(view.out), "yellow"))))
        return parts

    def _left(self, view: SearchView) -> Text:
        """Trials, time and money, as of now."""
        price = self._price_per_hour
        said = left_text(view, time.monotonic() - self._seen_s, price)
        return Text(said if price is None else f"{said}, {self._spent():.2f} spent")


def _fitting(parts: Sequence[Part], rows: int) -> list[Text]:
    """The lines in their order, without the least important ones if there are more than rows."""
    ranks = sorted(rank for rank, _ in parts)[: max(1, rows)]
    found: list[Text] = []
    for rank, line in parts:
        if rank in ranks:
            ranks.remove(rank)
            found.append(line)
    return found


def _line(name: str, text: Text) -> Text:
    return _cut(Text.assemble((f" {name:<{LABEL}}", "dim"), text))


def _cut(line: Text) -> Text:
    """A line that ends at the edge: one that wraps could not be drawn over."""
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _bar(share: float, cells: int, style: str, glyphs: str) -> Text:
    filled = min(cells, max(0, round(share * cells)))
    return Text.assemble((glyphs[0] * filled, style), (glyphs[1] * (cells - filled), "dim"))


def _incumbent(view: SearchView, best: Incumbent) -> Text:
    name = f"trial {best.number}" if best.number else "stock defaults"
    met = (f", {MET[best.meets_goal]}", "green" if best.meets_goal else "yellow")
    return Text.assemble((name, "bold"), f", {best_text(view, best)}", met)


def _margin(margin: Margin, names: int, width: int, glyphs: str) -> Text:
    """A limit as a bar that is full where it is used up."""
    name = f"{margin.limit:<{names}}  "
    cells = max(8, width // 3 - 8)
    used = 0.0 if margin.value_s is None else margin.value_s / margin.limit_s
    style = "red" if used > 1 else "yellow" if used > NEAR_LIMIT else "green"
    return Text.assemble(name, _bar(used, cells, style, glyphs), f" {used_text(margin)}")


def _rung(rung: RungState) -> Text:
    tried = f"{rung.tried} tried" if rung.tried else ""
    about = ", ".join(filter(None, (tried, rung.why)))
    return Text.assemble(f"{rung.name:<17}", (f"{rung.state:<7}", STATE_STYLES[rung.state]), about)


def _rounds(state: Confirming) -> Text:
    """The round of the confirmation that is under way, and who has what so far."""
    said = f"{state.number} of at most {state.most}"
    names = {number: f"trial {number}" if number else "stock" for number in state.values}
    found = ", ".join(f"{names[number]} {digits(value)}" for number, value in state.values.items())
    return Text(f"{said}: {found}" if found else said)


def _counted(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in found.items())
