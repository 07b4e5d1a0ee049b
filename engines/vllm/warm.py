"""The near side of a warm parent: a process with vLLM imported, from which servers are forked."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtune.engines.vllm.process import GRACE_S, Channel, GuardedProcess, start_guarded

_SCRIPT = Path(__file__).with_name("warm_parent.py")
_IMPORT_LIMIT_S = 180.0
_ANSWER_LIMIT_S = 60.0


class WarmTrouble(Exception):
    """The warm parent cannot serve; a cold start can. The message says what went wrong."""


class WarmParent:
    """A pre-imported vLLM. All its servers get kvtune's environment with `added_environment`.

    Raises:
        WarmTrouble: it did not get ready.
    """

    def __init__(self, python: str, added_environment: Mapping[str, str]) -> None:
        self.added_environment = dict(added_environment)
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="kvtune-warm-"))
        self._log_path = self._folder / "parent.log"
        near, far = socket.socketpair()
        self._channel = Channel(near)
        with far:
            self._process = start_guarded(
                [python, str(_SCRIPT), str(far.fileno())],
                {**os.environ, **added_environment},
                self._log_path,
                pass_fds=(far.fileno(),),
            )
        try:
            if "ready" not in self._receive(_IMPORT_LIMIT_S):
                raise WarmTrouble(f"the warm parent answered garbage: {self._last_line()}")
        except BaseException:
            self.close()
            raise

    def serve(self, argv: Sequence[str], log_path: Path) -> GuardedProcess:
        """Fork a server with these command-line arguments, its output appended to `log_path`.

        Raises:
            WarmTrouble: it could not be forked.
        """
        near, far = socket.socketpair()
        request = {"do": "serve", "argv": list(argv), "grace_s": GRACE_S}
        with far, log_path.open("ab") as log:
            try:
                answer = self._ask(request, [log.fileno(), far.fileno()])
                guard_pid = int(answer["guard"])
            except (WarmTrouble, KeyError, TypeError, ValueError) as error:
                near.close()
                raise WarmTrouble(f"the warm parent did not fork a server: {error}") from error
        return GuardedProcess(near, guard_pid)

    def check(self, argument_lists: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Let vLLM's parser judge each list, as `argument_check.check` does.

        Raises:
            WarmTrouble: no answer.
        """
        lists = [list(arguments) for arguments in argument_lists]
        return self._ask({"do": "check", "argument_lists": lists}, [])

    def close(self) -> None:
        """End the parent and every server that is still running under it."""
        self._channel.close()
        self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        with self._lock:
            try:
                line = json.dumps(request).encode() + b"\n"
                sent = socket.send_fds(self._channel.near, [line], fds) if fds else 0
                self._channel.near.sendall(line[sent:])
            except OSError as error:
                raise WarmTrouble(f"the warm parent is gone: {self._last_line()}") from error
            return self._receive(_ANSWER_LIMIT_S)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            answer = self._channel.receive(timeout_s)
        except ValueError as error:
            raise WarmTrouble(f"the warm parent answered garbage: {error}") from error
        if answer is None:
            how = "ended" if self._channel.closed else f"did not answer within {timeout_s:.0f} s"
            raise WarmTrouble(f"the warm parent {how}: {self._last_line()}")
        if "error" in answer:
            raise WarmTrouble(str(answer["error"]))
        return answer

    def _last_line(self) -> str:
        lines = self._log_path.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it logged nothing")
