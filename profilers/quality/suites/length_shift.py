"""Length shift: answers that end by themselves, and whether they get longer, never end, or repeat.

Compressed caches can make a model ramble: each token is as fast as before, and the user waits
longer. Lengths of sampled answers differ from run to run, so noise must not be called a shift. Two
things see to that. Each figure is symmetric: if candidate and baseline drew their answers from the
same distribution, its expected difference would be zero. And the baseline's second run, drawn anew,
is a control arm on the same items: what it shows beside the first run is the noise floor of every
figure.

By default the greedy answers decide. Lengths of two samples of one model differ by some 0.6 to 1.1
nats (SmolLM2-135M at temperature 0.7), so to prove that not a fifth of a nat was added takes 150 to
400 items: they are a figure of their own, which decides where a limit names it, and shows a large
shift to whoever looks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import ClassVar

from kvtune.profilers.quality.passages import Passage, fitting_passage, page_name
from kvtune.profilers.quality.suite import Answer, Item, QualityMetric, Size, Suite, SuitePlan

OUTPUT_TOKENS = 128
"""Most answers to these tasks end before; what does not counts as endless."""

TASK_TOKENS = 80
"""The task, a chat template, and a model's own system prompt."""

ITEMS: Mapping[Size, int] = {Size.SCREEN: 3, Size.STANDARD: 20, Size.FULL: 80}
"""Items of a category."""

TEMPERATURES: Mapping[str, float] = {"greedy": 0.0, "sampled": 0.7}
"""The categories."""

SPREAD_NATS = 1.0
"""How far a changed answer's length usually moves: by a factor of e. Of the same model's greedy
answers 0.8 to 1.2 nats (root mean square, fp8 beside the stock cache), of samples as many."""

LONG_RATIO = 1.5
GRAM_WORDS = 4
_SPACELESS = r"[\u3040-\u30ff\u3400-\u9fff]"
_UNITS = re.compile(rf"{_SPACELESS}|(?:(?!{_SPACELESS})\w)+")

TASKS = (
    "Describe {subject} in one sentence.",
    "Which part of the text is the most surprising? Answer in one sentence.",
    "What is {subject} known for? Answer in one sentence.",
    "Which part of the text is the funniest? Answer in one sentence.",
    "Would you like to meet or visit {subject}? Answer in one sentence.",
    "Who is the most important person in the text? Answer in one sentence.",
)
"""Tasks that even a small model ends by itself most of the time."""


class LengthShift(Suite):
    """Lengths of answers that may end when they want to.

    `length` is the natural logarithm of a greedy answer's tokens, so a change is the log of the
    ratio of candidate to baseline; `sampled-length` is that of a sampled answer. `long` is whether
    an answer has more than 1.5 times the tokens of the other: the difference is the share of much
    longer answers minus the share of much shorter ones. Where both runs were cut off, none of these
    says anything. `endless` is whether an answer was cut off, `repetition` the share of its runs of
    four words that it had said before.
    """

    name = "length-shift"
    says = "answers become longer, do not end, or repeat themselves"
    metrics: ClassVar[tuple[QualityMetric, ...]] = (
        QualityMetric(
            "length", "nats", "lower", "difference", limit=0.2, bounds=None, spread=SPREAD_NATS
        ),
        QualityMetric(
            "sampled-length",
            "nats",
            "lower",
            "difference",
            limit=0.2,
            bounds=None,
            spread=SPREAD_NATS,
        ),
        QualityMetric("long", "share", "lower", "difference", limit=0.1),
        QualityMetric("endless", "share", "lower", "difference", limit=0.05),
        QualityMetric("repetition", "share", "lower", "difference", limit=0.05),
    )

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """A greedy and a sampled item about each passage; shorter ones where the plan is tight."""
        count = ITEMS[plan.size] if plan.per_category is None else plan.per_category
        room = (plan.max_tokens or math.inf) - (TASK_TOKENS + OUTPUT_TOKENS)
        return tuple(
            _item(category, number, page)
            for number in range(count)
            if (page := fitting_passage(plan.seed, number, room)) is not None
            for category in TEMPERATURES
        )

    def figures(
        self, item: Item, ours: Answer, theirs: Answer
    ) -> Mapping[str, tuple[float, float]]:
        """Lengths, endings and repetition of both answers."""
        mine, base = sum(ours.output_tokens), sum(theirs.output_tokens)
        found: dict[str, tuple[float, float]] = {}
        if not (_endless(ours) and _endless(theirs)):
            name = "sampled-length" if item.temperature else "length"
            found[name] = (math.log(max(1, mine)), math.log(max(1, base)))
            found["long"] = (float(mine > LONG_RATIO * base), float(base > LONG_RATIO * mine))
        found["endless"] = (_endless(ours), _endless(theirs))
        found["repetition"] = (repetition(_text(ours)), repetition(_text(theirs)))
        return found

    def detail(self, item: Item, answer: Answer) -> str:
        """How long the answer is, and that it did not end."""
        cut = ", cut off" if _endless(answer) else ""
        return f"{sum(answer.output_tokens)} tokens{cut}"


def repetition(text: str) -> float:
    """The share of a text's runs of four words that stood in it before, 0 for short texts.

    Chinese and Japanese, which have no spaces, are taken character by character.
    """
    units = _UNITS.findall(text)
    grams = [tuple(units[at : at + GRAM_WORDS]) for at in range(len(units) - GRAM_WORDS + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _text(answer: Answer) -> str:
    return "\n".join(answer.texts)


def _endless(answer: Answer) -> float:
    return float("length" in answer.finish_reasons)


def _item(category: str, number: int, page: Passage) -> Item:
    task = TASKS[number % len(TASKS)].format(subject=page.subject)
    return Item(
        key=f"{category}-{number}",
        category=category,
        messages=({"role": "user", "content": f"{page.text}\n\n{task}"},),
        output_tokens=OUTPUT_TOKENS,
        temperature=TEMPERATURES[category],
        about=page_name(number),
    )
