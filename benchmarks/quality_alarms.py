"""How often `kvtune quality` cries wolf, and how small a damage it notices.

    python benchmarks/quality_alarms.py --model .model/SmolLM2-135M-Instruct \
        --output quality_alarms.json --markdown docs/quality.md
    python benchmarks/quality_alarms.py --output quality_alarms.json --parts power

Three parts, each resumable:

alarms   --runs screens of vLLM against itself. Every run has items of its own and two servers, with
         other max-num-seqs and max-num-batched-tokens; the candidate is asked with another
         concurrency, and what is sampled is drawn anew. A server is the candidate of one run and
         the baseline of the next. None should fail; at most 5% may. A failure has to exceed the
         baseline's second time too, so that is asked only where a run fails without it, of a server
         that is started again as the baseline's was. A run whose server died says so.
record   answers of a standard run from real servers: baseline, baseline again, and a third time
         after a restart. A part asks no server if they are kept already.
power    damage planted into those answers (`quality_damage.py`), in every category of a suite or in
         one, at growing rates, for each size: how often does the report fail? And how often does it
         pass without any? Nobody is asked.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality_asking import (
    CONTEXT_TOKENS,
    Progress,
    as_row,
    asking,
    counts,
    deciding,
    load,
    put_section,
    save,
    say,
    served,
)
from quality_power import power_text, run_power

from kvtune.autotune.cli.quality_subjects import chosen_suites
from kvtune.autotune.quality.answers import AGAIN_CONCURRENCY, CONCURRENCY, Pass, Questions
from kvtune.engines.base import Engine
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.errors import EngineError
from kvtune.profilers.load import runtime
from kvtune.profilers.quality.compare import Asked, ask_suites, compare
from kvtune.profilers.quality.suite import Size, Suite, SuitePlan
from kvtune.profilers.statistics import binomial_tail

MOST_SEQS = (16, 4, 32, 8)
MOST_BATCHED_TOKENS = (2048, 512, 4096)
"""Taken in turns by one server after the other; twelve pairs, and no two neighbours alike."""

CANDIDATE_CONCURRENCY = (16, 3, 24)
OTHER_SEED = 1000
DIED = "died"
ALLOWED_ALARMS = 0.05


@dataclass(frozen=True, slots=True)
class Time:
    """One time that a server is asked the items of a run."""

    run: int
    seed: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Alarms:
    """Runs of vLLM against itself."""

    options: argparse.Namespace
    engine: Engine
    suites: Sequence[Suite]

    def add(self, results: dict[str, Any]) -> None:
        """Add runs to the results until there are enough."""
        runs: list[dict[str, Any]] = results.setdefault("alarms", [])
        theirs: Asked | EngineError | None = None
        while (number := len(runs)) < self.options.runs:
            first = Time(number, number, CONCURRENCY)
            if theirs is None:
                [theirs] = self._answers(number, [first])
            if isinstance(theirs, EngineError):
                runs.append(self._died(number, theirs))
                theirs = None
            else:
                following = Time(number + 1, number + 1, CONCURRENCY)
                times = [self._candidate(number), following]
                ours, *rest = self._answers(number + 1, times[: self.options.runs - number])
                runs.append(self._judged(number, theirs, ours))
                # A server that died as a candidate is started again to be a baseline.
                theirs = None if isinstance(ours, EngineError) or not rest else rest[0]
            save(self.options.output, results)

    def _candidate(self, number: int) -> Time:
        seed = number + (OTHER_SEED if number % 2 else 0)
        return Time(number, seed, CANDIDATE_CONCURRENCY[number % len(CANDIDATE_CONCURRENCY)])

    def _judged(self, number: int, theirs: Asked, ours: Asked | EngineError) -> dict[str, Any]:
        """What the report of a run says, or that a server died."""
        if isinstance(ours, EngineError):
            return self._died(number, ours)
        known = {suite.name: suite for suite in self.suites}
        again: list[Asked] = []
        report = compare(ours, theirs, suites=known)
        if report.outcome == "fail":
            say(f"run {number + 1} fails unless the baseline itself differs as much: asking it")
            [second] = self._answers(number, [Time(number, number + 1, AGAIN_CONCURRENCY)])
            if isinstance(second, EngineError):
                return self._died(number, second)
            again = [second]
            report = compare(ours, theirs, second, suites=known)
        failed = [as_row(figure) for figure in report.figures if figure.outcome == "fail"]
        say(
            f"run {number + 1} of {self.options.runs}: {report.outcome}, "
            f"{len(failed)} figures failed"
        )
        return {
            "number": number,
            "outcome": report.outcome,
            "baseline": report.baseline,
            "candidate": report.candidate,
            "concurrency": ours.concurrency,
            "sampling_seed": ours.seed,
            "asked_s": [asked.wall_s for asked in (theirs, *again, ours)],
            "figures": len(report.figures),
            "outcomes": Counter(figure.outcome for figure in report.figures),
            "failed": failed,
            "samples": [each.model_dump(mode="json") for each in report.samples] if failed else [],
        }

    def _died(self, number: int, error: EngineError) -> dict[str, Any]:
        say(f"run {number + 1} of {self.options.runs}: {error.message}")
        return {"number": number, "outcome": DIED, "because": error.message}

    def _answers(self, server: int, times: Sequence[Time]) -> list[Asked | EngineError]:
        """What a server answers each time; from when it died on, the error."""
        arguments = {
            "max-num-seqs": MOST_SEQS[server % len(MOST_SEQS)],
            "max-num-batched-tokens": MOST_BATCHED_TOKENS[server % len(MOST_BATCHED_TOKENS)],
        }
        found: list[Asked | EngineError] = []
        with tempfile.TemporaryDirectory() as folder:
            subject = served(self.engine, self.options.model, Path(folder), arguments)
            try:
                with subject.open(Progress(), lambda done, total: None) as opened:
                    for time in times:
                        asked = runtime.run(
                            ask_suites(
                                self.suites,
                                self._plan(time.run),
                                opened.asker,
                                seed=time.seed,
                                concurrency=time.concurrency,
                                by=subject.by,
                            )
                        )
                        opened.check()
                        found.append(asked)
            except EngineError as error:
                found += [error] * (len(times) - len(found))
        return found

    def _plan(self, number: int) -> SuitePlan:
        return SuitePlan(
            size=Size.SCREEN,
            seed=number,
            per_category=1 if self.options.smoke else None,
            max_tokens=CONTEXT_TOKENS,
        )


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
        asking(Questions(tuple(suites), plan), options.output, Progress()) as run,
    ):
        stock = served(engine, options.model, Path(folder), {})
        other = served(engine, options.model, Path(folder), {"max-num-seqs": 8})
        both = run.ask(
            stock,
            [Pass("the baseline", 0, CONCURRENCY), Pass("again", 1, AGAIN_CONCURRENCY)],
        )
        return [*both, *run.ask(other, [Pass("restarted", 0, CONCURRENCY)])], plan


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


def alarm_text(runs: Sequence[Mapping[str, Any]], suites: Sequence[Suite]) -> str:
    """The runs of a configuration against itself, as Markdown."""
    died = [run for run in runs if run["outcome"] == DIED]
    judged = [run for run in runs if run["outcome"] != DIED]
    lines = [
        f"{len(runs)} screens of vLLM against itself, each with items of its own and two servers "
        "(a restart, another max-num-seqs and max-num-batched-tokens, another concurrency, and "
        "sampled answers drawn anew). A failure has to exceed what the baseline shows against "
        "itself too; its second time was asked where a run failed without it, after one more "
        "restart:",
        "",
    ]
    if judged:
        lines += _judged_lines(judged)
    figures = [(run["number"], figure) for run in judged for figure in run["failed"]]
    lines.append(
        f"- of {sum(run['figures'] for run in judged)} figures {len(figures)} failed"
        + (":" if figures else "")
    )
    decide = deciding(suites)
    for number, figure in figures:
        decides = "" if counts(figure, decide) else " (does not decide a report)"
        category = figure["category"] or "all"
        lines.append(
            f"  - run {number}: {figure['suite']}/{category} {figure['metric']}{decides}: "
            f"{figure['because']}"
        )
    lines += [
        f"- run {run['number']} says nothing, a server died: {run['because']}" for run in died
    ]
    return "\n".join(lines)


def _judged_lines(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    outcomes = Counter(run["outcome"] for run in runs)
    failed = outcomes["fail"]
    low, high = clopper_pearson(failed, len(runs))
    seconds = sorted(run["asked_s"][-1] for run in runs)
    yield (
        f"- {failed} failed: {100 * failed / len(runs):.1f}% ({100 * low:.1f}% to "
        f"{100 * high:.1f}% at 95%, Clopper-Pearson), {100 * ALLOWED_ALARMS:.0f}% allowed"
    )
    yield (
        f"- {outcomes['pass']} passed, {outcomes['unclear']} were unclear: screens cannot "
        "support the limits with so few items"
    )
    yield (
        f"- asking a screen took {seconds[0]:.0f} to {seconds[-1]:.0f} s, "
        f"median {seconds[len(seconds) // 2]:.0f} s"
    )


def _parts(options: argparse.Namespace, results: dict[str, Any], suites: Sequence[Suite]) -> None:
    with VllmEngine() as engine:
        if "alarms" in options.parts:
            Alarms(options, engine, suites).add(results)
        if {"record", "power"} & set(options.parts):
            asked, plan = recorded(options, engine, suites)
            results["recorded_s"] = [each.wall_s for each in asked]
            save(options.output, results)
            if "power" in options.parts:
                run_power(options, results, asked, plan, suites)


def _sections(results: Mapping[str, Any], suites: Sequence[Suite]) -> Iterator[tuple[str, str]]:
    if results.get("alarms"):
        yield "False alarms", alarm_text(results["alarms"], suites)
    if results.get("power"):
        seconds = ", ".join(f"{each:.0f}" for each in results["recorded_s"])
        text = power_text(results["power"], results.get("passes", {}))
        yield "Power", f"{text}\n\nA standard run took {seconds} s to ask."


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
        options.runs = 2
    results = load(options.output)
    suites = chosen_suites(["needle", "fidelity"] if options.smoke else [], has_data=False)
    _parts(options, results, suites)
    for title, text in _sections(results, suites):
        if options.markdown is not None:
            put_section(options.markdown, title, text)
        print(f"## {title}\n\n{text}\n")


if __name__ == "__main__":
    main()
