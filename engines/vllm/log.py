"""Follow the log file of a server while it is written."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

_POLL_S = 0.1
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def plain(text: str) -> str:
    """Return `text` without terminal escapes, and with what a carriage return overwrote removed."""
    return "\n".join(line.rpartition("\r")[2] for line in _ESCAPES.sub("", text).split("\n"))


class LogTail:
    """A thread that hands on every line of a growing file, and notes when the last one came."""

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self.last_line_s = time.monotonic()
        self.last_line = ""
        self._path = path
        self._on_line = on_line
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvtune-log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Hand on what is left in the file and end the thread."""
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        rest = ""
        with self._path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            while True:
                last_round = self._stop.is_set()
                *lines, rest = (rest + file.read()).split("\n")
                for line in lines:
                    self._take(line)
                if last_round:
                    if rest:
                        self._take(rest)
                    return
                self._stop.wait(_POLL_S)

    def _take(self, line: str) -> None:
        self.last_line_s = time.monotonic()
        self.last_line = plain(line) or self.last_line
        self._on_line(plain(line))
