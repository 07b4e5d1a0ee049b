"""Instructions with their wordings, by category, each with the parameters of its check.

Tasks and wordings were chosen by what a model of 135 million parameters makes of them: what is
always or never followed shows no loss. What such a model does not understand by words alone is
`shown` first: the same task with an answer that follows, taken from the same text.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtune.profilers.quality.instruction_checks import check, words
from kvtune.profilers.quality.language import LANGUAGES, detect
from kvtune.profilers.quality.passages import Passage
from kvtune.profilers.quality.texts import filler

STARTS = ("Dear reader", "In short", "Good news", "To begin with", "Listen", "As we know")
ENDS = ("That is all.", "The end.", "Thank you.", "Good night.", "See you soon.")
SPOKEN = ("de", "es", "fr", "nl", "pl")
FACT = "Tell me one fact from the text."
ANOTHER = "Tell me another fact from the text."
COUNT = "Write only what is asked for."
QUOTE = "Write one sentence from the text."
QUOTED = 3
"""Sentences that are found before one is asked for."""

TELLING_LETTERS = 4
"""Words with so many letters tell one sentence from another."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A task and an instruction that was given before, and an answer that follows."""

    task: str
    says: str
    answer: str


@dataclass(frozen=True, slots=True)
class Rule:
    """What is to be written, and an instruction on how, as both are said.

    `kind` and `parameters` are those of `instruction_checks.check`. `shown` are earlier turns: each
    a task with its instruction, and an answer that follows.
    """

    task: str
    says: str
    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    shown: tuple[Shown, ...] = ()


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
    told = _telling(rng, page, says, lambda line: json.dumps({key: line}, ensure_ascii=False))
    return Rule(kind="json", parameters={"keys": [key]}, **told)


def keywords(rng: random.Random, page: Passage) -> Rule:
    """Words that have to be used; one sentence of the text has them."""
    return _quoting(rng, page, 'Use the words "{0}" and "{1}".', "keywords")


def order(rng: random.Random, page: Passage) -> Rule:
    """One word before another, as in one sentence of the text."""
    return _quoting(rng, page, 'First comes the word "{0}", later the word "{1}".', "order")


def _quoting(rng: random.Random, page: Passage, says: str, kind: str) -> Rule:
    """The sentence of the text is wanted that alone has two words, which stand side by side."""
    lines = rng.sample(page.lines, len(page.lines))
    found = ((pair, line) for line in lines if (pair := _pair(page, line)))
    asked, *before = itertools.islice(found, QUOTED + 1)
    shown = [Shown(QUOTE, says.format(*pair), line) for pair, line in before]
    return Rule(QUOTE, says.format(*asked[0]), kind, {"words": asked[0]}, tuple(shown))


def _pair(page: Passage, line: str) -> list[str] | None:
    for pair in itertools.pairwise(words(line)[1:]):
        wanted = [word.lower() for word in pair]
        if (
            min(map(len, wanted)) >= TELLING_LETTERS
            and check("order", {"words": wanted}, line)
            and sum(check("keywords", {"words": wanted}, other) for other in page.lines) == 1
        ):
            return wanted
    return None


def forbidden(rng: random.Random, page: Passage) -> Rule:
    """Words that must not be used, of those that come to mind first."""
    avoided = [page.words[0], rng.choice(page.words[1:5])]
    says = f'Do not use the words "{avoided[0]}" and "{avoided[1]}".'
    return Rule(_two(page), says, "forbidden-words", {"words": avoided})


def upper(rng: random.Random, page: Passage) -> Rule:
    """Only capital letters."""
    says = "Write ONLY IN CAPITAL LETTERS."
    return Rule(kind="upper", **_telling(rng, page, says, str.upper, times=3))


def lower(rng: random.Random, page: Passage) -> Rule:
    """No capital letters."""
    says = "write only in small letters, without capitals."
    return Rule(kind="lower", **_telling(rng, page, says, str.lower, times=3))


def no_commas(rng: random.Random, page: Passage) -> Rule:
    """No commas."""
    return Rule(_two(page), "Do not use any commas.", "no-commas")


def quoted(rng: random.Random, page: Passage) -> Rule:
    """Quotation marks around everything."""
    says = "Put your whole answer in double quotation marks."
    return Rule(kind="quoted", **_telling(rng, page, says, lambda line: f'"{line}"', times=2))


def language(rng: random.Random, page: Passage) -> Rule:
    """An answer in another language than the text's."""
    code = rng.choice(SPOKEN)
    says = f"Write it in {LANGUAGES[code]}."
    told = [line for line in filler(rng, 400, code) if detect(line) == code]
    shown = Shown("Make up a sentence.", says, told[0])
    return Rule("Make up another sentence.", says, "language", {"language": code}, (shown,))


def start(rng: random.Random, page: Passage) -> Rule:
    """A phrase to start with."""
    phrase = rng.choice(STARTS)
    return Rule(_two(page), f'Begin your answer with "{phrase}".', "start", {"phrase": phrase})


def end(rng: random.Random, page: Passage) -> Rule:
    """A phrase to end with."""
    phrase = rng.choice(ENDS)
    says = f'End your answer with "{phrase}"'
    told = _telling(rng, page, says, lambda line: f"{line} {phrase}", times=2)
    return Rule(kind="end", parameters={"phrase": phrase}, **told)


def counting(rng: random.Random, page: Passage) -> Rule:
    """A word so many times, and nothing else."""
    asked, *others = rng.sample(page.words, 4)
    count, *counts = rng.sample(range(2, 7), 4)
    says = 'Write the word "{0}" {1} times.'
    return Rule(
        COUNT,
        says.format(asked, count),
        "keyword-count",
        {"word": asked, "relation": "exactly", "count": count},
        tuple(
            Shown(COUNT, says.format(word, times), " ".join([word] * times))
            for word, times in zip(others, counts, strict=True)
        ),
    )


def _telling(
    rng: random.Random, page: Passage, says: str, follow: Callable[[str], str], times: int = 1
) -> dict[str, Any]:
    """Task, instruction and earlier turns of "tell me a fact", with answers made by `follow`."""
    lines = rng.sample(page.lines, times)
    shown = [Shown(ANOTHER if at else FACT, says, follow(line)) for at, line in enumerate(lines)]
    return {"task": ANOTHER, "says": says, "shown": tuple(shown)}


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
