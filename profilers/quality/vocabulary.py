"""What a language's generated texts are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words and phrases of one language that fit together in any combination.

    Phrases are complete (article, adjective and noun agree; places carry their preposition), so
    that filling a shape needs no grammar. `shapes` are sentences with the slots name, other,
    time, verb, thing, place and tail. No phrase holds a digit: numbers in a text are facts.

    `code_fact`, `code_question` and `code_answer` ask a text for a number; their slots are owner
    (one of `owners`) and, in the fact, code. `code_answer` is the beginning of the answer.

    `typical_characters` is how many characters a token holds in such texts with a tokenizer made
    mainly for English, `least_characters` what it never falls below there.
    """

    language: str
    typical_characters: float
    least_characters: float
    names: tuple[str, ...]
    times: tuple[str, ...]
    verbs: tuple[str, ...]
    things: tuple[str, ...]
    places: tuple[str, ...]
    tails: tuple[str, ...]
    shapes: tuple[str, ...]
    owners: tuple[str, ...]
    code_fact: str
    code_question: str
    code_answer: str
    joint: str = " "
