"""ShareGPT conversations: one JSON list, read element by element.

The list is usually one long line of hundreds of megabytes, so a window of text slides over the
file: it grows only until the next element is complete.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from kvtune.errors import BadTrace
from kvtune.profilers.traces.base import (
    MAX_RECORD_BYTES,
    Row,
    TraceFormat,
    not_utf8,
    open_bytes,
    refuse_constant,
)
from kvtune.types import Request

WINDOW_CHARACTERS = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bard", "bing"), "assistant"),
    "system": "system",
}


class ShareGpt(TraceFormat):
    """A list of `{"id", "conversations": [{"from": "human"|"gpt", "value"}]}`.

    The first human turn of each conversation is a prompt. How long the answer was in tokens is not
    recorded. Conversations without a human turn are skipped and counted.
    """

    name = "sharegpt"
    title = "ShareGPT JSON, the first turn of each conversation"

    @classmethod
    def sniff(cls, path: Path, head: str) -> bool:
        """Whether the file is a list whose beginning mentions conversations."""
        return head.lstrip().startswith("[") and '"conversations"' in head

    @classmethod
    def read(cls, path: Path, skipped: Counter[str]) -> Iterator[Request]:
        """Stream one request for each conversation."""
        for row in _list_rows(path):
            prompt = next((m["content"] for m in _messages(row) if m["role"] == "user"), None)
            if prompt is None:
                skipped["conversations without a human turn"] += 1
            else:
                yield Request(prompt=prompt)


class ShareGptTurns(TraceFormat):
    """The same file, with one request for each human turn that carries the history before it.

    Not recognised by itself: both readings fit the same file, so this one is asked for by name.
    """

    name = "sharegpt_turns"
    title = "ShareGPT JSON, every turn with its history"

    @classmethod
    def sniff(cls, path: Path, head: str) -> bool:
        """Never recognised."""
        return False

    @classmethod
    def read(cls, path: Path, skipped: Counter[str]) -> Iterator[Request]:
        """Stream the turns of one conversation after the other."""
        for number, row in enumerate(_list_rows(path)):
            messages = _messages(row)
            turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
            if not turns:
                skipped["conversations without a human turn"] += 1
            for turn in turns:
                yield Request(
                    messages=tuple(messages[: turn + 1]),
                    conversation=str(row.fields.get("id", number)),
                )


def _messages(row: Row) -> list[dict[str, str]]:
    turns = row.get("conversations")
    if not isinstance(turns, list):
        row.fail("'conversations' must be a list")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            row.fail("each of 'conversations' must be an object with 'from' and a text 'value'")
        speaker = str(turn.get("from"))
        role = ROLES.get(speaker)
        if role is None:
            row.fail(f"a turn is from {speaker!r}, which is none of {', '.join(ROLES)}")
        if turn["value"]:
            messages.append({"role": role, "content": turn["value"]})
    return messages


def _list_rows(path: Path) -> Iterator[Row]:
    """One `Row` for each object of a JSON list."""
    with open_bytes(path) as file:
        window = _Window(path, file)
        window.expect("[")
        while window.peek() != "]":
            line = window.line
            value = window.value()
            if not isinstance(value, dict):
                window.fail(f"each element must be an object, got {str(value)[:60]}")
            yield Row(path, line, value)
            if window.peek() != "]":
                window.expect(",")
        window.expect("]")
        if window.peek():
            window.fail("there is text after the end of the list")


class _Window:
    """The part of a file's text that is read and not yet decoded; `line` is where it begins."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.line = 1
        self._path = path
        self._file = io.TextIOWrapper(file, encoding="utf-8-sig")
        self._text = ""
        self._at = 0
        self._decoder = json.JSONDecoder(parse_constant=refuse_constant)

    def fail(self, reason: str) -> NoReturn:
        """Refuse what comes next."""
        raise BadTrace(str(self._path), self.line, reason)

    def peek(self) -> str:
        """The next character that is not white space; nothing at the end of the file."""
        while True:
            self._advance(_SPACE.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._grow():
                return ""

    def expect(self, character: str) -> None:
        """Pass over one character that must be there."""
        found = self.peek()
        if found != character:
            self.fail(
                f"expected {character!r}, found {found!r}" if found else "the list is cut off"
            )
        self._advance(self._at + 1)

    def value(self) -> Any:
        """Decode the next JSON value."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._may_be_cut(error) or not self._grow():
                    self.line += self._text.count("\n", self._at, error.pos)
                    self.fail(f"this is not JSON: {error.msg}")
            except (ValueError, RecursionError) as error:
                self.fail(f"this is not JSON: {error}")
            else:
                self._advance(end)
                return value

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        # An open string is reported where it begins, anything else that is cut off at its end.
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - 16

    def _advance(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _grow(self) -> bool:
        rest = self._text[self._at :]
        if len(rest) > MAX_RECORD_BYTES:
            self.fail(f"an element is longer than {MAX_RECORD_BYTES >> 20} MiB")
        try:
            # Doubling keeps the repeated decoding of one long element linear in its length.
            more = self._file.read(max(WINDOW_CHARACTERS, len(rest)))
        except UnicodeDecodeError as error:
            raise not_utf8(self._path, self.line + rest.count("\n"), error) from None
        except (EOFError, OSError, zlib.error) as error:
            self.fail(f"the file cannot be read on: {error}")
        self._text, self._at = rest + more, 0
        return bool(more)
