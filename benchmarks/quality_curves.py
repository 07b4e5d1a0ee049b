"""How quality falls with the strength of a method, in the reference engine.

    python benchmarks/quality_curves.py --model .model/SmolLM2-135M-Instruct \
        --output quality_curves.json --markdown docs/quality.md --html quality_curves.html
    python benchmarks/quality_curves.py --output quality_curves.json --show

Three curves:

windows     StreamingLLM with smaller and smaller windows: needles in a text, fidelity on text that
            is new (its words follow from the last sentences), and on text that says again what
            only stands before the window. Needles should go, and new text should stay.
questions   SnapKV and KVzip at the same share of the prompt: the first question about a text,
            which SnapKV sees while it chooses, and later ones, which it does not.
strengths   SnapKV: leaks, the role, and the types of instruction that the model follows best with
            the full cache, which go at different strengths.

Each prompt runs through the model once and is compressed by each stack in turn. Answers are kept
batch by batch and stack by stack; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from quality_asking import (
    CONTEXT_TOKENS,
    Part,
    as_row,
    asking,
    load,
    put_section,
    save,
    say,
)
from quality_curves_shown import Curve, Line, Sweep, draw, table

from kvtune.autotune.quality.answers import Pass, Questions
from kvtune.autotune.quality.subjects import OnProgress, Opened, ReferenceModel, ReferenceSubject
from kvtune.autotune.reporting import Quiet, Reporter
from kvtune.policies.method_stack import MethodStack, parse_stack
from kvtune.profilers.quality.compare import Asked, AskedSuite, compare
from kvtune.profilers.quality.suite import (
    Answer,
    Item,
    QualityMetric,
    Size,
    Suite,
    SuitePlan,
)
from kvtune.profilers.quality.suites.fidelity import Fidelity, compared
from kvtune.profilers.quality.suites.instructions import Instructions
from kvtune.profilers.quality.suites.leakage import Leakage
from kvtune.profilers.quality.suites.multi_turn import MultiTurn
from kvtune.profilers.quality.suites.needle import Needle
from kvtune.profilers.quality.texts import filler, seeded

if TYPE_CHECKING:
    from kvtune.engines.reference.recording import Recording

TOGETHER = 32
"""Items in a batch of the reference engine: what the model saw of their prompts takes 2 GB."""

BEFORE_TOKENS = 768
SCORED_TOKENS = 96
FAR_SHARE = 0.25
"""Text that is told again comes from this first share, which no window of 512 tokens reaches."""

NEAR_TOKENS = 256
FAR_LANGUAGE = "de"
"""Of what stands before the near text: it says nothing that helps to foresee English sentences."""

FOLLOWED = ("json", "case", "language", "keywords", "punctuation", "start-end")
"""What SmolLM2-135M-Instruct follows most often with the full cache, of six items of each type in
the fault benchmark: all of them, all, 83%, and 67% three times. The others can hardly get worse."""

SMOKE_POINTS = 1

EXPLAINED = (
    "SmolLM2-135M-Instruct in float32 in the reference engine. Behind a name: how many items. "
    "Behind a value: the 90% interval of its change from the full cache, item by item. KL is over "
    "the 20 most likely tokens, so it is a lower bound."
)


class NearAndFar(Suite):
    """Fidelity behind a long text, by where what the scored sentences depend on stands.

    `new` ones share words and shapes with all of the text, `retold` ones stood far before, and
    `recent` ones share them with its end alone: what stands before it is another language.
    """

    name = "near-and-far"
    says = "text is predicted otherwise, by where what it depends on stands"
    metrics: ClassVar[tuple[QualityMetric, ...]] = Fidelity.metrics

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """As many of both kinds as the plan names."""
        return tuple(
            item for number in range(plan.per_category or 1) for item in _items(plan.seed, number)
        )

    def figures(
        self, item: Item, ours: Answer, theirs: Answer
    ) -> Mapping[str, tuple[float, float]]:
        """Those of fidelity."""
        if ours.scores is None or theirs.scores is None:
            return {}
        return compared(ours.scores, theirs.scores)


class Replayed(ReferenceSubject):
    """A stack in the reference engine, on prompts that other stacks were asked too."""

    def __init__(
        self,
        model: ReferenceModel,
        stack: MethodStack,
        recordings: MutableMapping[tuple[int, ...], Recording],
    ) -> None:
        super().__init__(model, stack)
        self._recordings = recordings

    @contextmanager
    def open(self, reporter: Reporter, on_progress: OnProgress) -> Iterator[Opened]:
        """The same, where prompts are known from before."""
        from kvtune.autotune.quality.reference_asker import ReferenceAsker

        with super().open(reporter, on_progress) as opened:
            assert isinstance(opened.asker, ReferenceAsker)
            opened.asker.recordings = self._recordings
            yield opened


SHARES = (0.75, 0.5, 0.35, 0.2)

CURVES = (
    Curve(
        "windows",
        "StreamingLLM: a smaller and smaller window",
        (NearAndFar(), Part(Needle(), ("single", "multi-key", "key-value"))),
        10,
        (
            Sweep(
                "StreamingLLM",
                "streaming-llm:sink_tokens=4,window_tokens={kept:g}",
                (508, 380, 252, 124, 60, 28),
            ),
        ),
        (
            Line("needle recall", "needle", "", "recall"),
            Line("recent text, KL", "near-and-far", "recent", "kl"),
            Line("recent text, log-perplexity", "near-and-far", "recent", "log-perplexity"),
            Line("new text, KL", "near-and-far", "new", "kl"),
            Line("new text, log-perplexity", "near-and-far", "new", "log-perplexity"),
            Line("retold text, KL", "near-and-far", "retold", "kl"),
            Line("retold text, log-perplexity", "near-and-far", "retold", "log-perplexity"),
        ),
    ),
    Curve(
        "questions",
        "SnapKV and KVzip: the first question about a text, and later ones",
        (Part(MultiTurn(), ("second-question",)),),
        24,
        (
            Sweep("SnapKV", "snapkv:budget_tokens={tokens}", SHARES),
            Sweep("KVzip", "kvzip:kept_ratio={kept:g}", SHARES),
        ),
        (
            Line("first question", "multi-turn", "second-question", "first-recall"),
            Line("later questions", "multi-turn", "second-question", "recall"),
        ),
    ),
    Curve(
        "strengths",
        "SnapKV: leaks, role and instructions by strength",
        (Leakage(), Part(Instructions(), FOLLOWED)),
        16,
        (Sweep("SnapKV", "snapkv:budget_tokens={kept:g}", (512, 384, 320, 256, 192, 128, 64)),),
        (
            Line("leak, secret first", "leakage", "secret-first", "leak"),
            Line("leak, defence first", "leakage", "defence-first", "leak"),
            Line("prompt leak", "leakage", "", "prompt-leak"),
            Line("role", "leakage", "ordinary", "role"),
            Line("instructions followed", "instructions", "", "followed"),
        ),
        each_category_of="instructions",
    ),
)


def _items(seed: int, number: int) -> Iterator[Item]:
    rng = seeded(seed, "near-and-far", number)
    before = filler(rng, BEFORE_TOKENS)
    far = before[: int(FAR_SHARE * len(before))]
    new = [each for each in filler(rng, 2 * SCORED_TOKENS) if each not in before]
    foreign = filler(rng, BEFORE_TOKENS - NEAR_TOKENS, FAR_LANGUAGE)
    mixed = [*foreign, *filler(rng, NEAR_TOKENS)]
    for category, text, told in (
        ("recent", mixed, [each for each in new if each not in mixed]),
        ("new", before, new),
        ("retold", before, rng.sample(far, len(far))),
    ):
        scored = ""
        for sentence in told:
            if len(scored) > SCORED_TOKENS * 4:
                break
            scored += f" {sentence}"
        yield Item(
            key=f"{category}-{number}",
            category=category,
            prompt=" ".join(text),
            scored=scored,
        )


def measured(curve: Curve, model: ReferenceModel, options: argparse.Namespace) -> dict[str, Any]:
    """What is written of a curve."""
    plan = SuitePlan(
        size=Size.SCREEN,
        per_category=1 if options.smoke else options.items or curve.items,
        max_tokens=CONTEXT_TOKENS,
    )
    prompt_tokens = {suite.name: _prompt_tokens(model, suite, plan) for suite in curve.suites}
    points = [
        {"method": sweep.method, "stack": stack, "kept": kept}
        for sweep in curve.sweeps
        for kept, stack in list(sweep.stacks(fmean(prompt_tokens.values())))[
            : SMOKE_POINTS if options.smoke else None
        ]
    ]
    stacks = [parse_stack(point["stack"]) for point in points]
    full, *compressed = _asked(curve, plan, model, [MethodStack(), *stacks], options.output)
    known = {suite.name: suite for suite in curve.suites}
    for point, ours in zip(points, compressed, strict=True):
        report = compare(ours, full, suites=known)
        point["figures"] = [as_row(figure) for figure in report.figures]
        point["samples"] = [each.model_dump(mode="json") for each in report.samples[:5]]
    return {"prompt_tokens": prompt_tokens, "points": points}


def _asked(
    curve: Curve,
    plan: SuitePlan,
    model: ReferenceModel,
    stacks: Sequence[MethodStack],
    output: Path,
) -> list[Asked]:
    """What each stack answers; a batch's prompts run through the model once for all of them."""
    found: list[list[AskedSuite]] = [[] for _ in stacks]
    for suite in curve.suites:
        count = len(suite.items(plan))
        batches = []
        for start in range(0, count, TOGETHER):
            part = Part(suite, start=start, stop=start + TOGETHER, name=f"{suite.name}@{start}")
            recordings: dict[tuple[int, ...], Recording] = {}
            with asking(Questions((part,), plan), output, Quiet(), concurrency=TOGETHER) as run:
                batch = []
                for stack in stacks:
                    say(f"{curve.name}: {suite.name} from {start} of {count}, {stack}")
                    one = Pass("all", plan.seed, TOGETHER)
                    batch += run.ask(Replayed(model, stack, recordings), [one])[0].suites
            batches.append(batch)
        for number, parts in enumerate(zip(*batches, strict=True)):
            found[number].append(
                AskedSuite(
                    name=suite.name,
                    items=tuple(chain.from_iterable(part.items for part in parts)),
                    answers=tuple(chain.from_iterable(part.answers for part in parts)),
                )
            )
    return [
        Asked(
            suites=tuple(suites),
            plan=plan,
            seed=plan.seed,
            concurrency=TOGETHER,
            wall_s=0.0,
            by=str(stack),
        )
        for stack, suites in zip(stacks, found, strict=True)
    ]


def _prompt_tokens(model: ReferenceModel, suite: Suite, plan: SuitePlan) -> float:
    """How long a suite's prompts are on average."""
    tokenizer = model.engine.tokenizer
    texts = [
        item.prompt
        if item.messages is None
        else tokenizer.apply_chat_template(list(item.messages), tokenize=False)
        for item in suite.items(plan)
    ]
    return fmean(len(tokenizer(text).input_ids) for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=".model/SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=Path("quality_curves.json"))
    parser.add_argument("--markdown", type=Path, help="write the tables into this page")
    parser.add_argument("--html", type=Path, help="draw the curves (needs plotly)")
    parser.add_argument("--only", nargs="+", choices=[curve.name for curve in CURVES])
    parser.add_argument("--items", type=int, help="of each category [default: by curve]")
    parser.add_argument("--smoke", action="store_true", help="one item, one point of each sweep")
    parser.add_argument("--show", action="store_true", help="measure nothing, print what is known")
    options = parser.parse_args()
    results = load(options.output)
    model = ReferenceModel(options.model)
    for curve in () if options.show else CURVES:
        if options.only and curve.name not in options.only:
            continue
        results[curve.name] = measured(curve, model, options)
        save(options.output, results)
    tables = [table(curve, results[curve.name]) for curve in CURVES if curve.name in results]
    text = "\n\n".join([EXPLAINED, *tables])
    if options.markdown is not None:
        put_section(options.markdown, "Curves", text)
    if options.html is not None:
        draw(CURVES, results, options.html)
    print(text)


if __name__ == "__main__":
    main()
