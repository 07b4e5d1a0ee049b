"""How often `kvtune quality` cries wolf, and how small a damage it notices.

    python benchmarks/quality_alarms.py --model .model/SmolLM2-135M-Instruct \
        --output quality_alarms.json --markdown docs/quality.md
    python benchmarks/quality_alarms.py --output quality_alarms.json --parts power

Three parts, each resumable:

alarms   --runs screens of vLLM against itself. Every run has items of its own and two servers, with
         other max-num-seqs and max-num-batched-tokens; the candidate is asked with another
         concurrency, and every second time with another sampling seed. A server is the candidate of
         one run and the baseline of the next. None should fail; at most 5% may.
record   answers of a standard run from real servers: baseline, baseline again, and a third time
         after a restart. A part asks no server if they are kept already.
power    damage planted into those answers (`quality_damage.py`), in every category of a suite or in
         one, at growing rates, for each size: how often does the report fail? Nobody is asked.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quality_asking import (
    CONTEXT_TOKENS,
    Progress,
    as_row,
    asking,
    load,
    put_section,
    save,
    say,
    served,
)
from quality_damage import RATES, Pool, caught_share, figures_of, pool_of

from kvtune.autotune.cli.quality_subjects import chosen_suites
from kvtune.autotune.quality.answers import AGAIN_CONCURRENCY, CONCURRENCY, Pass
from kvtune.autotune.quality.subjects import Opened
from kvtune.engines.base import Engine
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.profilers.load import runtime
from kvtune.profilers.quality.compare import Asked, ask_suites, compare
from kvtune.profilers.quality.suite import Size, Suite, SuitePlan
from kvtune.profilers.statistics import binomial_tail

MOST_SEQS = (16, 4, 32, 8)
MOST_BATCHED_TOKENS = (2048, 512, 4096)
"""Taken in turns by one server after the other; twelve pairs, and no two neighbours alike."""

CANDIDATE_CONCURRENCY = (16, 3, 24)
OTHER_SEED = 1000

SIZES = (Size.SCREEN, Size.STANDARD, Size.FULL)
ENOUGH_POWER = 0.8
ALLOWED_ALARMS = 0.05


def run_alarms(
    options: argparse.Namespace, results: dict[str, Any], engine: Engine, suites: Sequence[Suite]
) -> None:
    """Add runs to the results until there are enough."""
    runs: list[dict[str, Any]] = results.setdefault("alarms", [])
    waiting: tuple[Asked, Asked] | None = None
    first = len(runs)
    for number in range(first, options.runs + 1 if first < options.runs else first):
        with tempfile.TemporaryDirectory() as folder:
            arguments = {
                "max-num-seqs": MOST_SEQS[number % len(MOST_SEQS)],
                "max-num-batched-tokens": MOST_BATCHED_TOKENS[number % len(MOST_BATCHED_TOKENS)],
            }
            subject = served(engine, options.model, Path(folder), arguments)
            with subject.open(Progress(), lambda done, total: None) as opened:
                if waiting is not None:
                    runs.append(_run(options, number - 1, opened, subject.by, waiting, suites))
                    save(options.output, results)
                if number < options.runs:
                    plan = _plan(options, number)
                    waiting = (
                        _asked(opened, suites, plan, plan.seed, CONCURRENCY, subject.by),
                        _asked(opened, suites, plan, plan.seed + 1, AGAIN_CONCURRENCY, subject.by),
                    )


def _run(
    options: argparse.Namespace,
    number: int,
    opened: Opened,
    by: str,
    baseline: tuple[Asked, Asked],
    suites: Sequence[Suite],
) -> dict[str, Any]:
    """Ask the candidate of a run, and say what its report says."""
    plan = _plan(options, number)
    seed = plan.seed + (OTHER_SEED if number % 2 else 0)
    concurrency = CANDIDATE_CONCURRENCY[number % len(CANDIDATE_CONCURRENCY)]
    ours = _asked(opened, suites, plan, seed, concurrency, by)
    known = {suite.name: suite for suite in suites}
    report = compare(ours, *baseline, suites=known)
    failed = [as_row(figure, known) for figure in report.figures if figure.outcome == "fail"]
    say(f"run {number + 1} of {options.runs}: {report.outcome}, {len(failed)} figures failed")
    return {
        "number": number,
        "outcome": report.outcome,
        "baseline": report.baseline,
        "candidate": report.candidate,
        "concurrency": concurrency,
        "sampling_seed": seed,
        "asked_s": [asked.wall_s for asked in (*baseline, ours)],
        "figures": len(report.figures),
        "outcomes": Counter(figure.outcome for figure in report.figures),
        "failed": failed,
        "samples": [sample.model_dump(mode="json") for sample in report.samples] if failed else [],
    }


def _plan(options: argparse.Namespace, number: int) -> SuitePlan:
    return SuitePlan(
        size=Size.SCREEN,
        seed=number,
        per_category=1 if options.smoke else None,
        max_tokens=CONTEXT_TOKENS,
    )


def _asked(
    opened: Opened, suites: Sequence[Suite], plan: SuitePlan, seed: int, concurrency: int, by: str
) -> Asked:
    found = runtime.run(
        ask_suites(suites, plan, opened.asker, seed=seed, concurrency=concurrency, by=by)
    )
    opened.check()
    return found


def recorded(
    options: argparse.Namespace, engine: Engine, suites: Sequence[Suite]
) -> tuple[list[Asked], SuitePlan]:
    """The baseline's answers, its second ones, and those after a restart with other batches."""
    plan = SuitePlan(
        size=Size.STANDARD,
        per_category=2 if options.smoke else None,
        max_tokens=CONTEXT_TOKENS,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        asking(suites, plan, options.output, Progress()) as run,
    ):
        stock = served(engine, options.model, Path(folder), {})
        other = served(engine, options.model, Path(folder), {"max-num-seqs": 8})
        both = run.ask(
            stock,
            [Pass("the baseline", 0, CONCURRENCY), Pass("again", 1, AGAIN_CONCURRENCY)],
        )
        return [*both, *run.ask(other, [Pass("restarted", 0, CONCURRENCY)])], plan


def run_power(
    options: argparse.Namespace,
    results: dict[str, Any],
    asked: Sequence[Asked],
    plan: SuitePlan,
    suites: Sequence[Suite],
) -> None:
    """Add to the results how often each damage is noticed."""
    pools = {suite.name: pool_of(suite, *asked) for suite in suites}
    found: dict[str, Any] = results.setdefault("power", {})
    simulations = 4 if options.smoke else options.simulations
    for size in SIZES:
        counts = {suite.name: _counts(suite, plan, size, pools[suite.name]) for suite in suites}
        together = sum(figures_of(pools[name], counts[name]) for name in counts) + 1
        for suite in suites:
            own = counts[suite.name]
            for scope in ("everywhere", "one category"):
                key = f"{suite.name}/{size}/{scope}"
                if key in found or not own:
                    continue
                damaged = set(own) if scope == "everywhere" else {pools[suite.name].strongest}
                rates = _rates(
                    partial(
                        caught_share,
                        pools[suite.name],
                        own,
                        damaged,
                        padding=together - figures_of(pools[suite.name], own),
                        simulations=simulations,
                    )
                )
                found[key] = {
                    "suite": suite.name,
                    "size": size.value,
                    "scope": scope,
                    "category": None if scope == "everywhere" else pools[suite.name].strongest,
                    "items": sum(own[category] for category in damaged),
                    "figures_together": together,
                    "rates": rates,
                    "caught_at": _caught_at(rates),
                }
                save(options.output, results)
                say(f"{key}: {found[key]['caught_at']}")


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


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact two-sided interval of a share (Clopper and Pearson, 1934)."""
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else _where(lambda p: binomial_tail(hits, trials, p), tail)
    high = 1.0 if hits == trials else _where(lambda p: binomial_tail(hits + 1, trials, p), 1 - tail)
    return low, high


def _where(rising: Callable[[float], float], value: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > value else (middle, high)
    return (low + high) / 2


def alarm_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """The runs of a configuration against itself, as Markdown."""
    failed = [run for run in runs if run["outcome"] == "fail"]
    low, high = clopper_pearson(len(failed), len(runs))
    outcomes = Counter(run["outcome"] for run in runs)
    seconds = sorted(run["asked_s"][-1] for run in runs)
    lines = [
        f"{len(runs)} screens of vLLM against itself, each with items of its own and two servers "
        "(a restart, another max-num-seqs and max-num-batched-tokens, another concurrency, every "
        "second time another sampling seed):",
        "",
        f"- {len(failed)} failed: {100 * len(failed) / len(runs):.1f}% ({100 * low:.1f}% to "
        f"{100 * high:.1f}% at 95%, Clopper-Pearson), {100 * ALLOWED_ALARMS:.0f}% allowed",
        f"- {outcomes['pass']} passed, {outcomes['unclear']} were unclear: screens cannot "
        "support the limits with so few items",
        f"- asking a screen took {seconds[0]:.0f} to {seconds[-1]:.0f} s, "
        f"median {seconds[len(seconds) // 2]:.0f} s",
    ]
    figures = [(run["number"], figure) for run in runs for figure in run["failed"]]
    lines.append(
        f"- of {sum(run['figures'] for run in runs)} figures {len(figures)} failed"
        + (":" if figures else "")
    )
    for number, figure in figures:
        decides = "" if figure["counts"] else " (does not decide a report)"
        category = figure["category"] or "all"
        lines.append(
            f"  - run {number}: {figure['suite']}/{category} {figure['metric']}{decides}: "
            f"{figure['because']}"
        )
    return "\n".join(lines)


def power_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The smallest damage that is noticed, as Markdown."""
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
    return "\n".join(lines)


def _rate(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    caught = row["caught_at"]
    words = "never" if caught is None else f"{100 * caught:g}%"
    return f"{words} of {row['items']}"


def _parts(options: argparse.Namespace, results: dict[str, Any]) -> None:
    suites = chosen_suites(["needle", "fidelity"] if options.smoke else [], has_data=False)
    with VllmEngine() as engine:
        if "alarms" in options.parts:
            run_alarms(options, results, engine, suites)
        if {"record", "power"} & set(options.parts):
            asked, plan = recorded(options, engine, suites)
            results["recorded_s"] = [each.wall_s for each in asked]
            save(options.output, results)
            if "power" in options.parts:
                run_power(options, results, asked, plan, suites)


def _sections(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if results.get("alarms"):
        yield "False alarms", alarm_text(results["alarms"])
    if results.get("power"):
        seconds = ", ".join(f"{each:.0f}" for each in results["recorded_s"])
        yield "Power", f"{power_text(results['power'])} A standard run took {seconds} s to ask."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=".model/SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=Path("quality_alarms.json"))
    parser.add_argument("--markdown", type=Path, help="write what was found into this page")
    parser.add_argument(
        "--parts", nargs="*", default=["alarms", "record", "power"], help="none: only show"
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--simulations", type=int, default=100)
    parser.add_argument("--smoke", action="store_true", help="a run or two of few items")
    options = parser.parse_args()
    if options.smoke:
        options.runs = 1
    results = load(options.output)
    _parts(options, results)
    for title, text in _sections(results):
        if options.markdown is not None:
            put_section(options.markdown, title, text)
        print(f"## {title}\n\n{text}\n")


if __name__ == "__main__":
    main()
