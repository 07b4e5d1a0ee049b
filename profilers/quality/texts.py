"""Generated texts for quality suites: filler in several languages, numbers, coined words.

All of it is drawn from a `random.Random` that the caller seeds, so an item is the same wherever it
is asked. Filler holds no digits and no word that a suite asks about, so whatever a model gets
right it read in the fact and nowhere else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from random import Random

from kvtune.profilers.quality.vocabulary import Vocabulary
from kvtune.profilers.quality.vocabulary_english import ENGLISH
from kvtune.profilers.quality.vocabulary_languages import OTHERS

VOCABULARIES = {vocabulary.language: vocabulary for vocabulary in (ENGLISH, *OTHERS)}

_WORDS = frozenset(
    word.lower()
    for words in VOCABULARIES.values()
    for phrases in (words.names, words.things, words.places, words.tails, words.verbs)
    for phrase in phrases
    for word in phrase.split()
)
_ONSETS = ("b", "br", "d", "dr", "f", "g", "gl", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("l", "m", "n", "r", "s", "x")


def seeded(*parts: object) -> Random:
    """A generator of its own for whatever `parts` name: a seed, a suite, an item's number."""
    return Random("/".join(str(part) for part in parts))


def most_tokens(text: str, language: str = "en") -> int:
    """No fewer tokens than `text` has with common tokenizers; a third too many is usual."""
    return math.ceil(len(text) / VOCABULARIES[language].least_characters)


def most_tokens_of_any(text: str) -> int:
    """No fewer tokens than a text in any script has with common tokenizers.

    Where a tokenizer has not learned a script, each byte of it is a token.
    """
    learned = len(text.encode("ascii", "ignore"))
    others = len(text.encode(errors="replace")) - learned
    return math.ceil(learned / ENGLISH.least_characters) + others


def most_tokens_of(length_tokens: int, language: str = "en") -> int:
    """No fewer tokens than filler that is asked to have `length_tokens` may turn out to have."""
    words = VOCABULARIES[language]
    return math.ceil(length_tokens * words.typical_characters / words.least_characters)


def filler(rng: Random, length_tokens: int, language: str = "en") -> list[str]:
    """Different sentences of about `length_tokens` tokens together, never more characters.

    Tokens are estimated by the language's typical characters a token, so another tokenizer makes
    the text somewhat shorter or longer; `most_tokens_of` bounds that.
    """
    words = VOCABULARIES[language]
    room = length_tokens * words.typical_characters
    sentences: list[str] = []
    seen: set[str] = set()
    while True:
        sentence = _sentence(rng, words)
        room -= len(sentence) + len(words.joint)
        if room < 0:
            return sentences
        if sentence in seen:
            room += len(sentence) + len(words.joint)
            continue
        seen.add(sentence)
        sentences.append(sentence)


def with_facts(
    sentences: Sequence[str], facts: Iterable[tuple[float, str]], language: str = "en"
) -> str:
    """The text of `sentences` with each fact at its depth: 0 is the start, 1 the end.

    Facts of the same place keep their order.
    """
    placed = sorted(facts, key=lambda fact: fact[0])
    told: list[str] = []
    for index in range(len(sentences) + 1):
        while placed and round(placed[0][0] * len(sentences)) <= index:
            told.append(placed.pop(0)[1])
        if index < len(sentences):
            told.append(sentences[index])
    return VOCABULARIES[language].joint.join(told)


def numbers(rng: Random, count: int, digits: int) -> list[str]:
    """Different numbers of exactly `digits` digits, the first never 0."""
    lowest = 10 ** (digits - 1)
    return [str(number) for number in rng.sample(range(lowest, 10 * lowest), count)]


def coined_words(rng: Random, count: int, syllables: int = 2) -> list[str]:
    """Different words that no vocabulary has, to be read and not guessed."""
    found: dict[str, None] = {}
    while len(found) < count:
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables))
        word += rng.choice(_CODAS)
        if word not in _WORDS:
            found[word] = None
    return list(found)


def hex_words(rng: Random, count: int, digits: int = 6) -> list[str]:
    """Different hexadecimal numbers of exactly `digits` digits, leading zeros kept."""
    return [f"{number:0{digits}x}" for number in rng.sample(range(16**digits), count)]


def names(value: str, text: str) -> bool:
    """Whether a text holds a value as a word of its own, in any case.

    A number inside a longer one does not count; a word before or behind Chinese characters does.
    """
    edge = r"[0-9a-zA-Z]"
    return re.search(rf"(?<!{edge}){re.escape(value)}(?!{edge})", text, re.IGNORECASE) is not None


def _sentence(rng: Random, words: Vocabulary) -> str:
    name, other = rng.sample(words.names, 2)
    sentence = rng.choice(words.shapes).format(
        name=name,
        other=other,
        time=rng.choice(words.times),
        verb=rng.choice(words.verbs),
        thing=rng.choice(words.things),
        place=rng.choice(words.places),
        tail=rng.choice(words.tails),
    )
    return sentence[0].upper() + sentence[1:]
