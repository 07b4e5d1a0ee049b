"""How often our checks of instructions agree with a public checker's, on random answers.

    python benchmarks/instruction_agreement.py --answers 200

The public checker is that of IFEval (arXiv 2311.07911), as `instruction_following_eval` or in
lm-evaluation-harness; one of them has to be importable, with nltk's `punkt_tab` data. Each of its
25 types is asked about so many answers, with parameters drawn at the border where an answer just
follows or just does not. Answers are made of generated texts in several languages and of the
layouts that the types are about. Given are the agreeing answers of each type, how many follow by
each side, and with `--show` the answers that the two see differently. The public checker knows
fewer languages than the answers are in, so some of them are never what is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from kvtune.profilers.quality.instruction_checks import CHECKS, sentences, words
from kvtune.profilers.quality.language import detect
from kvtune.profilers.quality.passages import Passage, passage
from kvtune.profilers.quality.texts import filler, seeded

PUBLIC = (
    "instruction_following_eval.instructions_registry",
    "lm_eval.tasks.ifeval.instructions_registry",
)
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
ENDS = ("Any other questions?", "Is there anything else I can help with?")
REQUEST = "Tell me about the text."
ASKED_FOR = ("de", "en", "es", "fr")
LANGUAGES = ("de", "fr", "es", "nl", "pl", "zh")
Arguments = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Parameters of one instruction, for our check and for the public one."""


def answer(rng: Random, page: Passage) -> str:
    """A text that a model could have written, with layouts and slips of every type."""
    if rng.random() < 0.08:
        return json_answer(rng, page)
    language = rng.choice(LANGUAGES) if rng.random() < 0.15 else "en"
    told = filler(rng, 120, language) if language != "en" else page.text.replace("\n\n", " ")
    lines = told if isinstance(told, list) else [f"{line}." for line in told[:-1].split(". ")]
    blocks = [
        block(rng, rng.sample(lines, min(len(lines), rng.randint(1, 4))), number)
        for number in range(1, rng.randint(2, 5))
    ]
    text = rng.choice(("\n\n", "\n\n", "\n", "\n***\n", "\n\n***\n\n", "\n******\n")).join(blocks)
    if rng.random() < 0.15:
        text = rng.choice((f"<<About {page.subject}>>\n", "<< >>\n", "<<a\nb>>\n")) + text
    if rng.random() < 0.12:
        text = rng.choice((REQUEST, REQUEST.upper(), REQUEST[:-3])) + "\n" + text
    if rng.random() < 0.12:
        text += rng.choice(("\n\nP.S. ", "\n\nP.P.S ", "\n\np.s. ", "\nPS ")) + rng.choice(lines)
    if rng.random() < 0.2:
        text += "\n" + rng.choice((*OPTIONS, *ENDS, ENDS[0].lower(), OPTIONS[0].lower()))
    text = rng.choice((str, str, str, str, str.upper, str.lower))(text)
    if rng.random() < 0.15:
        text = rng.choice((f'"{text}"', f'"{text}', f'"{text}" '))
    return text.replace(",", "") if rng.random() < 0.3 else text


def block(rng: Random, lines: list[str], number: int) -> str:
    """A paragraph, list, or section."""
    if rng.random() < 0.2:
        word = rng.choice(lines[0].split())
        mark = rng.choice((f"*{word}*", f"**{word}**", word.upper(), f"[{word}]"))
        lines = [lines[0].replace(word, mark, 1), *lines[1:]]
    layout = rng.choice(("prose", "prose", "prose", "* ", "- ", "numbers", "section"))
    if layout == "prose":
        return " ".join(lines)
    if layout == "numbers":
        return "\n".join(f"{at}. {line}" for at, line in enumerate(lines, 1))
    if layout == "section":
        return f"{rng.choice(('Section', 'SECTION'))} {number}\n" + " ".join(lines)
    return "\n".join(layout + line for line in lines)


def json_answer(rng: Random, page: Passage) -> str:
    """JSON, with and without a fence, and nearly JSON."""
    text = json.dumps({"name": page.subject, "words": page.words[:3]})
    return rng.choice(
        (text, f"```json\n{text}\n```", f"```\n{text}\n```", f"Here: {text}", text[:-1])
    )


def near(rng: Random, found: int) -> int:
    """A number at the border of what was found."""
    return max(1, found + rng.choice((-1, 0, 0, 1)))


def exact(count: int) -> Mapping[str, Any]:
    """The public checker's exact counts."""
    return {"relation": "exactly", "count": count}


def draw(kind: str, rng: Random, text: str, page: Passage) -> Arguments:
    """Parameters of our kind for both sides."""
    used = rng.choice(words(text) or ["word"]).lower()
    letter = rng.choice("abcdeghiklmnorstuwz")
    blocks = [part for part in text.split("\n\n") if part.strip()]
    counts: dict[str, tuple[int, tuple[str, str], dict[str, Any]]] = {
        "words": (len(words(text)), ("relation", "num_words"), {}),
        "sentences": (len(sentences(text)), ("relation", "num_sentences"), {}),
        "keyword-count": (text.lower().count(used), ("relation", "frequency"), {"word": used}),
        "letter-count": (
            text.lower().count(letter),
            ("let_relation", "let_frequency"),
            {"letter": letter},
        ),
        "capital-words": (
            sum(word.isupper() for word in text.split()),
            ("capital_relation", "capital_frequency"),
            {},
        ),
    }
    if kind in counts:
        found, names, fixed = counts[kind]
        count = near(rng, found)
        ours, theirs = rng.choice((("at least", "at least"), ("fewer than", "less than")))
        renamed = {{"word": "keyword"}.get(name, name): value for name, value in fixed.items()}
        return (
            {"relation": ours, "count": count, **fixed},
            {names[0]: theirs, names[1]: count, **renamed},
        )
    count = rng.randint(1, 3)
    pair = [used, rng.choice([*page.words, used])]
    first = rng.choice([(part.split() or ["the"])[0] for part in blocks] or ["the"]).lower()
    index = rng.randint(1, max(1, len(blocks)))
    spoken = detect(text)
    language = rng.choice([spoken if spoken in ASKED_FOR else "en", "de"])
    forbidden = rng.sample(page.words, 2)
    bullets = near(rng, text.count("\n* ") + text.count("\n- "))
    parts = near(rng, text.count("***") + 1)
    marker = rng.choice(("Section", "SECTION"))
    postscript = rng.choice(("P.S.", "P.P.S"))
    end = rng.choice(ENDS)
    others: dict[str, Arguments] = {
        "keywords": ({"words": pair}, {"keywords": pair}),
        "forbidden-words": ({"words": forbidden}, {"forbidden_words": forbidden}),
        "language": ({"language": language}, {"language": language}),
        "divided-paragraphs": ({"count": parts}, {"num_paragraphs": parts}),
        "paragraph-start": (
            {"count": len(blocks), "index": index, "word": first},
            {"num_paragraphs": len(blocks), "nth_paragraph": index, "first_word": first},
        ),
        "placeholders": ({"count": count}, {"num_placeholders": count}),
        "postscript": ({"marker": postscript}, {"postscript_marker": postscript}),
        "bullets": (exact(bullets), {"num_bullets": bullets}),
        "one-of": ({"options": OPTIONS}, {}),
        "highlights": ({"count": count}, {"num_highlights": count}),
        "sections": (
            {"marker": marker, "count": count},
            {"section_spliter": marker, "num_sections": count},
        ),
        "repeat": ({"request": REQUEST}, {"prompt_to_repeat": REQUEST}),
        "end": ({"phrase": end}, {"end_phrase": end}),
    }
    return others.get(kind, ({}, {}))


TYPES = {
    "keywords": "keywords:existence",
    "keyword-count": "keywords:frequency",
    "forbidden-words": "keywords:forbidden_words",
    "letter-count": "keywords:letter_frequency",
    "language": "language:response_language",
    "sentences": "length_constraints:number_sentences",
    "divided-paragraphs": "length_constraints:number_paragraphs",
    "words": "length_constraints:number_words",
    "paragraph-start": "length_constraints:nth_paragraph_first_word",
    "placeholders": "detectable_content:number_placeholders",
    "postscript": "detectable_content:postscript",
    "bullets": "detectable_format:number_bullet_lists",
    "one-of": "detectable_format:constrained_response",
    "highlights": "detectable_format:number_highlighted_sections",
    "sections": "detectable_format:multiple_sections",
    "json": "detectable_format:json_format",
    "title": "detectable_format:title",
    "two-answers": "combination:two_responses",
    "repeat": "combination:repeat_prompt",
    "end": "startend:end_checker",
    "quoted": "startend:quotation",
    "capital-words": "change_case:capital_word_frequency",
    "upper": "change_case:english_capital",
    "lower": "change_case:english_lowercase",
    "no-commas": "punctuation:no_comma",
}
"""Our kinds and the public checker's."""


def public_checks() -> Mapping[str, Any]:
    """The public checker's classes by name; exits when there is none."""
    for name in PUBLIC:
        try:
            found = importlib.import_module(name).INSTRUCTION_DICT
        except ImportError:
            continue
        # Its language detector draws samples; a fixed seed makes it repeatable.
        importlib.import_module("langdetect").DetectorFactory.seed = 0
        print(f"public checker: {name}")
        return dict(found)
    sys.exit(f"install a public checker first: none of {', '.join(PUBLIC)} can be imported")


def main() -> None:
    """Compare and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print what the two see differently")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    public = public_checks()
    figures: dict[str, dict[str, int]] = {}
    print(f"{'kind':20}{'agree':>8}{'ours':>8}{'public':>8}   of {asked.answers} answers")
    for kind, name in TYPES.items():
        agree = mine = other = 0
        for number in range(asked.answers):
            rng = seeded(asked.seed, "agreement", kind, number)
            page = passage(rng)
            text = answer(rng, page)
            ours, theirs = draw(kind, rng, text, page)
            checker = public[name](name)
            checker.build_description(**theirs)
            left, right = CHECKS[kind](ours, text), bool(checker.check_following(text))
            agree, mine, other = agree + (left == right), mine + left, other + right
            if asked.show and left != right:
                print(f"  {kind} {ours}: ours {left}, public {right}: {text[:400]!r}")
        figures[kind] = {"agree": agree, "ours": mine, "public": other}
        print(f"{kind:20}{agree:8}{mine:8}{other:8}")
    total = sum(each["agree"] for each in figures.values())
    print(f"{'all':20}{total / (len(TYPES) * asked.answers):8.2%}")
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
