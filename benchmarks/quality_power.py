"""How small a damage `kvtune quality` notices, and how often it passes what is right.

By simulation from recorded answers; `quality_alarms.py` records them and calls this.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from quality_asking import save, say
from quality_damage import (
    RATES,
    Pool,
    caught_share,
    check_short_cut,
    figures_of,
    passing_share,
    pool_of,
)

from kvtune.profilers.quality.compare import Asked
from kvtune.profilers.quality.suite import Size, Suite, SuitePlan

SIZES = (Size.SCREEN, Size.STANDARD, Size.FULL)
PASSING_SIZES = (Size.STANDARD, Size.FULL)
ALL = "all suites"
ENOUGH_POWER = 0.8
SMOKE_SIMULATIONS = 4
MOST_OPEN = 3
"""So many of the figures that most often keep what is right from passing are named."""


def run_power(
    options: argparse.Namespace,
    results: dict[str, Any],
    asked: Sequence[Asked],
    plan: SuitePlan,
    suites: Sequence[Suite],
) -> None:
    """Add to the results how often each damage is noticed, and how often none passes."""
    pools = {suite.name: pool_of(suite, *asked) for suite in suites}
    simulations = SMOKE_SIMULATIONS if options.smoke else options.simulations
    found: dict[str, Any] = results.setdefault("power", {})
    for size in SIZES:
        counts = {suite.name: _counts(suite, plan, size, pools[suite.name]) for suite in suites}
        together = sum(figures_of(pools[name], counts[name]) for name in counts) + 1
        for name, own in counts.items():
            for scope in ("everywhere", "one category"):
                key = f"{name}/{size}/{scope}"
                if key in found or not own:
                    continue
                pool = pools[name]
                damaged = set(own) if scope == "everywhere" else {pool.strongest}
                padding = together - figures_of(pool, own)
                if options.smoke:
                    check_short_cut(pool, own, damaged, padding=padding)
                rates = _rates(
                    partial(
                        caught_share, pool, own, damaged, padding=padding, simulations=simulations
                    )
                )
                found[key] = {
                    "suite": name,
                    "size": size.value,
                    "scope": scope,
                    "category": None if scope == "everywhere" else pool.strongest,
                    "items": sum(own[category] for category in damaged),
                    "figures_together": together,
                    "rates": rates,
                    "caught_at": _caught_at(rates),
                }
                save(options.output, results)
                say(f"{key}: {found[key]['caught_at']}")
        if size in PASSING_SIZES:
            for key, passing in _passes(results, pools, counts, size, simulations):
                results["passes"][key] = passing
                save(options.output, results)
                say(f"{key}: {passing['share']} of right candidates pass")


def _passes(
    results: dict[str, Any],
    pools: Mapping[str, Pool],
    counts: Mapping[str, Mapping[str, int]],
    size: Size,
    simulations: int,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """How often what was not damaged passes, suite by suite and all together."""
    known = results.setdefault("passes", {})
    for name in (*counts, ALL):
        key = f"{name}/{size}"
        drawn = [(pools[each], counts[each]) for each in counts if name in (each, ALL)]
        if key not in known and any(own for _, own in drawn):
            open_figures: Counter[str] = Counter()
            share = passing_share(drawn, open_figures, simulations=simulations)
            told = open_figures.most_common(MOST_OPEN)
            yield (
                key,
                {
                    "share": share,
                    "items": sum(sum(own.values()) for _, own in drawn),
                    "open": {figure: times / simulations for figure, times in told},
                },
            )


def _counts(suite: Suite, plan: SuitePlan, size: Size, pool: Pool) -> dict[str, int]:
    """Items of each category at a size, of those categories that were recorded."""
    wanted = SuitePlan(size=size, per_category=plan.per_category, max_tokens=plan.max_tokens)
    found = Counter(item.category for item in suite.items(wanted))
    return {category: found[category] for category in pool.units if found[category]}


def _rates(caught: Callable[[float], float]) -> dict[str, float]:
    """How often no damage is noticed, and the rates around the smallest one that is: a bisection,
    as more damage is noticed more often."""
    found = {0.0: caught(0.0)}
    low, high = 0, len(RATES)
    while low < high:
        middle = (low + high) // 2
        found[RATES[middle]] = caught(RATES[middle])
        low, high = (low, middle) if found[RATES[middle]] >= ENOUGH_POWER else (middle + 1, high)
    return {str(rate): found[rate] for rate in sorted(found)}


def _caught_at(rates: Mapping[str, float]) -> float | None:
    """The smallest rate that is noticed often enough."""
    return next((float(rate) for rate, share in rates.items() if share >= ENOUGH_POWER), None)


def power_text(
    found: Mapping[str, Mapping[str, Any]], passes: Mapping[str, Mapping[str, Any]]
) -> str:
    """The smallest damage that is noticed, and how often none passes, as Markdown."""
    names = list(dict.fromkeys(row["suite"] for row in found.values()))
    lines = [
        f"The smallest rate of damaged answers (for fidelity: of damaged tokens) at which at least "
        f"{100 * ENOUGH_POWER:.0f}% of reports fail, by simulation from recorded answers of real "
        f"vLLM; the rates tried are {', '.join(f'{100 * rate:g}%' for rate in RATES)}. "
        "*One category*: only the one in which the baseline is strongest is damaged. Behind each "
        'rate, how many items may be struck. "never": not even when all are.',
        "",
        "| suite | damaged |" + "".join(f" {size} |" for size in SIZES),
        "|---|---|" + "---|" * len(SIZES),
    ]
    for name in names:
        for scope in ("everywhere", "one category"):
            rows = [found.get(f"{name}/{size}/{scope}") for size in SIZES]
            category = next((row["category"] for row in rows if row and row["category"]), "")
            damaged = f"{scope} ({category})" if category else scope
            lines.append(f"| {name} | {damaged} |" + "".join(f" {_rate(row)} |" for row in rows))
    none = [row["rates"]["0.0"] for row in found.values() if row["scope"] == "everywhere"]
    lines += ["", f"Without damage, {100 * sum(none) / len(none):.1f}% of these reports fail."]
    return "\n".join([*lines, *_passing_lines(passes)])


def _passing_lines(passes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if not passes:
        return
    yield ""
    yield (
        "How often a right candidate passes: the share of reports without damage whose every "
        "deciding figure passes, by the suites' own limits and the sizes' own numbers of items, "
        "and the figures that stay unclear most often. A search and `--quality` limits ask more "
        "items where a size has too few."
    )
    yield ""
    yield "| suite |" + "".join(f" {size} |" for size in PASSING_SIZES) + " most often unclear |"
    yield "|---|" + "---|" * (len(PASSING_SIZES) + 1)
    for name in dict.fromkeys(key.rpartition("/")[0] for key in passes):
        rows = [passes.get(f"{name}/{size}") for size in PASSING_SIZES]
        cells = [
            "-" if row is None else f"{100 * row['share']:.0f}% of {row['items']} items"
            for row in rows
        ]
        last = next((row for row in reversed(rows) if row is not None and row["open"]), None)
        told = (
            ""
            if last is None
            else ", ".join(
                f"{figure} ({100 * share:.0f}%)" for figure, share in last["open"].items()
            )
        )
        yield f"| {name} | " + " | ".join(cells) + f" | {told} |"


def _rate(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    caught = row["caught_at"]
    words = "never" if caught is None else f"{100 * caught:g}%"
    return f"{words} of {row['items']}"
