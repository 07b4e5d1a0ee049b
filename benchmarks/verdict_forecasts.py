"""Forecasts beside what was measured, as sections of the page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from verdict_results import (
    CAPACITY,
    FIRST_TOKEN,
    FORECAST_NO_CHANGE,
    MEASURED_NO_CHANGE,
    STEP,
    Pair,
    Results,
    pairs,
    server_noise,
    untold,
)
from verdict_table import table

from kvtune.autotune.forecast.score import NO_CHANGE, is_sign_right


def forecasts(results: Results) -> str:
    """How near they came, in sum and row by row."""
    found = pairs(results)
    if not found:
        return "## Forecasts\n\nNothing was forecast and measured."
    errors = [pair.error_points or 0.0 for pair in found]
    strict = [
        is_sign_right(pair.told.ratio.estimate, pair.measured)
        for pair in found
        if pair.told.ratio is not None
    ]
    capacity = _capacity_errors(results)
    worst = max(capacity, default=0.0)
    rows = [
        [
            f"`{pair.regime}`",
            pair.lever,
            _told(pair),
            f"{pair.measured - 1:+.0%}",
            f"{pair.noise:.0%}",
            f"{pair.error_points:.0f}",
            "yes" if pair.is_sign_right else "**no**",
            "yes" if pair.is_in_range else "no",
        ]
        for pair in found
    ]
    return f"""## Forecasts against measurements

{len(found)} pairs of goodput: sign right {_share([pair.is_sign_right for pair in found])}, mean
absolute error {fmean(errors):.1f} points, within the forecast range
{_share([pair.is_in_range for pair in found])}.
{_changes(found)}{_fp8_note(results, found)}
{_times(results)}
KV tokens: {len(capacity)} pairs, largest error {worst:.2%} of what the engine reports.

The noise is the standard error of a ratio, of which servers that are started alike give the most:
their goodput differs by {server_noise(results):.1%} (standard deviation, from a second server of
each baseline). A forecast below {FORECAST_NO_CHANGE:.0%}, or below the noise, is one of no change,
which is right if less than {MEASURED_NO_CHANGE:.0%}, or than twice the noise, was measured.
Without any allowance for noise, as `kvtune history forecasts` counts (less than {NO_CHANGE:.0%}
on both sides is no change), the sign is right
{_share(strict)}.

{
        table(
            [
                "regime",
                "lever",
                "forecast",
                "measured",
                "noise",
                "error, points",
                "sign",
                "in range",
            ],
            rows,
        )
    }"""


def _changes(found: Sequence[Pair]) -> str:
    """The same of those that said more than that nothing happens."""
    changes = [pair for pair in found if pair.is_change]
    if not changes:
        return "None forecast a change."
    error = fmean(pair.error_points or 0.0 for pair in changes)
    return (
        f"{len(changes)} of them forecast a change of {FORECAST_NO_CHANGE:.0%} or more: sign right "
        f"{_share([pair.is_sign_right for pair in changes])},\nmean absolute error {error:.1f} "
        f"points, within the range {_share([pair.is_in_range for pair in changes])}."
    )


def _fp8_note(results: Results, found: Sequence[Pair]) -> str:
    """What fp8 costs on a CPU was learnt from these regimes."""
    others = [pair for pair in found if pair.lever != "fp8"]
    if results.device.kind != "cpu" or not others or len(others) == len(found):
        return ""
    return f"""
The rows of fp8 are no independent test: how long a CPU takes to read it (0.8 to 1.25 of the time of
bfloat16, 1.0 expected) was set after an earlier run, from the decode steps of `bandwidth` and
`bandwidth-shared` in it. Without fp8 the sign is right
{_share([pair.is_sign_right for pair in others])}."""


def _times(results: Results) -> str:
    """The forecasts of times."""
    names = {
        STEP: "decode step (median gap between tokens)",
        FIRST_TOKEN: "median time to the first token",
    }
    lines = []
    for metric, name in names.items():
        if found := pairs(results, metric):
            error = fmean(pair.error_points or 0.0 for pair in found)
            lines.append(
                f"Of the {name}: {len(found)} pairs, mean absolute error {error:.1f} points,\n"
                f"within the range {_share([pair.is_in_range for pair in found])}."
            )
    return "\n".join(lines)


def misses(results: Results) -> str:
    """Forecasts that were wrong, and levers that were measured without one."""
    missed = [pair for pair in pairs(results) if not pair.is_sign_right or not pair.is_in_range]
    lines = [
        f"- `{pair.regime}`, {pair.lever}: forecast {_told(pair)}, measured "
        f"{pair.measured - 1:+.0%}. {pair.told.reason}"
        for pair in missed
    ]
    silent = [f"- `{regime.name}`, {arm.name}: {reason}" for regime, arm, reason in untold(results)]
    text = "### Misses\n\nOut of the range, or of the wrong sign:\n\n" + "\n".join(
        lines or ["- none"]
    )
    return text + "\n\nMeasured, but not forecast:\n\n" + "\n".join(silent or ["- none"])


def _capacity_errors(results: Results) -> list[float]:
    return [
        abs(told.predicted / arm.kv_tokens - 1)
        for regime in results.regimes
        for arm in regime.arms
        if (told := arm.told.get(CAPACITY)) is not None and told.predicted and arm.kv_tokens
    ]


def _told(pair: Pair) -> str:
    told = pair.told.ratio
    if told is None or told.low is None or told.high is None:
        return ""
    return f"{told.estimate - 1:+.0%} ({told.low - 1:+.0%} to {told.high - 1:+.0%})"


def _share(hits: Sequence[bool]) -> str:
    return f"{sum(hits)} of {len(hits)} ({sum(hits) / len(hits):.0%})"
