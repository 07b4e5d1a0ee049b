"""A running vLLM server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import JsonValue

from kvtune.engines.base import CannotChange, RunningServer
from kvtune.engines.vllm.effective import differences
from kvtune.engines.vllm.failures import FATAL_LINE, classify
from kvtune.engines.vllm.live import ask, changed_config, wanted_values
from kvtune.engines.vllm.log import LogTail
from kvtune.engines.vllm.process import GuardedProcess
from kvtune.engines.vllm.readiness import http_get, raise_failure
from kvtune.types import EffectiveConfig, Endpoint, Failure, FailureClass

_HEALTH_EVERY_S = 10.0
_POLL_S = 0.05
_HEALTH_LIMIT_S = 10.0
_HEALTH_TRIES = 3
_DYING_S = 2.0
"""How long a server may take from a connection that it cut to the end of its process."""


class ServerLog:
    """The log of one server: a file, followed from the start, that remembers a fatal line."""

    def __init__(self, path: Path, on_line: Callable[[str], None] | None) -> None:
        self.path = path
        self.saw_fatal_line = False
        self._on_line = on_line
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        self.tail = LogTail(path, self._take)

    def _take(self, line: str) -> None:
        self.saw_fatal_line = self.saw_fatal_line or FATAL_LINE.search(line) is not None
        if self._on_line is not None:
            self._on_line(line)

    def read(self, offset: int = 0) -> str:
        """All text from byte `offset` on."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")


class HealthWatch:
    """A thread that asks `/health` now and then and notes when the server no longer answers.

    It sees a stuck HTTP server. A stuck engine behind a live one shows in the requests themselves.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        every_s: float = _HEALTH_EVERY_S,
        limit_s: float = _HEALTH_LIMIT_S,
    ) -> None:
        self.hung = False
        self._host, self._port = host, port
        self._every_s, self._limit_s = every_s, limit_s
        self._stop = threading.Event()
        thread = threading.Thread(target=self._watch, name="kvtune-health", daemon=True)
        thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._stop.set()

    def _watch(self) -> None:
        unanswered = 0
        while not self.hung and not self._stop.wait(self._every_s):
            answered = http_get(self._host, self._port, "/health", self._limit_s) is not None
            unanswered = 0 if answered else unanswered + 1
            self.hung = unanswered >= _HEALTH_TRIES


class VllmServer(RunningServer):
    """A vLLM server that kvtune started and owns.

    `arguments` are those that it was asked to run with, `address` the host and port it listens on.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        effective: EffectiveConfig,
        start_s: float,
        warnings: tuple[str, ...],
        process: GuardedProcess,
        log: ServerLog,
        health: HealthWatch,
        address: tuple[str, int],
        arguments: Mapping[str, JsonValue],
    ) -> None:
        self.endpoint = endpoint
        self.effective = effective
        self.start_s = start_s
        self.log_path = log.path
        self.warnings = warnings
        self._process = process
        self._log = log
        self._health = health
        self._address = address
        self._arguments = dict(arguments)
        self._ready_offset = log.path.stat().st_size
        self._failure: Failure | None = None
        self._stopped = False

    def failure(self) -> Failure | None:
        """Why the server no longer serves; `None` while it does. Quick: may be asked often."""
        if self._failure is None and not self._stopped:
            returncode = self._process.poll()
            hang = "the server does not answer /health any more" if self._health.hung else None
            if returncode is not None or self._log.saw_fatal_line or hang:
                self._failure = classify(
                    self._log.read(self._ready_offset),
                    returncode=returncode,
                    phase="load",
                    hang=hang,
                )
        return self._failure

    def change(self, arguments: Mapping[str, JsonValue]) -> EffectiveConfig:
        """Make this idle server what one started with `arguments` is; see `RunningServer`."""
        wanted = wanted_values(self._arguments, arguments)
        offset = self.log_path.stat().st_size
        try:
            effective = changed_config(self.effective, wanted, ask(*self._address, wanted))
        except CannotChange:
            self._raise_if_it_dies()
            raise
        self.effective = effective
        self.warnings = differences(arguments, effective, self._log.read())
        self._ready_offset = offset
        return effective

    def _raise_if_it_dies(self) -> None:
        until_s = time.monotonic() + _DYING_S
        while (failure := self.failure()) is None and time.monotonic() < until_s:
            answer = http_get(*self._address, "/health", _DYING_S)
            if answer is not None and answer[0] == 200:
                return
            time.sleep(_POLL_S)
        if failure is not None:
            raise_failure(failure)

    def stop(self) -> None:
        """End the server and everything it started; at most about half a minute."""
        if self._stopped:
            return
        self.failure()
        self._stopped = True
        self._health.stop()
        self._process.stop()
        self._log.tail.stop()
        if self._process.leftover_pids:
            self._failure = Failure(
                failure=FailureClass.UNKNOWN,
                message=f"processes {self._process.leftover_pids} did not end, even by SIGKILL",
                fix="They wait inside the kernel, often for a device or a network disk.",
            )
