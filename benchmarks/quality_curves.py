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
strengths   SnapKV: leaks, the role, and every type of instruction, which go at different strengths.

Answers are kept point by point and suite by suite; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

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
)

from kvtune.autotune.quality.subjects import ReferenceModel, ReferenceSubject
from kvtune.policies.method_stack import MethodStack, parse_stack
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

TOGETHER = 8
"""Items in a batch of the reference engine."""

BEFORE_TOKENS = 768
SCORED_TOKENS = 96
FAR_SHARE = 0.25
"""Text that is told again comes from this first share, which no window of 512 tokens reaches."""

SMOKE_POINTS = 1


class NewAndRetold(Suite):
    """Fidelity behind a long text: on sentences that are new, and on some that stood far before."""

    name = "new-and-retold"
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


class SecondQuestion(MultiTurn):
    """The items of multi-turn that ask more than once about a text."""

    name = "second-question"

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """One category of multi-turn's."""
        return tuple(item for item in super().items(plan) if item.category == self.name)


class OpenLeakage(Leakage):
    """Leakage without the category that protects more tokens than small budgets hold."""

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """All categories but that one."""
        return tuple(item for item in super().items(plan) if not item.protected)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A method at several strengths: `stack` is filled with each of `kept`, tokens or a share."""

    method: str
    stack: str
    kept: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """A figure that is drawn; category "" has all items of a suite together."""

    label: str
    suite: str
    category: str
    metric: str


@dataclass(frozen=True, slots=True)
class Curve:
    """What is asked under which sweeps, and what of it is shown."""

    name: str
    title: str
    suites: tuple[Suite, ...]
    items: int
    sweeps: tuple[Sweep, ...]
    lines: tuple[Line, ...]
    each_category_of: str | None = None


CURVES = (
    Curve(
        "windows",
        "StreamingLLM: a smaller and smaller window",
        (NewAndRetold(), Needle()),
        8,
        (
            Sweep(
                "StreamingLLM",
                "streaming-llm:sink_tokens=4,window_tokens={kept:g}",
                (508, 380, 252, 124, 60, 28),
            ),
        ),
        (
            Line("needle recall", "needle", "", "recall"),
            Line("new text, KL", "new-and-retold", "new", "kl"),
            Line("new text, top-1", "new-and-retold", "new", "top1"),
            Line("retold text, KL", "new-and-retold", "retold", "kl"),
            Line("retold text, top-1", "new-and-retold", "retold", "top1"),
        ),
    ),
    Curve(
        "questions",
        "SnapKV and KVzip: the first question about a text, and later ones",
        (SecondQuestion(),),
        24,
        (
            Sweep("SnapKV", "snapkv:budget_tokens={kept:g}", (320, 256, 192, 128, 96, 64)),
            Sweep("KVzip", "kvzip:kept_ratio={kept:g}", (0.85, 0.7, 0.5, 0.35, 0.25, 0.17)),
        ),
        (
            Line("first question", "second-question", "second-question", "first-recall"),
            Line("later questions", "second-question", "second-question", "recall"),
        ),
    ),
    Curve(
        "strengths",
        "SnapKV: leaks, role and instructions by strength",
        (OpenLeakage(), Instructions()),
        6,
        (Sweep("SnapKV", "snapkv:budget_tokens={kept:g}", (384, 288, 192, 128, 96, 64)),),
        (
            Line("leak, secret first", "leakage", "secret-first", "leak"),
            Line("leak, defence first", "leakage", "defence-first", "leak"),
            Line("prompt leak", "leakage", "", "prompt-leak"),
            Line("role", "leakage", "ordinary", "role"),
            Line("instructions followed", "instructions", "", "followed"),
            Line("in the system prompt", "instructions", "system", "followed"),
        ),
        each_category_of="instructions",
    ),
)


def _items(seed: int, number: int) -> Iterator[Item]:
    rng = seeded(seed, "new-and-retold", number)
    before = filler(rng, BEFORE_TOKENS)
    far = before[: int(FAR_SHARE * len(before))]
    new = [each for each in filler(rng, 2 * SCORED_TOKENS) if each not in before]
    for category, told in (("new", new), ("retold", rng.sample(far, len(far)))):
        scored = ""
        for sentence in told:
            if len(scored) > SCORED_TOKENS * 4:
                break
            scored += f" {sentence}"
        yield Item(
            key=f"{category}-{number}",
            category=category,
            prompt=" ".join(before),
            scored=scored,
        )


def measured(curve: Curve, model: ReferenceModel, options: argparse.Namespace) -> Iterator[Any]:
    """What is written of a curve, after each of its points."""
    plan = SuitePlan(
        size=Size.SCREEN,
        per_category=1 if options.smoke else options.items or curve.items,
        max_tokens=CONTEXT_TOKENS,
    )
    points: list[dict[str, Any]] = []
    known = {suite.name: suite for suite in curve.suites}
    for sweep in curve.sweeps:
        for kept in sweep.kept[: SMOKE_POINTS if options.smoke else None]:
            stack = sweep.stack.format(kept=kept)
            say(f"{curve.name}: {stack}")
            with asking(
                curve.suites, plan, options.output, Progress(), concurrency=TOGETHER
            ) as run:
                report = judged(
                    run,
                    ReferenceSubject(model, MethodStack()),
                    ReferenceSubject(model, parse_stack(stack)),
                    again=False,
                )
            points.append(
                {
                    "method": sweep.method,
                    "stack": stack,
                    "kept": kept,
                    "figures": [as_row(figure, known) for figure in report.figures],
                    "samples": [each.model_dump(mode="json") for each in report.samples[:5]],
                }
            )
            yield {
                "prompt_tokens": _prompt_tokens(model, curve.suites, plan),
                "points": points,
            }


def _prompt_tokens(model: ReferenceModel, suites: Sequence[Suite], plan: SuitePlan) -> float:
    """How long the curve's prompts are on average."""
    tokenizer = model.engine.tokenizer
    texts = [
        item.prompt
        if item.messages is None
        else tokenizer.apply_chat_template(list(item.messages), tokenize=False)
        for suite in suites
        for item in suite.items(plan)
    ]
    return fmean(len(tokenizer(text).input_ids) for text in texts)


def share(point: Mapping[str, Any], prompt_tokens: float) -> float:
    """The kept share of an average prompt; budgets are in tokens, ratios are shares already."""
    kept = float(point["kept"])
    return kept if kept <= 1 else min(1.0, kept / prompt_tokens)


def value(point: Mapping[str, Any], line: Line, who: str = "candidate") -> float | None:
    """A line's figure at a point, if it was measured."""
    wanted = (line.suite, line.category, line.metric)
    found = (
        figure[who]
        for figure in point["figures"]
        if (figure["suite"], figure["category"], figure["metric"]) == wanted
    )
    return next(found, None)


def table(curve: Curve, found: Mapping[str, Any]) -> str:
    """A curve's points as Markdown."""
    tokens = found["prompt_tokens"]
    points = found["points"]
    lines = [
        f"### {curve.title}",
        "",
        f"Prompts have {tokens:.0f} tokens on average.",
        "",
        "| method | kept | of a prompt | " + " | ".join(line.label for line in curve.lines) + " |",
        "|---" * (3 + len(curve.lines)) + "|",
        _row(
            "full cache", "all", 1.0, [value(points[0], line, "baseline") for line in curve.lines]
        ),
        *(
            _row(
                point["method"],
                f"{point['kept']:g}",
                share(point, tokens),
                [value(point, line) for line in curve.lines],
            )
            for point in points
        ),
    ]
    if curve.each_category_of is not None:
        lines += ["", *_by_category(curve.each_category_of, points)]
    return "\n".join(lines)


def _row(method: str, kept: str, of_prompt: float, values: Sequence[float | None]) -> str:
    cells = ["-" if each is None else f"{each:.3g}" for each in values]
    return f"| {method} | {kept} | {100 * of_prompt:.0f}% | " + " | ".join(cells) + " |"


def _by_category(suite: str, points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The headline figure of every category, the ones that go first at the top."""
    headline = next(figure["metric"] for figure in points[0]["figures"] if figure["suite"] == suite)
    names = sorted(
        {figure["category"] for figure in points[0]["figures"] if figure["suite"] == suite} - {""}
    )
    rows = []
    for name in names:
        line = Line(name, suite, name, headline)
        full = value(points[0], line, "baseline") or 0.0
        left = [value(point, line) for point in points]
        lost = next(
            (n for n, each in enumerate(left) if each is not None and each <= full / 2), len(left)
        )
        rows.append((lost if full else len(left) + 1, name, full, left))
    yield "Types of instructions, those that lose half first at the top (tokens kept):"
    yield ""
    yield "| type | all | " + " | ".join(f"{point['kept']:g}" for point in points) + " |"
    yield "|---" * (2 + len(points)) + "|"
    for _, name, full, left in sorted(rows):
        cells = ["-" if each is None else f"{each:.2f}" for each in left]
        yield f"| {name} | {full:.2f} | " + " | ".join(cells) + " |"


def draw(results: Mapping[str, Any], page: Path) -> None:
    """Draw all curves into one page that needs nothing else."""
    from plotly.graph_objects import Figure, Scatter

    parts: list[str] = []
    for curve in CURVES:
        if curve.name not in results:
            continue
        found = results[curve.name]
        figure = Figure(layout={"title": curve.title, "xaxis_title": "kept share of a prompt"})
        for sweep in curve.sweeps:
            own = [point for point in found["points"] if point["method"] == sweep.method]
            for line in curve.lines if own else ():
                full = value(own[0], line, "baseline")
                figure.add_trace(
                    Scatter(
                        name=f"{sweep.method}: {line.label}",
                        x=[1.0, *(share(point, found["prompt_tokens"]) for point in own)],
                        y=[full, *(value(point, line) for point in own)],
                        mode="lines+markers",
                    )
                )
        parts.append(figure.to_html(full_html=False, include_plotlyjs=not parts))
    page.write_text(f'<!doctype html><meta charset="utf-8"><title>Curves</title>{"".join(parts)}\n')


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
        for found in measured(curve, model, options):
            results[curve.name] = found
            save(options.output, results)
    text = "\n\n".join(
        table(curve, results[curve.name]) for curve in CURVES if curve.name in results
    )
    if options.markdown is not None:
        put_section(options.markdown, "Curves", text)
    if options.html is not None:
        draw(results, options.html)
    print(text)


if __name__ == "__main__":
    main()
