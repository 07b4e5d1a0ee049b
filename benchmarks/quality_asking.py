"""What the quality benchmarks share: whom they ask, how answers are kept, how results are written.

Answers lie in a history beside the results (`RESULTS.db`), suite by suite, so a benchmark that was
interrupted goes on where it was.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from kvtune.autotune.quality.answers import AGAIN_CONCURRENCY, CONCURRENCY, Pass, Questions
from kvtune.autotune.quality.run import QualityRun
from kvtune.autotune.quality.subjects import ServedSubject, Subject
from kvtune.autotune.reporting import Quiet
from kvtune.engines.base import Engine, ServerSpec
from kvtune.profilers.quality.compare import Asked, compare
from kvtune.profilers.quality.limits import ANY, BROKEN_OUTPUT, own_limits
from kvtune.profilers.quality.suite import Answer, Item, Suite, SuitePlan
from kvtune.store.database import open_store
from kvtune.types import QualityFigure, QualityReport

CONTEXT_TOKENS = 4096
SERVER: Mapping[str, JsonValue] = {
    "enforce-eager": True,
    "kv-cache-memory-bytes": "1G",
    "max-model-len": CONTEXT_TOKENS,
}
"""What every server here has: a quick start, and room for sixteen of the longest prompts."""

SAY_EVERY_S = 15.0


class Progress(Quiet):
    """Says on stderr what is asked; how far it is only now and then."""

    def __init__(self) -> None:
        self.start_s: float | None = None
        self._said_s = 0.0

    def phase(self, title: str) -> None:
        """Say it."""
        say(title)

    def note(self, text: str) -> None:
        """Say it."""
        say(text)

    def ready(self, start_s: float) -> None:
        """Keep how long the start took."""
        self.start_s = start_s

    def asked(self, done: int, total: int) -> None:
        """Say it unless something was said just before."""
        if time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            say(f"  {done} of {total} answered")


class Part(Suite):
    """Some of a suite's items: those of some categories, then those from `start` up to `stop`."""

    def __init__(
        self,
        suite: Suite,
        categories: Collection[str] = (),
        *,
        start: int = 0,
        stop: int | None = None,
        name: str | None = None,
    ) -> None:
        self.suite = suite
        self.categories = categories
        self.span = slice(start, stop)
        self.name = name or suite.name
        self.says = suite.says
        self.metrics = suite.metrics

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """Those of the suite that are in this part."""
        known = self.suite.items(plan)
        chosen = (item for item in known if not self.categories or item.category in self.categories)
        return tuple(chosen)[self.span]

    def figures(
        self, item: Item, ours: Answer, theirs: Answer
    ) -> Mapping[str, tuple[float, float]]:
        """The suite's."""
        return self.suite.figures(item, ours, theirs)

    def detail(self, item: Item, answer: Answer) -> str:
        """The suite's."""
        return self.suite.detail(item, answer)


@contextmanager
def asking(
    questions: Questions,
    output: Path,
    reporter: Quiet,
    *,
    concurrency: int = CONCURRENCY,
    again_concurrency: int = AGAIN_CONCURRENCY,
    restarts: bool = False,
) -> Iterator[QualityRun]:
    """What asks suites and keeps the answers beside the results."""
    with open_store(output.with_suffix(".db")) as history:
        yield QualityRun(
            questions,
            history,
            reporter,
            restarts=restarts,
            concurrency=concurrency,
            again_concurrency=again_concurrency,
        )


def ask_by_suite(run: QualityRun, subject: Subject, one: Pass) -> Asked:
    """What a subject answers; an interrupt costs no more than a suite."""
    parts = [
        replace(run, questions=replace(run.questions, suites=(suite,))).ask(subject, [one])[0]
        for suite in run.questions.suites
    ]
    together = {
        "suites": tuple(part.suites[0] for part in parts),
        "wall_s": sum(part.wall_s for part in parts),
    }
    return parts[0].model_copy(update=together)


def judged(run: QualityRun, baseline: Subject, candidate: Subject) -> QualityReport:
    """The report of a candidate, asked suite by suite."""
    seed = run.questions.plan.seed
    theirs = ask_by_suite(run, baseline, Pass("the baseline", seed, run.concurrency))
    ours = ask_by_suite(run, candidate, Pass("the candidate", seed, run.concurrency))
    second = Pass("the baseline again", seed + 1, run.again_concurrency)
    repeat = ask_by_suite(run, baseline, second)
    known = {suite.name: suite for suite in run.questions.suites}
    return compare(ours, theirs, repeat, suites=known)


def served(
    engine: Engine, model: str, folder: Path, arguments: Mapping[str, JsonValue]
) -> ServedSubject:
    """A server with `arguments` besides those of all."""
    spec = ServerSpec(model=model, served_model_name="m", arguments={**SERVER, **arguments})
    return ServedSubject(engine, spec, log_path=folder / "server.log")


def deciding(suites: Iterable[Suite]) -> frozenset[tuple[str, str]]:
    """The suites and metrics that decide a report to which nobody gave limits."""
    own = {(limit.suite, limit.metric.name) for limit in own_limits(suites)}
    return frozenset(own | {(ANY, BROKEN_OUTPUT.name)})


def counts(row: Mapping[str, Any], decide: Collection[tuple[str, str]]) -> bool:
    """Whether a kept figure is one of those."""
    return (row["suite"], row["metric"]) in decide


def as_row(figure: QualityFigure) -> dict[str, Any]:
    """What results keep of a figure."""
    wanted = ("suite", "category", "metric", "outcome", "because", "items", "candidate", "baseline")
    found = figure.model_dump(mode="json", include=set(wanted))
    change = [figure.change.estimate, figure.change.low, figure.change.high]
    return {**found, "change": change}


def load(output: Path) -> dict[str, Any]:
    """The results so far."""
    found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    return found


def save(output: Path, results: Mapping[str, Any]) -> None:
    """Write all results, or leave the old ones."""
    fresh = output.with_suffix(".part")
    fresh.write_text(json.dumps(results, indent=1) + "\n")
    fresh.replace(output)


def put_section(page: Path, title: str, body: str) -> None:
    """Write a section of a Markdown page: in the place of the one with its title, or at the end."""
    text = page.read_text() if page.exists() else "# Quality: what was measured\n"
    before, _, rest = text.partition(f"\n## {title}\n")
    _, found, after = rest.partition("\n## ")
    tail = f"\n## {after}" if found else ""
    page.write_text(f"{before.rstrip()}\n\n## {title}\n\n{body.strip()}\n{tail}")


def say(text: str) -> None:
    """Report progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
