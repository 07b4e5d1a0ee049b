"""Which options the installed vLLM knows, and what its parser says against a command line."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from kvtune.engines.vllm.arguments import normal_name, to_argv
from kvtune.engines.vllm.environment import Installation
from kvtune.errors import EngineError
from kvtune.types import EngineInfo, FailureClass

_SCRIPT = Path(__file__).with_name("argument_check.py")
_CHECK_LIMIT_S = 120.0
_PROBLEM_LIMIT = 500

RESERVED = frozenset({"model", "served-model-name", "host", "port", "uds"})
"""Options that kvtune sets itself."""

Checker = Callable[[Sequence[Sequence[str]]], dict[str, Any]]
"""Asks the parser about argument lists; the answer is that of `argument_check.check`."""


def check_in_subprocess(installation: Installation, lists: Sequence[Sequence[str]]) -> Any:
    """Run the parser in a fresh interpreter of the engine, which takes some seconds.

    Raises:
        EngineError: `ENGINE_MISSING`; that vLLM cannot be imported.
    """
    try:
        answer = subprocess.run(
            [installation.python, str(_SCRIPT)],
            input=json.dumps([list(arguments) for arguments in lists]),
            capture_output=True,
            text=True,
            timeout=_CHECK_LIMIT_S,
            check=True,
        )
        return json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise EngineError(
            FailureClass.ENGINE_MISSING,
            f"vLLM's argument parser does not run under {installation.python}: "
            f"{said.strip().splitlines()[-1]}",
            "Start vLLM by hand in that environment to see what is wrong with it.",
        ) from error


class OptionCheck:
    """Checks arguments, remembering what was asked and, on disk, which options there are."""

    def __init__(self, info: EngineInfo, ask: Checker) -> None:
        self._ask = ask
        self._options: frozenset[str] = frozenset()
        self._said: dict[tuple[str, ...], str | None] = {}
        self._cache_path = _cache_folder() / f"{info.distribution}-{info.version}-options.json"

    def known_options(self) -> frozenset[str]:
        """Every long option of the parser, without dashes, `no-` forms included."""
        if not self._options:
            with contextlib.suppress(OSError, ValueError):
                self._options = frozenset(json.loads(self._cache_path.read_text()))
        if not self._options:
            self._run([])
        return self._options

    def check_many(
        self, candidates: Sequence[Mapping[str, JsonValue]], model: str
    ) -> list[tuple[str, ...]]:
        """Return the problems of each candidate, in order; one parser run serves all."""
        found = [self._bad_names(arguments) for arguments in candidates]
        argvs = [("--model", model, *to_argv(arguments)) for arguments in candidates]
        self._run(
            [
                argv
                for argv, bad in zip(argvs, found, strict=True)
                if not bad and argv not in self._said
            ]
        )
        return [
            bad or tuple(filter(None, [self._said[argv]]))
            for argv, bad in zip(argvs, found, strict=True)
        ]

    def _bad_names(self, arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
        """Names the parser does not have: it would take an unambiguous prefix for the option."""
        known = self.known_options()
        problems = []
        for name in map(normal_name, arguments):
            if name in RESERVED:
                problems.append(f"--{name} is set by kvtune itself")
            elif (option := name.partition(".")[0]) not in known:
                near = difflib.get_close_matches(option, known, n=1)
                hint = f"; did you mean --{near[0]}?" if near else ""
                problems.append(f"--{option} is not an option of this vLLM{hint}")
        return tuple(problems)

    def _run(self, argvs: Sequence[tuple[str, ...]]) -> None:
        if self._options and not argvs:
            return
        answer = self._ask(argvs)
        self._options = frozenset(option.removeprefix("--") for option in answer["options"])
        self._said.update(zip(argvs, map(_on_one_line, answer["problems"]), strict=True))
        # The cache only saves time, so a folder that cannot be written to is no error.
        with contextlib.suppress(OSError):
            self._cache_path.parent.mkdir(parents=True, exist_ok=True)
            self._cache_path.write_text(json.dumps(sorted(self._options)))


def _on_one_line(problem: str | None) -> str | None:
    """A parser message without line breaks and without pydantic's dump of the input."""
    if problem is None:
        return None
    return " ".join(problem.partition(" [type=")[0].split())[:_PROBLEM_LIMIT]


def _cache_folder() -> Path:
    if home := os.environ.get("KVTUNE_HOME"):
        return Path(home) / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtune"
