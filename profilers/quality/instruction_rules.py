"""Instructions with their wordings, by category, each with the parameters of its check.

Tasks and wordings were chosen by what a model of 135 million parameters makes of them: what is
always or never followed shows no loss. What such a model does not understand by words alone is
`shown` first: the same task with an answer that follows, taken from the same text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtune.profilers.quality.instruction_checks import words
from kvtune.profilers.quality.language import LANGUAGES, detect
from kvtune.profilers.quality.passages import Passage
from kvtune.profilers.quality.texts import filler

STARTS = ("Dear reader", "In short", "Good news", "To begin with", "Listen", "As we know")
ENDS = ("That is all.", "The end.", "Thank you.", "Good night.", "See you soon.")
SPOKEN = ("de", "es", "fr", "nl", "pl")
FACT = "Tell me one fact from the text."
ANOTHER = "Tell me another fact from the text."
LONG_LETTERS = 5
"""Words with so many letters carry a sentence's meaning."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is to be written, and an instruction on how, as both are said.

    `kind` and `parameters` are those of `instruction_checks.check`. With `shown`, an answer that
    follows, the instruction is given twice: first with `task` and this answer, then with `again`.
    """

    task: str
    says: str
    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    shown: str = ""
    again: str = ""


Maker = Callable[[random.Random, Passage], Rule]


def short(rng: random.Random, page: Passage) -> Rule:
    """At most so many words."""
    most = rng.randint(18, 30)
    says = f"Use at most {most} words."
    return Rule(_one(page), says, "words", {"relation": "at most", "count": most})


def one_sentence(rng: random.Random, page: Passage) -> Rule:
    """Exactly one sentence."""
    return _sentences(page, 1, "Answer in exactly one sentence.")


def two_sentences(rng: random.Random, page: Passage) -> Rule:
    """Exactly two sentences."""
    return _sentences(page, 2, "Write exactly two sentences.")


def _sentences(page: Passage, count: int, says: str) -> Rule:
    parameters = {"relation": "exactly", "count": count}
    return Rule(f"Describe {page.subject}.", says, "sentences", parameters)


def bullets(rng: random.Random, page: Passage) -> Rule:
    """A list with bullet points."""
    says = 'Write bullet points that begin with "* ", and nothing else.'
    return Rule("List facts from the text.", says, "bullets", {"relation": "at least", "count": 2})


def numbered(rng: random.Random, page: Passage) -> Rule:
    """A numbered list."""
    parameters = {"relation": "at least", "count": 2}
    return Rule("List facts from the text.", "Write a numbered list.", "numbered", parameters)


def title(rng: random.Random, page: Passage) -> Rule:
    """A title in double angular brackets."""
    says = "Begin with a title in double angular brackets, such as <<my title>>."
    return Rule(_two(page), says, "title")


def only_json(rng: random.Random, page: Passage) -> Rule:
    """One JSON object and nothing else."""
    key = rng.choice(("fact", "text", "answer"))
    says = f'Write only a JSON object with the key "{key}".'
    return _shown(
        rng, page, Rule(FACT, says, "json", {"keys": [key]}), lambda line: _as_json(key, line)
    )


def _as_json(key: str, line: str) -> str:
    return json.dumps({key: line}, ensure_ascii=False)


def keywords(rng: random.Random, page: Passage) -> Rule:
    """Words that have to be used; one sentence of the text has them."""
    first, second = _two_words(rng, page)
    says = f'Use the words "{first}" and "{second}".'
    return Rule("Write one sentence from the text.", says, "keywords", {"words": [first, second]})


def order(rng: random.Random, page: Passage) -> Rule:
    """One word before another, as in one sentence of the text."""
    first, second = _two_words(rng, page)
    says = f'First comes the word "{first}", and later the word "{second}".'
    return Rule("Write one sentence from the text.", says, "order", {"words": [first, second]})


def _two_words(rng: random.Random, page: Passage) -> tuple[str, str]:
    lines = [
        long
        for line in page.lines
        if len(long := [word for word in words(line)[1:] if len(word) >= LONG_LETTERS]) >= 2
    ]
    found = rng.choice(lines)
    at = rng.randrange(len(found) - 1)
    return found[at].lower(), found[at + 1].lower()


def forbidden(rng: random.Random, page: Passage) -> Rule:
    """Words that must not be used, of those that come to mind first."""
    avoided = [page.words[0], rng.choice(page.words[1:5])]
    says = f'Do not use the words "{avoided[0]}" and "{avoided[1]}".'
    return Rule(_two(page), says, "forbidden-words", {"words": avoided})


def upper(rng: random.Random, page: Passage) -> Rule:
    """Only capital letters."""
    return _shown(rng, page, Rule(FACT, "Write ONLY IN CAPITAL LETTERS.", "upper"), str.upper)


def lower(rng: random.Random, page: Passage) -> Rule:
    """No capital letters."""
    rule = Rule(FACT, "write only in small letters, without capitals.", "lower")
    return _shown(rng, page, rule, str.lower)


def no_commas(rng: random.Random, page: Passage) -> Rule:
    """No commas."""
    return Rule(_two(page), "Do not use any commas.", "no-commas")


def quoted(rng: random.Random, page: Passage) -> Rule:
    """Quotation marks around everything."""
    rule = Rule(FACT, "Put your whole answer in double quotation marks.", "quoted")
    return _shown(rng, page, rule, lambda line: f'"{line}"')


def language(rng: random.Random, page: Passage) -> Rule:
    """An answer in another language than the text's."""
    code = rng.choice(SPOKEN)
    return Rule(
        "Make up a sentence.",
        f"Write it in {LANGUAGES[code]}.",
        "language",
        {"language": code},
        shown=next(line for line in filler(rng, 400, code) if detect(line) == code),
        again="Make up another sentence.",
    )


def start(rng: random.Random, page: Passage) -> Rule:
    """A phrase to start with."""
    phrase = rng.choice(STARTS)
    return Rule(_two(page), f'Begin your answer with "{phrase}".', "start", {"phrase": phrase})


def end(rng: random.Random, page: Passage) -> Rule:
    """A phrase to end with."""
    phrase = rng.choice(ENDS)
    rule = Rule(FACT, f'End your answer with "{phrase}"', "end", {"phrase": phrase})
    return _shown(rng, page, rule, lambda line: f"{line} {phrase}")


def counting(rng: random.Random, page: Passage) -> Rule:
    """A word so many times, and nothing else."""
    shown, asked = rng.sample(page.words, 2)
    before, count = rng.sample(range(2, 7), 2)
    return Rule(
        f'Write the word "{shown}" {before} times.',
        "Write nothing else.",
        "keyword-count",
        {"word": asked, "relation": "exactly", "count": count},
        shown=" ".join([shown] * before),
        again=f'Write the word "{asked}" {count} times.',
    )


def _shown(rng: random.Random, page: Passage, rule: Rule, follow: Callable[[str], str]) -> Rule:
    return replace(rule, shown=follow(rng.choice(page.lines)), again=ANOTHER)


def _one(page: Passage) -> str:
    return f"Describe {page.subject} in one sentence."


def _two(page: Passage) -> str:
    return f"Write two sentences about {page.subject}."


MAKERS: Mapping[str, tuple[Maker, ...]] = {
    "length": (short, one_sentence, two_sentences),
    "format": (bullets, numbered, title),
    "json": (only_json,),
    "keywords": (keywords,),
    "forbidden": (forbidden,),
    "case": (upper, lower),
    "punctuation": (no_commas, quoted),
    "language": (language,),
    "start-end": (start, end),
    "counting": (counting,),
    "order": (order,),
}
"""A category's instructions, taken in turn."""

COMBINED: tuple[tuple[Maker, ...], ...] = (
    (no_commas, start),
    (forbidden, start),
    (no_commas, forbidden),
    (forbidden, no_commas, start),
)
"""Instructions that can be followed together; the first one's task is asked for."""

IN_SYSTEM: tuple[Maker, ...] = (no_commas, upper, one_sentence, quoted, start, end)
"""Instructions that are given in the system prompt, in turn."""
