"""Instructions with their wordings, by category, each with the parameters of its check.

Wordings were chosen so that a model of 135 million parameters follows most of them some of the
time: what is always or never followed shows no loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtune.profilers.quality.passages import Passage

DESCRIBE = "Describe {subject}."
FACTS = "List facts from the text."

STARTS = ("Dear reader", "In short", "Good news", "To begin with", "Listen", "As we know")
ENDS = ("That is all.", "The end.", "Thank you.", "Good night.", "See you soon.")
RARE_WORDS = ("umbrella", "violin", "elephant", "pepper", "window", "dream", "bridge", "summer")
SAID_IN = {
    "es": ("Describe {subject} en una frase.", "Responde en español."),
    "fr": ("Décrivez {subject} en une phrase.", "Répondez en français."),
    "de": ("Beschreibe {subject} in einem Satz.", "Antworte auf Deutsch."),
    "it": ("Descrivi {subject} in una frase.", "Rispondi in italiano."),
    "pt": ("Descreva {subject} em uma frase.", "Responda em português."),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """What is to be written, and an instruction on how, as both are said.

    `kind` and `parameters` are those of `instruction_checks.check`.
    """

    task: str
    says: str
    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


Maker = Callable[[random.Random, Passage], Rule]


def _counted(relation: str, count: int) -> Mapping[str, Any]:
    return {"relation": relation, "count": count}


def length(rng: random.Random, page: Passage) -> Rule:
    """At most so many words, or exactly one or two sentences."""
    most = rng.randint(15, 30)
    free = DESCRIBE.format(subject=page.subject)
    return rng.choice(
        [
            Rule(_one(page), f"Use at most {most} words.", "words", _counted("at most", most)),
            Rule(free, "Answer in exactly one sentence.", "sentences", _counted("exactly", 1)),
            Rule(free, "Write exactly two sentences.", "sentences", _counted("exactly", 2)),
        ]
    )


def layout(rng: random.Random, page: Passage) -> Rule:
    """Bullet points, a numbered list, or a title."""
    title = "Begin with a title in double angular brackets, such as <<my title>>."
    return rng.choice(
        [
            Rule(FACTS, 'Begin each line with "- ".', "bullets", _counted("at least", 2)),
            Rule(FACTS, "Write a numbered list.", "numbered", _counted("at least", 2)),
            Rule(_two(page), title, "title"),
        ]
    )


def only_json(rng: random.Random, page: Passage) -> Rule:
    """One JSON object and nothing else."""
    key = rng.choice(("name", "subject", "title"))
    says = f'Write only a JSON object, like {{"{key}": "...", "fact": "..."}}.'
    return Rule(DESCRIBE.format(subject=page.subject), says, "json", {"keys": [key]})


def keywords(rng: random.Random, page: Passage) -> Rule:
    """Words that have to be used."""
    words = rng.sample(page.words, 2)
    says = f'Use the words "{words[0]}" and "{words[1]}".'
    return Rule(_two(page), says, "keywords", {"words": words})


def forbidden(rng: random.Random, page: Passage) -> Rule:
    """Words that must not be used, of those that come to mind first."""
    words = [page.words[0], rng.choice(page.words[1:5])]
    says = f'Do not use the words "{words[0]}" and "{words[1]}".'
    return Rule(_two(page), says, "forbidden-words", {"words": words})


def case(rng: random.Random, page: Passage) -> Rule:
    """Only capital letters, or none."""
    return rng.choice(
        [
            Rule(_one(page).upper(), "WRITE ONLY IN CAPITAL LETTERS.", "upper"),
            Rule(_one(page).lower(), "write only in small letters.", "lower"),
        ]
    )


def punctuation(rng: random.Random, page: Passage) -> Rule:
    """No commas, or quotation marks around everything."""
    return rng.choice(
        [
            Rule(_two(page), "Do not use any commas.", "no-commas"),
            Rule(_one(page), "Put your whole answer in double quotation marks.", "quoted"),
        ]
    )


def language(rng: random.Random, page: Passage) -> Rule:
    """An answer in another language than the text's."""
    chosen = rng.choice(list(SAID_IN))
    task, says = SAID_IN[chosen]
    return Rule(task.format(subject=page.subject), says, "language", {"language": chosen})


def edges(rng: random.Random, page: Passage) -> Rule:
    """A phrase to start or to end with."""
    start, end = rng.choice(STARTS), rng.choice(ENDS)
    return rng.choice(
        [
            Rule(_two(page), f'Begin your answer with "{start}".', "start", {"phrase": start}),
            Rule(_one(page), f'End your answer with "{end}"', "end", {"phrase": end}),
        ]
    )


def counting(rng: random.Random, page: Passage) -> Rule:
    """A word to use more than once."""
    word = rng.choice(page.words[:4])
    parameters = {"word": word, **_counted("at least", 2)}
    return Rule(_two(page), f'Use the word "{word}" at least twice.', "keyword-count", parameters)


def order(rng: random.Random, page: Passage) -> Rule:
    """One thing before another."""
    words = rng.sample(page.words[:5], 2)
    says = f"Write about the {words[0]} first and then about the {words[1]}."
    return Rule(_two(page), says, "order", {"words": words})


def _one(page: Passage) -> str:
    return f"Describe {page.subject} in one sentence."


def _two(page: Passage) -> str:
    return f"Write two sentences about {page.subject}."


MAKERS: Mapping[str, Maker] = {
    "length": length,
    "format": layout,
    "json": only_json,
    "keywords": keywords,
    "forbidden": forbidden,
    "case": case,
    "punctuation": punctuation,
    "language": language,
    "start-end": edges,
    "counting": counting,
    "order": order,
}
"""A category's instructions, one at a time."""

COMBINED = (
    ("length", "punctuation"),
    ("keywords", "start-end"),
    ("forbidden", "length", "start-end"),
    ("keywords", "punctuation"),
    ("counting", "forbidden"),
)
"""Categories whose instructions can be followed together."""
