"""Conversations: a fact that is asked for turns later, and a second question about one text.

An evictor that keeps what the question at hand needs (SnapKV and its kin) answers the first
question about a text and has lost what the second one needs; the second one is a figure of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import ClassVar

from kvtune.profilers.quality.sizes import fitting, numbered
from kvtune.profilers.quality.suite import Answer, Item, QualityMetric, Size, Suite, SuitePlan
from kvtune.profilers.quality.texts import (
    VOCABULARIES,
    coined_words,
    filler,
    names,
    numbers,
    seeded,
    with_facts,
)

OUTPUT_TOKENS = 32
TURNS = (2, 4, 8)
"""How many turns lie between the text and the question, each a category."""

_STAGES: tuple[tuple[Size, int, tuple[int, ...]], ...] = (
    (Size.SCREEN, 3, (300,)),
    (Size.STANDARD, 24, (300, 600)),
    (Size.FULL, 100, (600, 1500, 3000, 6000)),
)
"""Up to how many items of a category a size has, and how long the texts of those it adds are."""

_DEPTHS = (0.1, 0.5, 0.9)
_REMARKS = (
    ("I also heard this: {told} What do you make of it?", "That is a nice story. {told}"),
    ("A friend wrote to me. {told} Is that not strange?", "It is unusual, but it happens. {told}"),
    ("Let me tell you something else. {told}", "Thank you for telling me. {told}"),
    ("Yesterday I read this: {told}", "I see. It reminds me of something else. {told}"),
    ("My neighbour says: {told} Do you believe it?", "I have no reason to doubt it. {told}"),
    ("Here is one more. {told}", "Interesting. I could add this: {told}"),
    ("Listen to this. {told} What would you have done?", "I would have done the same. {told}"),
    ("And this happened too: {told}", "I understand. Here is a similar one. {told}"),
)


class MultiTurn(Suite):
    """Facts in conversations.

    Item n of every category begins with the same text n, and longer conversations continue shorter
    ones, so a server with a prefix cache reads them once; within a category all texts are new.
    """

    name = "multi-turn"
    says = "what was said early in a conversation, or not asked for at once, is lost"
    metrics: ClassVar[tuple[QualityMetric, ...]] = (
        QualityMetric("recall", "share", "higher", "difference", limit=0.05),
        QualityMetric("first-recall", "share", "higher", "difference", limit=0.05),
    )

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """Every category's items, by number; those that may not fit the plan are left out."""
        asked = (
            item
            for number, lengths in numbered(plan, _STAGES)
            for item in _items(plan.seed, number, lengths[number % len(lengths)])
        )
        return fitting(asked, plan.max_tokens)

    def figures(
        self, item: Item, ours: Answer, theirs: Answer
    ) -> Mapping[str, tuple[float, float]]:
        """`recall` of the fact asked for after turns, or of those asked for after the first one.

        `first-recall` is that of the first question, where more follow.
        """
        mine, baseline = _recalls(item, ours), _recalls(item, theirs)
        if not item.follow_ups:
            return {"recall": (mine[0], baseline[0])}
        return {
            "recall": (_mean(mine[1:]), _mean(baseline[1:])),
            "first-recall": (mine[0], baseline[0]),
        }

    def detail(self, item: Item, answer: Answer) -> str:
        """What was expected of the questions that got something else."""
        expected = item.check["expected"]
        missed = [
            value
            for value, recall in zip(expected, _recalls(item, answer), strict=True)
            if not recall
        ]
        return f"expected {', '.join(missed)}" if missed else ""


def _items(seed: int, number: int, length_tokens: int) -> list[Item]:
    rng = seeded(seed, "multi-turn", number)
    told, asked = _text(rng, length_tokens)
    turns = [turn for _ in range(max(TURNS)) for turn in _turn(rng)]
    opening = f"Please read this and keep it in mind.\n\n{told}"
    place, about = {"length_tokens": float(length_tokens)}, f"multi-turn/{number}"
    found = []
    for index, count in enumerate(TURNS):
        question, expected = asked[(number + index) % len(asked)]
        found.append(
            Item(
                key=f"after-{count}-{number}-{length_tokens}",
                category=f"after-{count}",
                messages=(
                    _message("user", opening),
                    _message("assistant", "I have read it and will keep it in mind."),
                    *turns[: 2 * count],
                    _message("user", question),
                ),
                output_tokens=OUTPUT_TOKENS,
                place={**place, "turns": float(count)},
                about=about,
                check={"expected": [expected]},
            )
        )
    order = [asked[(number + shift) % len(asked)] for shift in range(len(asked))]
    (first, _), *later = order
    found.append(
        Item(
            key=f"second-question-{number}-{length_tokens}",
            category="second-question",
            messages=(_message("user", f"{opening}\n\n{first}"),),
            follow_ups=tuple(question for question, _ in later),
            output_tokens=OUTPUT_TOKENS,
            place={**place, "turns": 1.0},
            about=about,
            check={"expected": [expected for _, expected in order]},
        )
    )
    return found


def _text(rng: Random, length_tokens: int) -> tuple[str, list[tuple[str, str]]]:
    """A text with three facts, and the question about each with what is expected."""
    words = VOCABULARIES["en"]
    owner = rng.choice(words.owners)
    town, boat = (word.capitalize() for word in coined_words(rng, 2, 3))
    code, train, sail = numbers(rng, 3, 5)
    facts = [
        words.code_fact.format(owner=owner, code=code),
        f"The train to {town} is train number {train}.",
        f"The boat {boat} has the sail number {sail}.",
    ]
    asked = [
        (f"{words.code_question.format(owner=owner)} Answer with the code.", code),
        (f"What is the number of the train to {town}? Answer with the number.", train),
        (f"What is the sail number of the boat {boat}? Answer with the number.", sail),
    ]
    told = with_facts(filler(rng, length_tokens - 60), zip(_DEPTHS, facts, strict=True))
    return told, asked


def _turn(rng: Random) -> tuple[Mapping[str, str], Mapping[str, str]]:
    said, answered = rng.choice(_REMARKS)
    ours, theirs = (" ".join(filler(rng, 22)) for _ in range(2))
    return _message("user", said.format(told=ours)), _message(
        "assistant", answered.format(told=theirs)
    )


def _message(role: str, content: str) -> Mapping[str, str]:
    return {"role": role, "content": content}


def _recalls(item: Item, answer: Answer) -> list[float]:
    """Whether each answer names what was expected of it; a missing answer does not."""
    expected = item.check["expected"]
    texts = [*answer.texts, *[""] * len(expected)]
    return [float(names(value, text)) for value, text in zip(expected, texts, strict=False)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
