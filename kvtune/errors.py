"""Every error a user can meet, each saying what happened, why, and what to do.

    KvtuneError
    ├── BadInput            wrong flag, file or value              exit code 2
    │   ├── BadTrace        a workload file, named by line
    │   └── BadGoal         a goal that cannot be parsed
    ├── NotFound            a study, trial or profile by that name exit code 2
    ├── MissingExtra        an optional dependency is absent       exit code 2
    ├── StoreError          the history cannot be read or written  exit code 3
    └── EngineError         a server failed; carries a class       exit code 3

A trial that fails is not an exception for the search: it is a stored failure class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvtune.types import FailureClass


class KvtuneError(Exception):
    """What happened (and why) in `message`, what to do in `fix`."""

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class BadInput(KvtuneError):
    """A flag, file or value that cannot be used."""


class BadTrace(BadInput):
    """A workload file that cannot be read; `line` counts from 1."""

    def __init__(self, path: str, line: int, reason: str, fix: str = "") -> None:
        super().__init__(f"{path}, line {line}: {reason}", fix)
        self.path = path
        self.line = line
        self.reason = reason


class BadGoal(BadInput):
    """A goal that cannot be parsed."""


class NotFound(KvtuneError):
    """A study, trial, profile or file that does not exist."""


class MissingExtra(KvtuneError):
    """A feature whose optional dependency is not installed."""


class StoreError(KvtuneError):
    """The history cannot be opened, read or written."""

    exit_code = 3


class EngineError(KvtuneError):
    """A server that did not start, died, hung or answered garbage.

    `log_excerpt` holds the decisive lines of its log, newest last.
    """

    exit_code = 3

    def __init__(
        self, failure: FailureClass, message: str, fix: str = "", log_excerpt: str = ""
    ) -> None:
        super().__init__(message, fix)
        self.failure = failure
        self.log_excerpt = log_excerpt
