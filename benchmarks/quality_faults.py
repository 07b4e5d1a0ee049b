"""Which suite notices which fault: KV formats that are broken on a CPU, and methods that are wrong.

    python benchmarks/quality_faults.py --model .model/SmolLM2-135M-Instruct \
        --output quality_faults.json --markdown docs/quality.md
    python benchmarks/quality_faults.py --output quality_faults.json --show

Formats are asked of real vLLM, by what `kvtune quality --size screen` runs; wrong methods of the
reference engine, with `--items` of each category. `quality_planted.py` lists the faults and which
suites should notice each. Results are written after every fault, and the same command goes on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quality_asking import (
    CONTEXT_TOKENS,
    Progress,
    as_row,
    asking,
    judged,
    load,
    put_section,
    save,
    say,
    served,
)
from quality_planted import Fault, faults

from kvtune.autotune.cli.quality_subjects import chosen_suites
from kvtune.autotune.quality.subjects import ReferenceModel, ReferenceSubject
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.errors import KvtuneError
from kvtune.policies.checkpoint import model_shape
from kvtune.policies.method_stack import MethodStack
from kvtune.profilers.quality.limits import ANY
from kvtune.profilers.quality.suite import Size, Suite, SuitePlan
from kvtune.types import QualityReport

SMOKE_SUITES = ["needle", "multi-turn"]
REFERENCE_TOGETHER = 8
"""Items in a batch of the reference engine; the second time three, so that batches differ."""

SCREEN_S = 30.0


class Bench:
    """Measures faults, and keeps what is known of them."""

    def __init__(self, options: argparse.Namespace, folder: Path, engine: VllmEngine) -> None:
        self.options = options
        self.folder = folder
        self.engine = engine
        self.suites = chosen_suites(SMOKE_SUITES if options.smoke else [], has_data=False)
        self.model = ReferenceModel(options.model)

    def plan(self, fault: Fault) -> SuitePlan:
        """A screen; the reference engine is asked a given number of items of each category."""
        items = self.options.items if fault.where == "reference" else None
        return SuitePlan(
            size=Size.SCREEN,
            per_category=1 if self.options.smoke else items,
            max_tokens=CONTEXT_TOKENS,
        )

    def measured(self, fault: Fault) -> dict[str, Any]:
        """What is written of a fault."""
        reporter = Progress()
        began_s = time.perf_counter()
        try:
            report = self._report(fault, reporter)
        except KvtuneError as error:
            return {"problem": error.message}
        known = {suite.name: suite for suite in self.suites}
        return {
            "outcome": report.outcome,
            "asked_s": report.wall_s,
            "start_s": reporter.start_s,
            "all_s": time.perf_counter() - began_s,
            "figures": [as_row(figure, known) for figure in report.figures],
            "samples": [sample.model_dump(mode="json") for sample in report.samples[:3]],
            "skipped": report.skipped,
        }

    def _report(self, fault: Fault, reporter: Progress) -> QualityReport:
        output = self.options.output
        if fault.stack is None:
            with asking(self.suites, self.plan(fault), output, reporter) as run:
                baseline = served(self.engine, self.options.model, self.folder, {})
                ours = served(self.engine, self.options.model, self.folder, fault.arguments)
                return run.compare(self.options.model, baseline, ours)
        right = ReferenceSubject(self.model, MethodStack())
        wrong = ReferenceSubject(self.model, fault.stack)
        with asking(
            self.suites,
            self.plan(fault),
            output,
            reporter,
            concurrency=REFERENCE_TOGETHER,
            again_concurrency=3,
        ) as run:
            return judged(run, right, wrong)


def table(results: Mapping[str, Any], listed: Sequence[Fault]) -> str:
    """What was found, as Markdown."""
    known = chosen_suites([], has_data=False)
    names = [suite.name for suite in known]
    done = [fault for fault in listed if fault.name in results]
    lines = [
        "Each row is a fault, each column a suite. **fail**: a figure failed that decides the "
        "report when nobody gives limits. (fail): one failed that counts only if a limit names it. "
        "-: not asked, or the baseline had nothing to lose. What is *expected* was written down "
        "before anything was measured. Seconds are those of asking the candidate.",
        "",
        f"| fault | engine | expected | outcome | s | {' | '.join(names)} | broken output |",
        "|---" * (len(names) + 6) + "|",
    ]
    for fault in done:
        found = results[fault.name]
        if problem := found.get("problem"):
            lines.append(f"| {fault.name} | {fault.where} | | did not run: {problem} |")
            continue
        cells = [_cell(found["figures"], name) for name in [*names, ANY]]
        expected = ", ".join(fault.expected) or "-"
        lines.append(
            f"| {fault.name} | {fault.where} | {expected} | {found['outcome']} "
            f"| {found['asked_s']:.0f} | " + " | ".join(cells) + " |"
        )
    lines += ["", *(line for fault in done for line in _told(fault, results[fault.name], known))]
    return "\n".join(lines)


def _cell(figures: Sequence[Mapping[str, Any]], suite: str) -> str:
    own = [
        figure
        for figure in figures
        if figure["suite"] == suite and not figure["because"].startswith("not informative")
    ]
    failed = [figure for figure in own if figure["outcome"] == "fail"]
    if any(figure["counts"] for figure in failed):
        return "**fail**"
    if failed:
        return "(fail)"
    # All items of a suite together count only when they fail.
    decided = {
        figure["outcome"]
        for figure in own
        if figure["counts"] and (figure["category"] or suite == ANY)
    }
    return "-" if not own else "unclear" if "unclear" in decided else "pass"


def _told(fault: Fault, found: Mapping[str, Any], suites: Sequence[Suite]) -> Iterator[str]:
    """A line on what was planted, whether it was noticed where it should be, and by what."""
    if "problem" in found:
        return
    names = [suite.name for suite in suites]
    noticed = [name for name in names if _cell(found["figures"], name) == "**fail**"]
    words = f"- **{fault.name}** ({fault.says}): "
    if fault.expected:
        missed = [name for name in fault.expected if name not in noticed]
        words += "noticed by " + (", ".join(noticed) or "no suite")
        words += f"; missed by {', '.join(missed)}" if missed else ", all that should"
    else:
        words += found["outcome"] + (f", by {', '.join(noticed)}" if noticed else "")
    if fault.where == "vllm":
        within = "within" if found["asked_s"] <= SCREEN_S else "beyond"
        words += f", {within} {SCREEN_S:.0f} s"
    yield words + "."
    worst = [figure for figure in found["figures"] if figure["outcome"] == "fail"]
    for figure in sorted(worst, key=lambda each: not each["counts"])[:3]:
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
    parser.add_argument("--markdown", type=Path, help="write the table into this page")
    parser.add_argument("--where", choices=["vllm", "reference"], help="only faults of one engine")
    parser.add_argument("--only", nargs="+", help="only these faults")
    parser.add_argument("--items", type=int, default=8, help="of a category, reference engine")
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
    text = table(results, listed)
    if options.markdown is not None:
        put_section(options.markdown, "Faults", text)
    print(text)


if __name__ == "__main__":
    main()
