"""The finished parts of a long measurement, each kept in a file as soon as it is done."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtune.errors import BadInput

Part = dict[str, Any]


class Log:
    """JSON lines: what was asked for, then one part a line. Parts are found by some of their keys.

    Raises:
        BadInput: the file is of something else that was asked for, or cannot be read.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self.path = path
        self.parts: list[Part] = []
        # As JSON has it: a tuple comes back as a list.
        self.asked: Part = json.loads(json.dumps(dict(asked)))
        if path.exists():
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(self.asked)

    def find(self, **wanted: Any) -> Part | None:
        """The first part that has all of this, if there is one."""
        return next(iter(self.all(**wanted)), None)

    def all(self, **wanted: Any) -> list[Part]:
        """The parts that have all of this, in the order in which they were done."""
        return [part for part in self.parts if wanted.items() <= part.items()]

    def add(self, part: Mapping[str, Any]) -> Part:
        """Keep a finished part."""
        kept: Part = json.loads(json.dumps(dict(part)))
        self._write(kept)
        self.parts.append(kept)
        return kept

    def _write(self, line: Part) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self) -> None:
        text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # A line that was being written when the machine went away.
            self.path.write_text(whole)
        try:
            asked, *self.parts = map(json.loads, whole.splitlines())
        except ValueError as error:
            raise BadInput(f"{self.path} cannot be read: {error}", "Move it away.") from error
        if asked != self.asked:
            changed = [name for name in self.asked if asked.get(name) != self.asked[name]]
            raise BadInput(
                f"{self.path} was begun with another {', '.join(changed) or 'question'}",
                "Repeat the options it was begun with, or give another --output.",
            )


def say(text: str) -> None:
    """A line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
