"""The checks that a user's own items may name, and what an answer is worth by them.

A check is a JSON object with one key: `{"contains": ["7194"]}`. `read_check` refuses what cannot
work before anything is asked; `worth` is pure, except that `python` runs the user's function.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtune.errors import BadInput
from kvtune.profilers.quality.instruction_checks import parse_json, words
from kvtune.profilers.quality.judge import read_judge

KINDS = ("exact", "contains", "regex", "json-schema", "python", "judge")

Checker = Callable[[str, Mapping[str, Any]], object]
"""The user's function: gets an answer and the item's line, returns whether or how far it is right.

An exception means that it is not.
"""


def read_check(value: object, reference: str | None) -> dict[str, Any]:
    """A check as `{"kind": ..., "value": ...}`; "exact" and "contains" may stand for a reference.

    Raises:
        BadInput: there is no such check, or its value cannot be used.
    """
    if value in ("exact", "contains"):
        if reference is None:
            raise BadInput(f"the check {value!r} needs a 'reference'")
        return {"kind": value, "value": reference}
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in KINDS:
        raise BadInput(
            f"'check' must be an object with one of the keys {', '.join(KINDS)}, got {value!r:.60}",
            'Write it like {"contains": "7194"}.',
        )
    [(kind, told)] = value.items()
    return {"kind": kind, "value": _READ[kind](told)}


def worth(check: Mapping[str, Any], line: Mapping[str, Any], text: str) -> tuple[float, str]:
    """What an answer is worth by a check, from 0 to 1, and why it is not worth more."""
    return _WORTH[check["kind"]](check["value"], line, text)


def token_f1(text: str, reference: str) -> float:
    """The F1 of the words that two texts share, in any case; 1 when neither has a word.

    As in SQuAD (arXiv 1606.05250), without its English rules for articles.
    """
    ours, theirs = (Counter(words(side.casefold())) for side in (text, reference))
    if not ours and not theirs:
        return 1.0
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


# --- reading


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise BadInput(f"a text that is not empty is needed, got {value!r:.60}")
    return value


def _texts(value: object) -> list[str]:
    return [_text(each) for each in value] if isinstance(value, list) and value else [_text(value)]


def _pattern(value: object) -> str:
    try:
        re.compile(pattern := _text(value))
    except re.error as error:
        raise BadInput(f"this is no regular expression: {error}") from None
    return pattern


def _schema(value: object) -> object:
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(value)
    except SchemaError as error:
        raise BadInput(f"this is no JSON schema: {error.message}") from None
    return value


def _function(value: object) -> str:
    load_function(name := _text(value))
    return name


def load_function(name: str) -> Checker:
    """The function of `module:function`; modules of the working directory come first.

    Raises:
        BadInput: it cannot be imported, or is no function.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise BadInput(f"a check in Python is named 'module:function', got {name!r}")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        # Importing runs the user's own code, which may fail in any way.
        raise BadInput(f"{module!r} cannot be imported: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise BadInput(f"{module!r} has no function {function!r}")
    checker: Checker = found
    return checker


# --- judging


def _exact(value: str, line: Mapping[str, Any], text: str) -> tuple[float, str]:
    right = text.strip() == value.strip()
    return float(right), "" if right else f"expected {value!r}"


def _contains(value: list[str] | str, line: Mapping[str, Any], text: str) -> tuple[float, str]:
    wanted = [value] if isinstance(value, str) else value
    missing = [each for each in wanted if each.casefold() not in text.casefold()]
    return 1 - len(missing) / len(wanted), ", ".join(f"no {each!r}" for each in missing)


def _regex(value: str, line: Mapping[str, Any], text: str) -> tuple[float, str]:
    found = re.search(value, text) is not None
    return float(found), "" if found else f"nothing matches {value!r}"


def _fits(value: Any, line: Mapping[str, Any], text: str) -> tuple[float, str]:
    from jsonschema import Draft202012Validator

    found = parse_json(text)
    if found is None and text.strip() != "null":
        return 0.0, "this is not JSON"
    error = next(Draft202012Validator(value).iter_errors(found), None)
    return float(error is None), "" if error is None else error.message


def _called(value: str, line: Mapping[str, Any], text: str) -> tuple[float, str]:
    try:
        found = load_function(value)(text, line)
    except Exception as error:
        # A checker that trips over an answer says that the answer is not what it should be.
        return 0.0, f"{value} raised {type(error).__name__}: {error}"
    if not isinstance(found, bool | int | float) or not 0 <= found <= 1:
        return 0.0, f"{value} returned {found!r:.40}, not a number from 0 to 1"
    return float(found), "" if found == 1 else f"{value} returned {found!r}"


_READ: Mapping[str, Callable[[object], object]] = {
    "exact": _text,
    "contains": _texts,
    "regex": _pattern,
    "json-schema": _schema,
    "python": _function,
    "judge": read_judge,
}
_WORTH: Mapping[str, Callable[[Any, Mapping[str, Any], str], tuple[float, str]]] = {
    "exact": _exact,
    "contains": _contains,
    "regex": _regex,
    "json-schema": _fits,
    "python": _called,
}
