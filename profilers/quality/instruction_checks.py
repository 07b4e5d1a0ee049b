"""Whether a text follows an instruction: one pure check a kind, none asks a model.

`check("words", {"relation": "at most", "count": 20}, text)` is true or false. Where a kind is also
one of the widely used verifiable instructions of IFEval (arXiv 2311.07911), it means the same as
there, so that the two can be compared (benchmarks/instruction_agreement.py); docstrings say where
ours is stricter. Relations are "at least", "at most", "fewer than" and "exactly". An empty text
follows no instruction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtune.profilers.quality.language import detect

Parameters = Mapping[str, Any]
Check = Callable[[Parameters, str], bool]

CHECKS: dict[str, Check] = {}
"""Every kind of instruction with its check."""

_TITLES = frozenset(("mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "cf", "vs", "e.g", "i.e"))
"""What a dot behind never ends a sentence."""

_ABBREVIATIONS = frozenset(
    ("dept", "est", "inc", "ltd", "co", "etc", "fig", "approx", "u.s", "a.m", "p.m")
)
"""What a dot behind ends a sentence only before a capital letter."""

_ENDS = re.compile(r"""[.!?…]+["'”’)\]*_]*(?=\s|$)|[。！？]+[」』”]*""")
_FENCE = re.compile(r"\A```[a-zA-Z]*\s*\n?(.*?)\n?\s*```\Z", re.DOTALL)


def check(kind: str, parameters: Parameters, text: str) -> bool:
    """Whether `text` follows the instruction.

    Raises:
        KeyError: there is no such kind, or one of its parameters is missing.
    """
    return bool(text.strip()) and CHECKS[kind](parameters, text)


def _kind(name: str) -> Callable[[Check], Check]:
    def keep(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return keep


def holds(relation: str, found: int, count: int) -> bool:
    """Whether a number found is what the relation asks for.

    Raises:
        KeyError: there is no such relation.
    """
    return {
        "at least": found >= count,
        "at most": found <= count,
        "fewer than": found < count,
        "exactly": found == count,
    }[relation]


def _counted(parameters: Parameters, found: int) -> bool:
    return holds(parameters["relation"], found, parameters["count"])


# --- length


def words(text: str) -> list[str]:
    """Runs of letters and digits; "don't" is two."""
    return re.findall(r"\w+", text)


def sentences(text: str) -> list[str]:
    """Sentences by their end marks; a rest without one is a sentence too.

    A dot ends none after an abbreviation, an initial or a list number, and dots end none before a
    small letter.
    """
    found, start = [], 0
    for end in _ENDS.finditer(text):
        after = text[end.end() :].lstrip()
        if words(text[start : end.start()]) and not (
            end.group()[0] in ".…" and _goes_on(text[start : end.start()], end.group(), after)
        ):
            found.append(text[start : end.end()].strip())
            start = end.end()
    if words(text[start:]):
        found.append(text[start:].strip())
    return found


def _goes_on(before: str, mark: str, after: str) -> bool:
    """Whether a sentence goes on after a dot or dots."""
    *earlier, last = before.lower().split()
    last = last.lstrip("(\"'“")
    if last == "no":
        return after[:1].isdigit()
    if last in _ABBREVIATIONS or mark.startswith(("..", "…")):
        return after[:1].islower()
    initial = len(last) == 1 and last.isalpha() and last != "i"
    list_number = not earlier and last.isdigit()
    return last in _TITLES or initial or list_number


@_kind("words")
def _words(parameters: Parameters, text: str) -> bool:
    """`relation` `count` words."""
    return _counted(parameters, len(words(text)))


@_kind("sentences")
def _sentences(parameters: Parameters, text: str) -> bool:
    """`relation` `count` sentences."""
    return _counted(parameters, len(sentences(text)))


@_kind("paragraphs")
def _paragraphs(parameters: Parameters, text: str) -> bool:
    """`relation` `count` paragraphs, with empty lines between them."""
    return _counted(parameters, len(_blocks(text)))


def _blocks(text: str) -> list[str]:
    return [block.strip() for block in re.split(r"\n[ \t]*\n", text) if block.strip()]


@_kind("divided-paragraphs")
def _divided_paragraphs(parameters: Parameters, text: str) -> bool:
    """Exactly `count` paragraphs with `***` between them, none of them empty."""
    parts = [part.strip() for part in text.strip().split("***")]
    if parts and not parts[0]:
        parts = parts[1:]
    if parts and not parts[-1]:
        parts = parts[:-1]
    return all(parts) and len(parts) == parameters["count"]


@_kind("paragraph-start")
def _paragraph_start(parameters: Parameters, text: str) -> bool:
    """Exactly `count` paragraphs, of which number `index` (from 1) begins with `word`."""
    blocks = _blocks(text)
    if len(blocks) != parameters["count"]:
        return False
    first = re.match(r"""["']*([^\s.,?!'"]*)""", blocks[parameters["index"] - 1])
    return first is not None and first[1].lower() == parameters["word"].lower()


# --- format


@_kind("bullets")
def _bullets(parameters: Parameters, text: str) -> bool:
    """`relation` `count` lines that begin with `*` or `-`, a blank, and text.

    IFEval also counts emphasis and rules at the start of a line.
    """
    return _counted(parameters, len(re.findall(r"^[ \t]*[*-][ \t]+\S", text, re.MULTILINE)))


@_kind("numbered")
def _numbered(parameters: Parameters, text: str) -> bool:
    """`relation` `count` lines numbered 1, 2, 3, ... in this order, with `.` or `)`."""
    numbers = re.findall(r"^[ \t]*(\d+)[.)][ \t]+\S", text, re.MULTILINE)
    return [int(number) for number in numbers] == list(range(1, len(numbers) + 1)) and _counted(
        parameters, len(numbers)
    )


@_kind("sections")
def _sections(parameters: Parameters, text: str) -> bool:
    """At least `count` times `marker` with a number, such as "Section 2"."""
    found = re.findall(rf"{re.escape(parameters['marker'])}\s?\d+", text)
    return holds("at least", len(found), parameters["count"])


@_kind("title")
def _title(parameters: Parameters, text: str) -> bool:
    """A title in double angular brackets, in one line: `<<a title>>`."""
    return any(title.strip("<> ") for title in re.findall(r"<<[^\n]+?>>", text))


@_kind("highlights")
def _highlights(parameters: Parameters, text: str) -> bool:
    """At least `count` parts within a line in `*one*` or `**two**` asterisks."""
    parts = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    found = sum(bool((two or one).strip()) for two, one in parts)
    return holds("at least", found, parameters["count"])


@_kind("placeholders")
def _placeholders(parameters: Parameters, text: str) -> bool:
    """At least `count` placeholders in square brackets, such as `[name]`."""
    return holds("at least", len(re.findall(r"\[[^\]\n]*\]", text)), parameters["count"])


@_kind("postscript")
def _postscript(parameters: Parameters, text: str) -> bool:
    """A postscript that begins with `marker`, "P.S." or "P.P.S", in any case."""
    pattern = r"\s?".join(re.escape(f"{part}.") for part in parameters["marker"].split(".") if part)
    if not parameters["marker"].endswith("."):
        pattern = pattern.removesuffix(r"\.")
    return re.search(pattern, text, re.IGNORECASE) is not None


@_kind("one-of")
def _one_of(parameters: Parameters, text: str) -> bool:
    """One of `options` stands in the text, word for word."""
    return any(option in text for option in parameters["options"])


@_kind("two-answers")
def _two_answers(parameters: Parameters, text: str) -> bool:
    """Two different answers with `******` between them."""
    parts = [part.strip() for part in text.strip().split("******")]
    inner, answers = parts[1:-1], [part for part in parts if part]
    return all(inner) and len(answers) == 2 and answers[0] != answers[1]


@_kind("json")
def _json(parameters: Parameters, text: str) -> bool:
    """Nothing but one JSON object or list, perhaps in a code fence; with the keys `keys`, if given.

    IFEval also takes a bare number or string.
    """
    value = parse_json(text)
    keys: Sequence[str] = parameters.get("keys", ())
    if keys:
        return isinstance(value, dict) and set(keys) <= set(value)
    return isinstance(value, dict | list)


def parse_json(text: str) -> Any:
    """The value of a text that is nothing but JSON, perhaps in a code fence; else `None`."""
    fenced = _FENCE.match(text.strip())
    try:
        return json.loads(fenced[1] if fenced else text.strip(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


# --- words and letters


@_kind("keywords")
def _keywords(parameters: Parameters, text: str) -> bool:
    """Each of `words` is in the text, in any case, also as a part of a longer word."""
    return all(word.lower() in text.lower() for word in parameters["words"])


@_kind("keyword-count")
def _keyword_count(parameters: Parameters, text: str) -> bool:
    """`word` is there `relation` `count` times, in any case, also as a part of a longer word."""
    return _counted(parameters, text.lower().count(parameters["word"].lower()))


@_kind("forbidden-words")
def _forbidden_words(parameters: Parameters, text: str) -> bool:
    """None of `words` is there as a whole word, in any case."""
    return not any(
        re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in parameters["words"]
    )


@_kind("letter-count")
def _letter_count(parameters: Parameters, text: str) -> bool:
    """`letter` is there `relation` `count` times, in any case."""
    return _counted(parameters, text.lower().count(parameters["letter"].lower()))


@_kind("capital-words")
def _capital_words(parameters: Parameters, text: str) -> bool:
    """`relation` `count` words are all capitals; "I" is one, and so is a hyphenated word."""
    found = re.findall(r"\w[\w'’-]*", text)
    return _counted(parameters, sum(word.isupper() for word in found))


@_kind("order")
def _order(parameters: Parameters, text: str) -> bool:
    """Each of `words` is there, and each stands for the first time after the one before it."""
    places = [text.lower().find(word.lower()) for word in parameters["words"]]
    return min(places) >= 0 and places == sorted(set(places))


# --- case, punctuation, language


@_kind("upper")
def _upper(parameters: Parameters, text: str) -> bool:
    """English without a small letter."""
    return text.isupper() and detect(text) == "en"


@_kind("lower")
def _lower(parameters: Parameters, text: str) -> bool:
    """English without a capital letter."""
    return text.islower() and detect(text) == "en"


@_kind("no-commas")
def _no_commas(parameters: Parameters, text: str) -> bool:
    """No comma."""
    return "," not in text


@_kind("quoted")
def _quoted(parameters: Parameters, text: str) -> bool:
    """The whole text stands in double quotation marks."""
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


@_kind("language")
def _language(parameters: Parameters, text: str) -> bool:
    """The text is in `language`, a code of `kvtune.profilers.quality.language.LANGUAGES`."""
    return detect(text) == str(parameters["language"])


# --- start and end


@_kind("start")
def _start(parameters: Parameters, text: str) -> bool:
    """The text begins with `phrase`, in any case, perhaps after a quotation mark."""
    return text.strip().lstrip('"').lower().startswith(parameters["phrase"].lower())


@_kind("end")
def _end(parameters: Parameters, text: str) -> bool:
    """The text ends with `phrase`, in any case, perhaps before a quotation mark."""
    return text.strip().strip('"').lower().endswith(parameters["phrase"].strip().lower())


@_kind("repeat")
def _repeat(parameters: Parameters, text: str) -> bool:
    """The text begins with the whole `request`, in any case."""
    return text.strip().lower().startswith(parameters["request"].strip().lower())
