"""The contract of a trace format, and strict line-by-line reading for all of them.

Files are UTF-8 text, plain or gzip (told apart by content), and are never loaded whole. Arrival
times must not go backwards: a reader that streams cannot sort, and a trace that is silently out of
order would replay another load than the one it recorded.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NoReturn, cast

from kvtune.errors import BadInput, BadTrace, NotFound
from kvtune.types import Request

HEAD_BYTES = 1 << 16
MAX_RECORD_BYTES = 64 << 20
MAX_TOKENS = 100_000_000


class TraceFormat(ABC):
    """One file format of workloads."""

    name: ClassVar[str]
    title: ClassVar[str]

    @classmethod
    @abstractmethod
    def sniff(cls, path: Path, head: str) -> bool:
        """Whether a file that begins with the text `head` (up to 64 KiB) is in this format."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path, skipped: Counter[str]) -> Iterator[Request]:
        """Stream the requests in file order; the first that has an arrival time arrives at 0.

        A record that is well formed but is no request to replay is left out, and counted in
        `skipped` under the reason.

        Raises:
            BadTrace: a line that cannot be used, by number and reason.
        """


@dataclass(frozen=True, slots=True)
class Row:
    """The fields of one record and where it stands; every getter raises `BadTrace` with both."""

    path: Path
    line: int
    fields: Mapping[str, Any]

    def fail(self, reason: str, fix: str = "") -> NoReturn:
        """Refuse this record."""
        raise BadTrace(str(self.path), self.line, reason, fix)

    def get(self, key: str) -> Any:
        """The value of a field that must be there."""
        if key not in self.fields:
            self.fail(f"there is no {key!r}, only {', '.join(map(repr, self.fields)) or 'nothing'}")
        return self.fields[key]

    def whole(self, key: str, minimum: int = 0, maximum: int = MAX_TOKENS) -> int:
        """A whole number within [minimum, maximum]."""
        value = self.get(key)
        if type(value) is not int:
            self.fail(f"{key!r} must be a whole number, got {_shown(value)}")
        if not minimum <= value <= maximum:
            self.fail(f"{key!r} must be from {minimum} to {maximum}, got {_shown(value)}")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.get(key)
        if type(value) not in (int, float) or abs(value) > 1e300 or not math.isfinite(value):
            self.fail(f"{key!r} must be a finite number, got {_shown(value)}")
        return float(value)

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self.get(key)
        if not isinstance(value, str) or not value:
            self.fail(f"{key!r} must be text that is not empty, got {_shown(value)}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers from 0, possibly empty."""
        value = self.get(key)
        if not isinstance(value, list) or (value and set(map(type, value)) != {int}):
            self.fail(f"{key!r} must be a list of whole numbers, got {_shown(value)}")
        if value and min(value) < 0:
            self.fail(f"{key!r} holds a negative number: {_shown(min(value))}")
        return tuple(value)

    def blocks(self, key: str, block_tokens: int, input_tokens: int) -> tuple[int, ...]:
        """Hash ids of blocks of a prompt of `input_tokens`; the last block may be partial."""
        ids = self.ids(key)
        if (len(ids) - 1) * block_tokens >= input_tokens:
            self.fail(
                f"{key!r} names {len(ids)} blocks of {block_tokens} tokens, which is more than "
                f"a prompt of {input_tokens} tokens holds"
            )
        return ids


class Arrivals:
    """Turns a trace's clock into seconds since its first request; refuses to go backwards."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = -math.inf

    def since_first_s(self, time_s: float, row: Row) -> float:
        """Seconds from the first request to `row`, to the microsecond."""
        if time_s < self._last_s:
            row.fail(
                f"the time goes back by {self._last_s - time_s:g} s",
                "Sort the file by arrival time.",
            )
        self._last_s = time_s
        if self._first_s is None:
            self._first_s = time_s
        return round(time_s - self._first_s, 6)


def json_rows(path: Path) -> Iterator[Row]:
    """One `Row` for each line of a JSON Lines file; blank lines are passed over."""
    for line, text in numbered_lines(path):
        if text.strip():
            yield Row(path, line, _json_object(path, line, text))


def csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """One `Row` for each line of a CSV file whose header has at least `columns`.

    Fields that read as numbers are numbers.
    """
    lines = csv.reader((text for _, text in numbered_lines(path)), strict=True)
    header: list[str] | None = None
    while True:
        try:
            values = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            raise BadTrace(str(path), lines.line_num, f"this is not CSV: {error}") from None
        if not values:
            continue
        row = Row(path, lines.line_num, {})
        if header is None:
            header = [value.strip() for value in values]
            missing = [column for column in columns if column not in header]
            if missing:
                row.fail(f"the header has no column {', '.join(map(repr, missing))}")
            continue
        if len(values) != len(header):
            row.fail(f"there are {len(values)} fields, but the header has {len(header)}")
        yield Row(path, row.line, dict(zip(header, map(_csv_value, values), strict=True)))


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers, from 1."""
    with open_bytes(path) as file:
        line = 1
        while raw := _readline(file, path, line):
            if len(raw) > MAX_RECORD_BYTES:
                raise BadTrace(
                    str(path), line, f"the line is longer than {MAX_RECORD_BYTES >> 20} MiB"
                )
            try:
                text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(path, line, error) from None
            yield line, text
            line += 1


def read_head(path: Path) -> str:
    """The first 64 KiB of a text file, for `TraceFormat.sniff`."""
    with open_bytes(path) as file:
        try:
            raw = file.read(HEAD_BYTES)
        except (EOFError, OSError, zlib.error) as error:
            raise BadTrace(str(path), 1, f"the file cannot be read: {error}") from error
    if not raw:
        raise BadTrace(str(path), 1, "the file is empty")
    if b"\0" in raw:
        raise BadTrace(
            str(path), 1, "this is a binary file, or text in UTF-16", "Save it as UTF-8 text."
        )
    return raw.decode("utf-8-sig", errors="replace")


def open_bytes(path: Path) -> BinaryIO:
    """Open a plain or gzip-compressed file for reading.

    Raises:
        NotFound: there is no such file.
        BadInput: it is a directory, or may not be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}", "Check the path of the workload.") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory", "Name a workload file in it.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be opened: {error.strerror}") from error
    if file.peek(2)[:2] == b"\x1f\x8b":
        file.close()
        return cast(BinaryIO, gzip.open(path, "rb"))
    return file


def first_keys(head: str) -> frozenset[str]:
    """The keys of the JSON object that a file begins with; of one that is cut off, the first."""
    line = head.lstrip().partition("\n")[0]
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return frozenset(re.findall(r'\A\{\s*"(\w+)"\s*:', line))
    return frozenset(value) if isinstance(value, dict) else frozenset()


def first_columns(head: str) -> frozenset[str]:
    """The column names of a CSV file."""
    return frozenset(name.strip() for name in head.lstrip().partition("\n")[0].split(","))


def not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> BadTrace:
    """The error for text in another encoding."""
    return BadTrace(
        str(path), line, f"this is not UTF-8 text: {error.reason}", "Save it as UTF-8 text."
    )


def refuse_constant(name: str) -> NoReturn:
    """For `parse_constant` of a JSON decoder: NaN and infinities are not JSON."""
    raise ValueError(f"{name} is not a number")


_decode = json.JSONDecoder(parse_constant=refuse_constant).decode


def _json_object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        value = _decode(text)
    except json.JSONDecodeError as error:
        reason = f"this is not JSON: {error.msg} at column {error.colno}"
        raise BadTrace(str(path), line, reason) from None
    except (ValueError, RecursionError) as error:
        raise BadTrace(str(path), line, f"this is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadTrace(str(path), line, f"each line must be a JSON object, got {_shown(value)}")
    return value


def _csv_value(text: str) -> int | float | str:
    text = text.strip()
    if text.removeprefix("-").isdecimal() and len(text) < 20:
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _readline(file: BinaryIO, path: Path, line: int) -> bytes:
    try:
        return file.readline(MAX_RECORD_BYTES + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise BadTrace(str(path), line, f"the file cannot be read on: {error}") from error


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts
        text = "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."
