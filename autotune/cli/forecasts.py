"""How forecasts, and what came of them, are put into words, tables and a plot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from kvtune.autotune.cli.console import stdout
from kvtune.autotune.forecast.calibrate import GOODPUT
from kvtune.autotune.forecast.predict import CAPACITY, SEQUENCES, SIMULATED
from kvtune.autotune.forecast.score import ratios, scores
from kvtune.autotune.report.forecast_words import COLUMNS, OUTSIDE, measured_levers
from kvtune.autotune.words import digits, percent, percent_change
from kvtune.types import Forecast, Interval

PLOT_COLUMNS, PLOT_ROWS = 61, 17


def print_forecasts(told: Sequence[Forecast], asked: Collection[str] = ()) -> None:
    """Show what each lever would change, the one that most helps goodput first.

    Levers that the engine serves come first, with their reasons; others would need another engine,
    and of these only the ones that were `asked` for by name, or have no figure, have theirs. Where
    there was no load to forecast for, what fits is all there is to show.
    """
    by_lever: dict[str, dict[str, Forecast]] = {}
    for forecast in told:
        by_lever.setdefault(forecast.lever, {})[forecast.metric] = forecast
    is_counted = not any(one.metric in SIMULATED and one.ratio is not None for one in told)
    metric = CAPACITY if is_counted else GOODPUT
    levers = sorted(by_lever.items(), key=lambda item: -_gain(item[1][metric]))
    served = [item for item in levers if item[1][GOODPUT].served_by == "engine"]
    others = [item for item in levers if item[1][GOODPUT].served_by == "reference"]
    show = _print_counts if is_counted else _print_levers
    if served:
        what = "Forecasts of what fits" if is_counted else "Forecasts"
        stdout.print(f"\n{what}, each as a change from what was measured:")
        show(served)
        _print_reasons(served, metric)
    with_figures = [item for item in others if _has_figure(item[1])]
    if with_figures:
        stdout.print("\nIf an engine served them (their reasons are in --json):")
        show(with_figures)
    _print_reasons(
        [item for item in others if item[0] in asked or not _has_figure(item[1])], metric
    )
    if is_counted:
        for reason in dict.fromkeys(
            found[GOODPUT].reason for _, found in levers if found[CAPACITY].ratio is not None
        ):
            stdout.print(escape(reason), soft_wrap=True)


def _print_reasons(levers: Sequence[tuple[str, dict[str, Forecast]]], metric: str) -> None:
    """Each reason for the forecasts of a metric once, with the levers that it holds for."""
    names: dict[str, list[str]] = {}
    for name, found in levers:
        names.setdefault(found[metric].reason, []).append(name)
    for reason, held in names.items():
        stdout.print(f"- {escape(', '.join(held))}: {escape(reason)}", soft_wrap=True)


def _print_counts(levers: Sequence[tuple[str, dict[str, Forecast]]]) -> None:
    """What fits with each lever, and by how much more that is."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("lever", overflow="fold")
    for title in ("KV tokens", "sequences"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, found in levers:
        if found[CAPACITY].ratio is not None:
            table.add_row(escape(name), *(_count(found[one]) for one in (CAPACITY, SEQUENCES)))
    stdout.print(table)


def _has_figure(found: Mapping[str, Forecast]) -> bool:
    return any(forecast.ratio is not None for forecast in found.values())


def _count(told: Forecast) -> str:
    if told.predicted is None or told.ratio is None:
        return "-"
    return f"{told.predicted:,.0f} ({percent(told.ratio.estimate)})"


def _print_levers(levers: Sequence[tuple[str, dict[str, Forecast]]]) -> None:
    table = _lever_table()
    for name, found in levers:
        if _has_figure(found):
            cells = [_short(found[metric].ratio) for metric in COLUMNS if metric != GOODPUT]
            table.add_row(escape(name), *cells, percent_change(found[GOODPUT].ratio))
    stdout.print(table)


def _lever_table() -> Table:
    """An empty table with a row a lever: names wrap, figures do not."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("lever", overflow="fold")
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    return table


def print_calibration(told: Sequence[Forecast]) -> None:
    """Show the forecasts that were measured, how far off they were, and all of them in a plot."""
    pairs = [pair for forecast in told if (pair := ratios(forecast)) is not None]
    stdout.print(f"{len(told):,} forecasts, {len(pairs):,} of them measured later")
    if not pairs:
        stdout.print("A search measures them when it tries the same arguments on the same load.")
        return
    stdout.print(f"Each told -> measured; {OUTSIDE} is outside of the range that was told.")
    for study, levers in groupby(measured_levers(told), key=lambda one: one.study):
        stdout.print(f"\n[bold]{escape(study)}[/bold]")
        table = _lever_table()
        for lever in levers:
            table.add_row(escape(lever.lever), *(lever.cell(metric) for metric in COLUMNS))
        stdout.print(table)
    stdout.print()
    for score in scores(told):
        name = COLUMNS.get(score.metric, score.metric)
        stdout.print(
            f"{name}: off by {digits(score.error_points)} points "
            f"on average, direction right in {score.sign_hits} of {score.measured}, within the "
            f"range in {score.range_hits}",
            soft_wrap=True,
        )
    stdout.print("\n" + escape(scatter(pairs)), highlight=False)


def scatter(pairs: Sequence[tuple[float, float]]) -> str:
    """A plot of (predicted, measured) ratios in text; a perfect forecast lies on the dots."""
    values = [value for pair in pairs for value in pair] + [1.0]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.1
    low, high = low - margin, high + margin

    def place(value: float, cells: int) -> int:
        return round((value - low) / (high - low) * (cells - 1))

    rows = [[" "] * PLOT_COLUMNS for _ in range(PLOT_ROWS)]
    for column in range(PLOT_COLUMNS):
        value = low + column / (PLOT_COLUMNS - 1) * (high - low)
        rows[place(value, PLOT_ROWS)][column] = "."
    counts: dict[tuple[int, int], int] = {}
    for predicted, measured in pairs:
        at = place(measured, PLOT_ROWS), place(predicted, PLOT_COLUMNS)
        counts[at] = counts.get(at, 0) + 1
    for (row, column), count in counts.items():
        rows[row][column] = "o" if count == 1 else str(min(count, 9))
    lines = [f"{'measured':>9}"]
    for number, cells in reversed(list(enumerate(rows))):
        value = low + number / (PLOT_ROWS - 1) * (high - low)
        label = percent(value) if number % 4 == 0 else ""
        lines.append(f"{label:>8} |{''.join(cells)}".rstrip())
    ends = percent(low), percent(high)
    axis = f"{ends[0]}{'predicted':^{PLOT_COLUMNS - len(''.join(ends))}}{ends[1]}"
    return "\n".join([*lines, f"{'':>8} +{'-' * PLOT_COLUMNS}", f"{'':>10}{axis}"])


def _gain(forecast: Forecast) -> float:
    return forecast.ratio.estimate if forecast.ratio is not None else 0.0


def _short(ratio: Interval | None) -> str:
    return "-" if ratio is None else percent(ratio.estimate)
