"""Texts to write about: a page on a made-up town, person, machine, animal, journey or shop.

The same random source gives the same passage. Facts, names and the order of the sentences differ
from passage to passage, so that one says nothing about another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvtune.profilers.quality.passage_words import FRAMES, NAMES, SYLLABLES, THINGS
from kvtune.profilers.quality.texts import most_tokens, seeded

SENTENCES = 31
"""Sentences of a passage: 400 to 500 tokens for common tokenizers."""

LEAST_SENTENCES = 8


@dataclass(frozen=True, slots=True)
class Passage:
    """A text about `subject`, which is a `kind` ("town").

    `lines` are its sentences, without the first, which says what the subject is. `words` are nouns
    of the whole text, the most telling first; each is one word without a capital.
    """

    kind: str
    subject: str
    text: str
    lines: tuple[str, ...]
    words: tuple[str, ...]


def passage(rng: random.Random, sentences: int = SENTENCES) -> Passage:
    """Make up a passage; fewer `sentences` make a shorter one about the same facts."""
    frame = rng.choice(FRAMES)
    subject = _name(rng) if frame.named else rng.choice(NAMES)
    people = rng.sample([name for name in NAMES if name != subject], 4)
    things = rng.sample(THINGS, 6)
    slots = {
        "subject": subject,
        **{f"person{number}": name for number, name in enumerate(people)},
        **{f"thing{number}": thing for number, thing in enumerate(things)},
    }
    lines = [
        line.format(
            **slots,
            year=rng.randint(1780, 1990),
            number=rng.randint(11, 96),
            small=rng.randint(3, 9),
        )
        for line in rng.sample(frame.lines, len(frame.lines))
    ]
    whole = " ".join(lines)
    nouns = [*frame.words, *(thing.split()[-1] for thing in things if thing in whole)]
    told = [frame.opening.format(**slots), *lines][: max(2, sentences)]
    blocks = [" ".join(told[start : start + 6]) for start in range(0, len(told), 6)]
    return Passage(
        kind=frame.kind,
        subject=subject,
        text="\n\n".join(blocks),
        lines=tuple(told[1:]),
        words=tuple(dict.fromkeys(nouns)),
    )


def fitting_passage(seed: int, number: int, room_tokens: float) -> Passage | None:
    """As much of a seed's passage of a number as surely fits; `None` when a few sentences do not.

    Suites share these passages, so a server with a prefix cache reads each of them once.
    """
    for sentences in range(SENTENCES, LEAST_SENTENCES - 1, -1):
        page = passage(seeded(seed, "passage", number), sentences)
        if most_tokens(page.text) <= room_tokens:
            return page
    return None


def page_name(number: int) -> str:
    """What items of all suites about the passage of a number are about (`Item.about`)."""
    return f"passage-{number}"


def _name(rng: random.Random) -> str:
    first, last = rng.choice(SYLLABLES[0]), rng.choice(SYLLABLES[1])
    return f"{first}{last}"
