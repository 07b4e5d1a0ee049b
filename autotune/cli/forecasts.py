"""How forecasts, and what came of them, are put into words, tables and a plot."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from kvtune.autotune.cli.console import stdout
from kvtune.autotune.forecast.calibrate import FIRST_TOKEN, GOODPUT, STEP
from kvtune.autotune.forecast.predict import CAPACITY
from kvtune.autotune.forecast.score import ratios, scores
from kvtune.autotune.words import digits
from kvtune.types import Forecast, Interval

PLOT_COLUMNS, PLOT_ROWS = 61, 17
COLUMNS = {CAPACITY: "KV tokens", STEP: "step", FIRST_TOKEN: "first token", GOODPUT: "goodput"}
NAMES = {**COLUMNS, STEP: "decode step"}


def print_forecasts(told: Sequence[Forecast]) -> None:
    """Show what each lever would change, the one that most helps goodput first.

    Levers that the engine serves come first, with their reasons; others would need another engine.
    """
    by_lever: dict[str, dict[str, Forecast]] = {}
    for forecast in told:
        by_lever.setdefault(forecast.lever, {})[forecast.metric] = forecast
    levers = sorted(by_lever.items(), key=lambda item: -_gain(item[1][GOODPUT]))
    served = [item for item in levers if item[1][GOODPUT].served_by == "engine"]
    others = [item for item in levers if item[1][GOODPUT].served_by == "reference"]
    if served:
        stdout.print("\nForecasts, each as a change from what was measured:")
        _print_levers(served)
        _print_reasons(served)
    if others:
        stdout.print("\nIf an engine served them (their reasons are in --json):")
        _print_levers(others)


def _print_reasons(levers: Sequence[tuple[str, dict[str, Forecast]]]) -> None:
    """Each reason once, with the levers that it holds for."""
    names: dict[str, list[str]] = {}
    for name, found in levers:
        names.setdefault(found[GOODPUT].reason, []).append(name)
    for reason, held in names.items():
        stdout.print(f"- {escape(', '.join(held))}: {escape(reason)}", soft_wrap=True)


def _print_levers(levers: Sequence[tuple[str, dict[str, Forecast]]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("lever", overflow="fold")
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    for name, found in levers:
        if any(forecast.ratio is not None for forecast in found.values()):
            cells = [_short(found[metric].ratio) for metric in COLUMNS if metric != GOODPUT]
            table.add_row(escape(name), *cells, _change(found[GOODPUT].ratio))
    stdout.print(table)


def print_calibration(told: Sequence[Forecast]) -> None:
    """Show the forecasts that were measured, how far off they were, and all of them in a plot."""
    measured = [(forecast, pair) for forecast in told if (pair := ratios(forecast)) is not None]
    stdout.print(f"{len(told):,} forecasts, {len(measured):,} of them measured later")
    if not measured:
        stdout.print("A search measures them when it tries the same arguments on the same load.")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("metric", "lever"):
        table.add_column(title, overflow="fold")
    for title in ("forecast", "measured", "study"):
        table.add_column(title, justify="right", overflow="fold")
    for forecast, (_, ratio) in measured:
        table.add_row(
            NAMES.get(forecast.metric, forecast.metric),
            escape(forecast.lever),
            _change(forecast.ratio),
            _per_cent(ratio),
            escape(forecast.study or ""),
        )
    stdout.print(table)
    stdout.print()
    for score in scores(told):
        stdout.print(
            f"{NAMES.get(score.metric, score.metric)}: off by {digits(score.error_points)} points "
            f"on average, direction right in {score.sign_hits} of {score.measured}, within the "
            f"range in {score.range_hits}",
            soft_wrap=True,
        )
    stdout.print("\n" + escape(scatter([pair for _, pair in measured])), highlight=False)


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
        label = _per_cent(value) if number % 4 == 0 else ""
        lines.append(f"{label:>8} |{''.join(cells)}".rstrip())
    ends = _per_cent(low), _per_cent(high)
    axis = f"{ends[0]:<{PLOT_COLUMNS - len(ends[1])}}{ends[1]}"
    return "\n".join([*lines, f"{'':>8} +{'-' * PLOT_COLUMNS}", f"{'':>10}{axis}  predicted"])


def _gain(forecast: Forecast) -> float:
    return forecast.ratio.estimate if forecast.ratio is not None else 0.0


def _short(ratio: Interval | None) -> str:
    return "-" if ratio is None else _per_cent(ratio.estimate)


def _change(ratio: Interval | None) -> str:
    if ratio is None:
        return "-"
    text = _per_cent(ratio.estimate)
    if ratio.low is None or ratio.high is None or ratio.low == ratio.high:
        return text
    return f"{text} ({_per_cent(ratio.low)} to {_per_cent(ratio.high)})"


def _per_cent(ratio: float) -> str:
    return f"{ratio - 1:+.0%}"
