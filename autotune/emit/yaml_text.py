"""YAML with comments, in a form that YAML 1.1 and 1.2 readers understand alike.

PyYAML cannot write comments, and leaves strings bare that other readers take for numbers (`0o17`).
Here only plain words stay bare; every other string is quoted, in ASCII.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PLAIN = re.compile(r"(--|/)?[A-Za-z][A-Za-z0-9_./-]*")
_VERBATIM = re.compile(r"[ -&(-~]*[\"\\][ -&(-~]*")
# A longer key needs the form with a question mark.
_LONGEST_KEY = 1000
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


@dataclass(frozen=True, slots=True)
class Noted:
    """A value of a mapping or a sequence, with the comment lines (`# ...`) that stand above it."""

    value: Any
    lines: Sequence[str]


def scalar(value: Any) -> str:
    """One JSON scalar on one line."""
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        return _number(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    if _VERBATIM.fullmatch(text):
        return f"'{text}'"
    return '"' + "".join(_escape(char) for char in text) + '"'


def to_yaml(node: Mapping[str, Any]) -> list[str]:
    """The lines of a block mapping; nested values are JSON values or `Noted` ones."""
    lines: list[str] = []
    for key, entry in node.items():
        value = entry.value if isinstance(entry, Noted) else entry
        lines += entry.lines if isinstance(entry, Noted) else ()
        name = scalar(key)
        if len(name) > _LONGEST_KEY:
            lines.append(f"? {name}")
            name = ""
        lines += _attach(f"{name}:", value)
    return lines


def _attach(label: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [label, *_indented(to_yaml(value))]
    if isinstance(value, list | tuple) and value:
        return [label, *_indented(_items(value))]
    return [f"{label} {_leaf(value)}"]


def _items(values: Sequence[Any]) -> list[str]:
    lines: list[str] = []
    for entry in values:
        value = entry.value if isinstance(entry, Noted) else entry
        lines += entry.lines if isinstance(entry, Noted) else ()
        if isinstance(value, Mapping) and value:
            body = _indented(to_yaml(value))
        elif isinstance(value, list | tuple) and value:
            body = _indented(_items(value))
        else:
            body = [f"  {_leaf(value)}"]
        lines += ["- " + body[0][2:], *body[1:]]
    return lines


def _leaf(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    return "[]" if isinstance(value, list | tuple) else scalar(value)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    # YAML 1.1 reads an exponent without a point as a string.
    text = repr(value)
    return text if "." in text or "e" not in text else text.replace("e", ".0e")


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    code = ord(char)
    if 0x20 <= code < 0x7F:
        return char
    if code <= 0xFF:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"
