"""Which suite notices which fault: KV formats that are broken on a CPU, and methods that are wrong.

    python benchmarks/quality_faults.py --model .model/SmolLM2-135M-Instruct \
        --output quality_faults.json --markdown docs/quality.md
    python benchmarks/quality_faults.py --output quality_faults.json --show

Formats are asked of real vLLM, by what `kvtune quality --size screen` runs; wrong methods of the
reference engine, with `--items` of each category. At the end, fp8 is asked all that a search asks
of a finalist, so that it can pass; the baseline's second time is then after a restart.
`quality_planted.py` lists the faults and which suites should notice each. Results are written after
every fault, answers after every suite, and the same command goes on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quality_asking import (
    CONTEXT_TOKENS,
    Part,
    Progress,
    as_row,
    asking,
    counts,
    deciding,
    judged,
    load,
    put_section,
    save,
    say,
    served,
)
from quality_planted import Fault, faults

from kvtune.autotune.cli.quality_subjects import chosen_suites
from kvtune.autotune.quality.answers import AGAIN_CONCURRENCY, CONCURRENCY, Questions
from kvtune.autotune.quality.sizing import proving
from kvtune.autotune.quality.subjects import ReferenceModel, ReferenceSubject
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.errors import KvtuneError
from kvtune.policies.checkpoint import model_shape
from kvtune.policies.method_stack import MethodStack
from kvtune.profilers.quality.limits import ANY
from kvtune.profilers.quality.suite import Size, Suite, SuitePlan
from kvtune.types import QualityReport

SMOKE_SUITES = ["instructions", "needle"]
REFERENCE_TOGETHER = (8, 3)
"""Items in a batch of the reference engine, first and again, so that batches differ."""

SCREEN_S = 30.0
UNCLEAR_TOLD = 4
"""So many of the figures that were to be proved and were not are named."""


class Bench:
    """Measures faults, and keeps what is known of them."""

    def __init__(self, options: argparse.Namespace, folder: Path, engine: VllmEngine) -> None:
        self.options = options
        self.folder = folder
        self.engine = engine
        self.suites = chosen_suites(SMOKE_SUITES if options.smoke else [], has_data=False)
        self.model = ReferenceModel(options.model)

    def questions(self, fault: Fault) -> Questions:
        """A screen, or all that proves the suites' own limits; where the reference engine is asked,
        a given number of items of each category, or the fault's own."""
        is_reference = fault.engine == "reference"
        plan = SuitePlan(
            size=Size.STANDARD if fault.proves else Size.SCREEN,
            per_category=self.options.items if is_reference else None,
            max_tokens=CONTEXT_TOKENS,
            protects=is_reference,
        )
        suites = tuple(
            Part(suite, fault.categories[suite.name]) if suite.name in fault.categories else suite
            for suite in self.suites
        )
        if self.options.smoke:
            return Questions(suites, replace(plan, per_category=1))
        if fault.proves:
            found = proving(suites, plan, ())
            most = self.options.prove_items or max(found.numbers.values(), default=0)
            return replace(
                found, numbers={name: min(each, most) for name, each in found.numbers.items()}
            )
        return Questions(suites, plan, numbers=fault.numbers)

    def measured(self, fault: Fault) -> dict[str, Any]:
        """What is written of a fault."""
        reporter = Progress()
        began_s = time.perf_counter()
        try:
            report = self._report(fault, reporter)
        except KvtuneError as error:
            return {"problem": error.message}
        return {
            "outcome": report.outcome,
            "asked_s": report.wall_s,
            "start_s": reporter.start_s,
            "all_s": time.perf_counter() - began_s,
            "figures": [as_row(figure) for figure in report.figures],
            "samples": [sample.model_dump(mode="json") for sample in report.samples[:3]],
            "skipped": report.skipped,
        }

    def _report(self, fault: Fault, reporter: Progress) -> QualityReport:
        first, again = (
            (CONCURRENCY, AGAIN_CONCURRENCY) if fault.stack is None else REFERENCE_TOGETHER
        )
        with asking(
            self.questions(fault),
            self.options.output,
            reporter,
            concurrency=first,
            again_concurrency=again,
            restarts=fault.proves,
        ) as run:
            if fault.stack is None:
                baseline = served(self.engine, self.options.model, self.folder, {})
                ours = served(self.engine, self.options.model, self.folder, fault.arguments)
                return run.compare(self.options.model, baseline, ours)
            right = ReferenceSubject(self.model, MethodStack())
            return judged(run, right, ReferenceSubject(self.model, fault.stack))


def table(results: Mapping[str, Any], listed: Sequence[Fault]) -> str:
    """What was found, as Markdown."""
    known = chosen_suites([], has_data=False)
    names = [suite.name for suite in known]
    decide = deciding(known)
    done = [fault for fault in listed if fault.name in results]
    lines = [
        "Each row is a fault, each column a suite. **fail**: a figure failed that decides the "
        "report when nobody gives limits. (fail): one failed that counts only if a limit names it. "
        "-: not asked, or the baseline had nothing to lose. What is *expected* was written down "
        "before anything was measured. Seconds are those of asking the candidate. *Broken output* "
        "is what can be seen in an answer alone: empty, a loop, or unreadable. The formats that a "
        "CPU corrupts pass it, as they answer with real words in no order; only beside what was "
        "asked, or beside the baseline, is that wrong.",
        "",
        f"| fault | engine | expected | outcome | s | {' | '.join(names)} | broken output |",
        "|---" * (len(names) + 6) + "|",
    ]
    for fault in done:
        found = results[fault.name]
        if problem := found.get("problem"):
            lines.append(f"| {fault.name} | {fault.engine} | | did not run: {problem} |")
            continue
        cells = [_cell(found["figures"], name, decide) for name in [*names, ANY]]
        expected = ", ".join(fault.expected) or "-"
        lines.append(
            f"| {fault.name} | {fault.engine} | {expected} | {found['outcome']} "
            f"| {found['asked_s']:.0f} | " + " | ".join(cells) + " |"
        )
    told = (_told(fault, results[fault.name], known) for fault in done)
    return "\n".join([*lines, "", *(line for each in told for line in each)])


def _cell(
    figures: Sequence[Mapping[str, Any]], suite: str, decide: Collection[tuple[str, str]]
) -> str:
    own = [figure for figure in figures if figure["suite"] == suite and _tells(figure)]
    failed = [figure for figure in own if figure["outcome"] == "fail"]
    if any(counts(figure, decide) for figure in failed):
        return "**fail**"
    if failed:
        return "(fail)"
    decided = {figure["outcome"] for figure in _deciding(own, decide)}
    return "-" if not own else "unclear" if "unclear" in decided else "pass"


def _tells(figure: Mapping[str, Any]) -> bool:
    """Whether the baseline had something to lose."""
    return not figure["because"].startswith("not informative")


def _deciding(
    figures: Sequence[Mapping[str, Any]], decide: Collection[tuple[str, str]]
) -> list[Mapping[str, Any]]:
    """Those that decide; all items of a suite together do so only when they fail."""
    return [
        figure
        for figure in figures
        if counts(figure, decide) and _tells(figure)
        if figure["category"] or figure["suite"] == ANY or figure["outcome"] == "fail"
    ]


def _told(fault: Fault, found: Mapping[str, Any], suites: Sequence[Suite]) -> Iterator[str]:
    """A line on what was planted, whether it was noticed where it should be, and by what."""
    if "problem" in found:
        return
    decide = deciding(suites)
    names = [suite.name for suite in suites]
    noticed = [name for name in names if _cell(found["figures"], name, decide) == "**fail**"]
    words = f"- **{fault.name}** ({fault.says}): "
    if fault.expected:
        missed = [name for name in fault.expected if name not in noticed]
        words += "noticed by " + (", ".join(noticed) or "no suite")
        words += f"; missed by {', '.join(missed)}" if missed else ", all that should"
    else:
        words += found["outcome"] + (f", by {', '.join(noticed)}" if noticed else "")
    if fault.where == "vllm":  # as a screen
        within = "within" if found["asked_s"] <= SCREEN_S else "beyond"
        words += f", {within} {SCREEN_S:.0f} s"
    if fault.proves:
        ruled = Counter(figure["outcome"] for figure in _deciding(found["figures"], decide))
        words += (
            f": of {ruled.total()} figures that decide, {ruled['pass']} pass, "
            f"{ruled['unclear']} are unclear, {ruled['fail']} fail"
        )
    yield words + "."
    worst = [figure for figure in found["figures"] if figure["outcome"] == "fail"]
    shown = sorted(worst, key=lambda each: not counts(each, decide))[:3]
    if fault.proves:
        open_ones = [
            figure
            for figure in _deciding(found["figures"], decide)
            if figure["outcome"] == "unclear"
        ]
        shown += open_ones[:UNCLEAR_TOLD]
    for figure in shown:
        category = figure["category"] or "all"
        yield f"  - {figure['suite']}/{category} {figure['metric']}: {figure['because']}"


@contextmanager
def _bench(options: argparse.Namespace) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder, VllmEngine() as engine:
        yield Bench(options, Path(folder), engine)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=".model/SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=Path("quality_faults.json"))
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="show these results too")
    parser.add_argument("--markdown", type=Path, help="write the table into this page")
    parser.add_argument(
        "--where", choices=["vllm", "reference", "proving"], help="only faults of this part"
    )
    parser.add_argument("--only", nargs="+", help="only these faults")
    parser.add_argument("--items", type=int, default=8, help="of a category, reference engine")
    parser.add_argument(
        "--prove-items", type=int, help="of a category, at most, to prove fp8 [what a search asks]"
    )
    parser.add_argument("--smoke", action="store_true", help="one item, two suites: does it run?")
    parser.add_argument("--show", action="store_true", help="measure nothing, print what is known")
    return parser.parse_args()


def main() -> None:
    options = _options()
    shape = model_shape(options.model)
    listed = faults(30 if shape is None else shape.layers)
    wanted = [
        fault
        for fault in listed
        if options.where in (None, fault.where)
        if not options.only or fault.name in options.only
    ]
    results = load(options.output)
    with _bench(options) as bench:
        for number, fault in enumerate(wanted, start=1):
            if options.show or "outcome" in results.get(fault.name, {}):
                continue
            say(f"fault {number} of {len(wanted)}: {fault.name}")
            results[fault.name] = bench.measured(fault)
            save(options.output, results)
            say(f"{fault.name}: {results[fault.name].get('outcome', 'did not run')}")
    for file in options.also:
        results = {**load(file), **results}
    text = table(results, listed)
    if options.markdown is not None:
        put_section(options.markdown, "Faults", text)
    print(text)


if __name__ == "__main__":
    main()
