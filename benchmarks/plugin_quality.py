"""Do the plugin's policies cost on vLLM what they cost in the reference engine?

    python benchmarks/plugin_quality.py --model .model/SmolLM2-135M-Instruct \
        --output plugin_quality.json

The same items of two suites, needles and conversations, are asked of vLLM with a policy of the
plugin and of the reference engine with a stack of the same method at the same strength. Told are
the scores of both, with 90% intervals, the change between them, item by item, and how many answers
are the same to the letter; and the scores of both without any policy, so that what a policy costs
can be seen. Answers are kept suite by suite, and the same command goes on where it was stopped.

Where the two are not the same method, `POLICIES` says so.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue
from quality_asking import Part, Progress, asking, load, save, say, served

from kvtune.autotune.quality.answers import Pass, Questions
from kvtune.autotune.quality.reference_asker import ReferenceAsker
from kvtune.autotune.quality.subjects import OnProgress, Opened, ReferenceModel, ReferenceSubject
from kvtune.autotune.reporting import Reporter
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.policies.method_stack import parse_stack
from kvtune.profilers.quality.compare import Asked, AskedSuite, compare
from kvtune.profilers.quality.paired import change_interval
from kvtune.profilers.quality.suite import Size, Suite, SuitePlan
from kvtune.profilers.quality.suites.multi_turn import MultiTurn
from kvtune.profilers.quality.suites.needle import Needle

if TYPE_CHECKING:
    from torch import Tensor

    from kvtune.engines.reference.recording import Recording
    from kvtune.engines.reference.sequence import Sequence as CachedSequence

PAGE_TOKENS = 32
TOGETHER = 8
"""Requests at a time, and items in a batch of the reference engine."""

CONTEXT_TOKENS = 1248
SERVER: Mapping[str, JsonValue] = {
    "dtype": "float32",
    "block-size": PAGE_TOKENS,
    "max-model-len": CONTEXT_TOKENS,
    "max-num-batched-tokens": 512,
    "kv-cache-memory-bytes": "512M",
}

SUITES = (
    Part(Needle(), ("single", "multi-key", "key-value")),
    Part(MultiTurn(), ("after-2", "second-question")),
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the plugin is `asked` for, and the `stack` of the same method and strength.

    `reads`: a prompt attends to itself `whole`, in full precision; or to what is `stored` of it; or
    page by page (`pages`) to what the method left of the pages before. `differs`: how the two are
    not the same method.
    """

    name: str
    asked: Mapping[str, JsonValue]
    stack: str
    reads: Literal["whole", "stored", "pages"] = "whole"
    differs: str = ""


AGREES = {True: "yes", False: "**no**", None: "?"}

NONE = Policy("none", {}, "full")
POLICIES = (
    Policy(
        "StreamingLLM",
        {"streaming_llm": {"window_tokens": 128, "sink_tokens": PAGE_TOKENS}},
        f"streaming-llm:sink_tokens={PAGE_TOKENS},window_tokens=128,positions=keep",
        "pages",
        "while it decodes, the plugin's window moves by pages and the reference engine's by tokens",
    ),
    Policy(
        "page eviction",
        {"page_eviction": {"budget_tokens": 256}},
        f"chunkkv:budget_tokens=256,chunk_tokens={PAGE_TOKENS},reuse_layers=1",
        differs="the plugin ranks pages once for all layers and keeps the first one, the reference "
        "engine ranks in each layer; a second question is ranked anew by the plugin alone",
    ),
    Policy(
        "turboquant, 3 bits",
        {"store": {"format": "turboquant", "bits_key": 3, "bits_value": 3}},
        "turboquant:bits_key=3,bits_value=3",
        "stored",
    ),
    Policy(
        "Quest",
        {"quest": {"budget_tokens": 128, "per_kv_head": True}},
        f"quest:page_tokens={PAGE_TOKENS},budget_tokens=128,dense_layers=2",
        differs="a second question makes its prompt anew on vLLM, so that the first answer is then "
        "read as a part of it",
    ),
)

Recordings = MutableMapping[tuple[int, ...], "Recording"]


class BesidePlugin(ReferenceSubject):
    """A stack in the reference engine, whose prompts are read as the policy says."""

    def __init__(self, model: ReferenceModel, policy: Policy, recordings: Recordings) -> None:
        super().__init__(model, parse_stack(policy.stack))
        assert self.key is not None
        self.key = {**self.key, "reads": policy.reads}
        self._reads = policy.reads
        self._recordings = recordings

    @contextmanager
    def open(self, reporter: Reporter, on_progress: OnProgress) -> Iterator[Opened]:
        """The same, with an asker that reads so."""
        kind = PageReader if self._reads == "pages" else ReferenceAsker
        with super().open(reporter, on_progress) as opened:
            asker = kind(
                self._model.engine,
                self._stack,
                exact_prefill=self._reads != "stored",
                on_progress=on_progress,
                recordings=self._recordings if self._reads == "whole" else None,
            )
            yield replace(opened, asker=asker)


class PageReader(ReferenceAsker):
    """Reads each page of a prompt as a prompt of its own, so that its stack acts between pages."""

    def _read(
        self, sequences: Sequence[CachedSequence], prompts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        last: list[Tensor | None] = [None] * len(prompts)
        pieces = [
            list(by_pages(prompt, sequence.seen_tokens))
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        for number in range(max(map(len, pieces))):
            rows = [n for n, own in enumerate(pieces) if number < len(own)]
            logits = self.engine.prefill(
                [sequences[n] for n in rows], [pieces[n][number] for n in rows]
            )
            for n, row in zip(rows, logits, strict=True):
                last[n] = row
        return [row for row in last if row is not None]


def by_pages(prompt: Sequence[int], seen_tokens: int) -> Iterator[Sequence[int]]:
    """A prompt that comes after so many tokens, cut where pages end."""
    first = 0
    while first < len(prompt):
        end = first + PAGE_TOKENS - (seen_tokens + first) % PAGE_TOKENS
        yield prompt[first:end]
        first = end


def rows_of(
    policy: Policy, suites: Sequence[Suite], served_ones: Asked, reference: Asked
) -> list[dict[str, Any]]:
    """What is kept of a policy: a row for each suite and metric."""
    known = {suite.name: suite for suite in suites}
    report = compare(served_ones, reference, suites=known)
    found = []
    for figure in report.figures:
        if figure.category or figure.suite not in known:
            continue
        change = figure.change
        has_bounds = change.low is not None and change.high is not None
        suite = known[figure.suite]
        ours, theirs = (_suite(asked, figure.suite) for asked in (served_ones, reference))
        found.append(
            {
                "policy": policy.name,
                "suite": figure.suite,
                "metric": figure.metric,
                "items": figure.items,
                "vllm": score(suite, figure.metric, ours),
                "reference": score(suite, figure.metric, theirs),
                "change": [change.estimate, change.low, change.high],
                # None: the items are about too few texts.
                "agrees": change.low <= 0 <= change.high if has_bounds else None,
                "same_answers": same_answers(ours, theirs),
            }
        )
    return found


def score(suite: Suite, metric: str, asked: AskedSuite) -> list[float | None]:
    """The mean of a share over a suite's items, with its 90% interval."""
    values = []
    for item, answer in zip(asked.items, asked.answers, strict=True):
        figures = suite.figures(item, answer, answer)
        if metric in figures:
            values.append(figures[metric][0])
    mean, low, high = change_interval(values, bounded=True)
    return [mean, None if low is None else max(low, 0.0), high]


def same_answers(ours: AskedSuite, theirs: AskedSuite) -> float:
    """The share of answers, each turn for itself, that are the same to the letter."""
    pairs = [
        (mine, others)
        for answer, other in zip(ours.answers, theirs.answers, strict=True)
        for mine, others in zip(answer.texts, other.texts, strict=True)
    ]
    return sum(mine.strip() == others.strip() for mine, others in pairs) / len(pairs)


def _suite(asked: Asked, name: str) -> AskedSuite:
    return next(suite for suite in asked.suites if suite.name == name)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was found, as Markdown."""
    lines = [
        "| policy | suite | items | vLLM | reference | change | agrees | same answers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = row["suite"] if row["metric"] == "recall" else f"{row['suite']}, {row['metric']}"
        lines.append(
            f"| {row['policy']} | {name} | {row['items']} | {_shown(row['vllm'])} "
            f"| {_shown(row['reference'])} | {_shown(row['change'], sign='+')} "
            f"| {AGREES[row['agrees']]} | {100 * row['same_answers']:.0f}% |"
        )
    notes = [f"- {policy.name}: {policy.differs}." for policy in POLICIES if policy.differs]
    return "\n".join([*lines, "", *notes])


def _shown(interval: Sequence[float | None], sign: str = "") -> str:
    mean, low, high = ("?" if value is None else f"{100 * value:{sign}.0f}" for value in interval)
    return f"{mean}% ({low} to {high})"


def main() -> None:
    options = _options()
    results = load(options.output)
    plan = SuitePlan(
        size=Size.SCREEN, per_category=options.items, max_tokens=CONTEXT_TOKENS, seed=options.seed
    )
    model, recordings = ReferenceModel(options.model), {}
    wanted = [each for each in (NONE, *POLICIES) if not options.only or each.name in options.only]
    one = Pass("everything", options.seed, TOGETHER)
    with (
        tempfile.TemporaryDirectory() as folder,
        VllmEngine() as engine,
        asking(Questions(SUITES, plan), options.output, Progress(), concurrency=TOGETHER) as run,
    ):
        for policy in () if options.show else wanted:
            say(f"{policy.name}: vLLM")
            extra = {"additional-config": {"kvtune": dict(policy.asked)}} if policy.asked else {}
            subject = served(engine, options.model, Path(folder), {**SERVER, **extra})
            (ours,) = run.ask(subject, [one])
            say(f"{policy.name}: the reference engine")
            (theirs,) = run.ask(BesidePlugin(model, policy, recordings), [one])
            results[policy.name] = rows_of(policy, SUITES, ours, theirs)
            save(options.output, results)
    print(table([row for rows in results.values() for row in rows]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".model/SmolLM2-135M-Instruct")
    parser.add_argument("--output", "--json", type=Path, default=Path("plugin_quality.json"))
    parser.add_argument("--only", nargs="+", choices=[each.name for each in (NONE, *POLICIES)])
    parser.add_argument("--items", type=int, default=6, help="of each category")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="measure nothing, print what is known")
    return parser.parse_args()


if __name__ == "__main__":
    main()
