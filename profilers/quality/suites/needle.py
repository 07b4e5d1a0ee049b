"""Needles: facts in long texts, at every depth, that have to be found again.

The kinds of task are those of needle-in-a-haystack tests such as RULER (Hsieh et al., 2024); all
texts are our own. Prompts end with the beginning of the answer, so that a model which follows no
instructions can answer too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from kvtune.profilers.quality.sizes import numbered
from kvtune.profilers.quality.suite import Answer, Item, QualityMetric, Size, Suite, SuitePlan
from kvtune.profilers.quality.texts import (
    VOCABULARIES,
    coined_words,
    filler,
    hex_words,
    most_tokens_of,
    names,
    numbers,
    seeded,
    with_facts,
)

OUTPUT_TOKENS = 16
VALUES_OUTPUT_TOKENS = 28
"""Room for three numbers of five digits and the words between them."""

DEPTHS = (0.1, 0.9, 0.5, 0.3, 0.7)
"""In an order that covers the text early; 0 is its start."""

CONTEXT_TOKENS = 4096
"""What a prompt may have where nobody says what the model takes."""

LANGUAGES = ("de", "fr", "es", "nl", "pl", "zh")

_STAGES: tuple[tuple[Size, int, tuple[int, ...]], ...] = (
    (Size.SCREEN, 5, (300, 450)),
    (Size.STANDARD, 24, (450, 900, 1600)),
    (Size.FULL, 120, (1000, 2000, 4000, 8000, 16000, 32000)),
)
"""Up to how many items of a category a size has, and how long the ones that it adds are."""

_KEYS = 4
_PAIR_CHARACTERS_PER_TOKEN = 2.1
"""Of the lines of a key-value list, where numbers take a token a digit."""

_OPENINGS = (
    "These are notes from a small valley.",
    "This is what the people of the village told each other.",
    "The following is from the diary of a town clerk.",
    "Here is a collection of small stories from the coast.",
    "This letter tells what happened during the year.",
)
_DIGITS = 5
_OVERHEAD_TOKENS = 80
"""Opening, question and the beginning of the answer, with a third to spare."""


class Needle(Suite):
    """Facts in long texts.

    Item n of the categories single, multi-key, multi-value and variable-tracking ask the same text
    n, so a server with a prefix cache reads it once; within a category every text is a new one.
    """

    name = "needle"
    says = "facts in long texts are no longer found"
    metrics: ClassVar[tuple[QualityMetric, ...]] = (
        QualityMetric("recall", "share", "higher", "difference", limit=0.05),
    )

    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """Every category's items, by number; lengths that may not fit the plan are left out."""
        context_tokens = CONTEXT_TOKENS if plan.max_tokens is None else plan.max_tokens
        most = context_tokens - VALUES_OUTPUT_TOKENS - _OVERHEAD_TOKENS
        found: list[Item] = []
        for number, length_tokens in enumerate(_lengths(plan, most)):
            depth = DEPTHS[number % len(DEPTHS)]
            found += _shared_text(plan.seed, number, length_tokens, depth)
            found.append(_pairs(plan.seed, number, length_tokens, depth))
            found.append(_multilingual(plan.seed, number, length_tokens, depth))
        return tuple(found)

    def figures(
        self, item: Item, ours: Answer, theirs: Answer
    ) -> Mapping[str, tuple[float, float]]:
        """The share of the expected values that an answer's first line names; of a chain, two."""
        return {"recall": (_recall(item, ours), _recall(item, theirs))}

    def detail(self, item: Item, answer: Answer) -> str:
        """What was expected, where something is missing."""
        return "" if _recall(item, answer) == 1 else f"expected {', '.join(_expected(item))}"


def _lengths(plan: SuitePlan, most_tokens: int) -> Iterator[int]:
    """The length of every item of a category, in order; none where not even short ones fit."""
    for number, lengths in numbered(plan, _STAGES):
        shorter = lengths[0] // 2
        fitting = [length for length in lengths if _bound(length) <= most_tokens] or [shorter]
        if _bound(fitting[0]) > most_tokens:
            return
        # Every round of depths begins at another length, so that all of them meet.
        yield fitting[(number % len(DEPTHS) + number // len(DEPTHS)) % len(fitting)]


def _bound(length_tokens: int) -> int:
    """No fewer tokens than a text of a length may have, in any of the languages."""
    return max(most_tokens_of(length_tokens, language) for language in VOCABULARIES)


def _shared_text(seed: int, number: int, length_tokens: int, depth: float) -> list[Item]:
    rng = seeded(seed, "needle", number)
    text = filler(rng, length_tokens - 170)  # what the facts below take
    words = VOCABULARIES["en"]
    owners = rng.sample(words.owners, _KEYS)
    town, thing, first, second = (word.capitalize() for word in coined_words(rng, 4, 3))
    codes = numbers(rng, _KEYS + 5, _DIGITS)
    train, room, values, keyed = codes[0], codes[1], codes[2:5], codes[5:]
    spread = [(depth + shift) % 1 for shift in (0, 0.25, 0.5, 0.75)]
    facts = [
        (depth, f"The train to {town} is train number {train}."),
        (depth, f"The key {first} opens room {room}."),
        ((depth + 1) / 2, f"The key {second} is a copy of the key {first}."),
        *(
            (place, words.code_fact.format(owner=owner, code=code))
            for place, owner, code in zip(spread, owners, keyed, strict=True)
        ),
        *(
            (place, f"One of the special magic numbers for {thing} is: {value}.")
            for place, value in zip(
                (depth, (depth + 0.3) % 1, (depth + 0.6) % 1), values, strict=True
            )
        ),
    ]
    told = with_facts([rng.choice(_OPENINGS), *text], facts)
    place = {"length_tokens": float(length_tokens), "depth": depth}
    asked = {
        "single": (
            f"What is the number of the train to {town}?",
            f"The train to {town} is train number",
            [train],
        ),
        "multi-key": (
            words.code_question.format(owner=owners[0]),
            words.code_answer.format(owner=owners[0]),
            [keyed[0]],
        ),
        "multi-value": (
            f"What are all the special magic numbers for {thing} mentioned in the text?",
            f"The special magic numbers for {thing} mentioned in the text are",
            values,
        ),
        "variable-tracking": (
            f"Which room does the key {second} open, and why?",
            f"The key {second} is a copy of the key",
            [first, room],
        ),
    }
    return [
        _item(category, number, told, *question, place=place, about=f"needle/{number}")
        for category, question in asked.items()
    ]


def _pairs(seed: int, number: int, length_tokens: int, depth: float) -> Item:
    rng = seeded(seed, "needle-pairs", number)
    words = VOCABULARIES["en"]
    count = int(length_tokens * _PAIR_CHARACTERS_PER_TOKEN / len("Tessa's rusty lantern: 12345\n"))
    chosen = rng.sample(range(len(words.names) * len(words.things)), count)
    keys = [
        f"{words.names[pair % len(words.names)]}'s "
        f"{words.things[pair // len(words.names)].removeprefix('the ')}"
        for pair in chosen
    ]
    values_of = hex_words if number % 3 == 2 else numbers
    values = values_of(rng, count, _DIGITS)
    asked = int(depth * count)
    told = "\n".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    return _item(
        "key-value",
        number,
        f"This is a list of things and their values.\n{told}",
        "Looked up in the list again:",
        f"{keys[asked]}:",
        [values[asked]],
        place={"length_tokens": float(length_tokens), "depth": depth},
    )


def _multilingual(seed: int, number: int, length_tokens: int, depth: float) -> Item:
    language = LANGUAGES[number % len(LANGUAGES)]
    words = VOCABULARIES[language]
    rng = seeded(seed, "needle", language, number)
    owner, [code] = rng.choice(words.owners), numbers(rng, 1, _DIGITS)
    fact = words.code_fact.format(owner=owner, code=code)
    told = with_facts(filler(rng, length_tokens - 30, language), [(depth, fact)], language)
    return _item(
        "multilingual",
        number,
        told,
        words.code_question.format(owner=owner),
        words.code_answer.format(owner=owner),
        [code],
        place={"length_tokens": float(length_tokens), "depth": depth},
    )


def _item(
    category: str,
    number: int,
    told: str,
    question: str,
    answer: str,
    expected: list[str],
    *,
    place: Mapping[str, float],
    about: str = "",
) -> Item:
    return Item(
        key=f"{category}-{number}-{place['length_tokens']:.0f}",
        category=category,
        prompt=f"{told}\n\n{question}\n{answer}",
        output_tokens=VALUES_OUTPUT_TOKENS if len(expected) > 1 else OUTPUT_TOKENS,
        place=place,
        about=about,
        # A chain may be followed sentence by sentence; elsewhere the next line is another answer.
        check={"expected": expected, "lines": 2 if category == "variable-tracking" else 1},
    )


def _expected(item: Item) -> list[str]:
    return list(item.check["expected"])


def _recall(item: Item, answer: Answer) -> float:
    lines = "".join(answer.texts).strip().splitlines()
    read = "\n".join(lines[: item.check["lines"]])
    expected = _expected(item)
    return sum(names(value, read) for value in expected) / len(expected)
