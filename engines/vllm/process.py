"""A process tree that ends with kvtune: the near side of a guard's channel."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_GUARD = Path(__file__).with_name("guard.py")
_START_S = 30.0
# How much longer than its own limits kvtune waits for a guard to report that all is gone.
_MARGIN_S = 15.0

GRACE_S = 10.0
"""Seconds between asking a server to end and killing what is left of it."""


class Channel:
    """JSON messages, one a line, from the process that holds the far end of `near`."""

    def __init__(self, near: socket.socket) -> None:
        self.near = near
        self.closed = False
        self._text = b""

    def close(self) -> None:
        """Let go of the channel, which tells the far end that kvtune is done with it."""
        self.near.close()
        self.closed = True

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message; `None` when none came in time or the far end is closed.

        Raises:
            ValueError: what came is not a JSON object.
        """
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._text and not self.closed:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self.near], [], [], left_s)[0]:
                return None
            part = b""
            with contextlib.suppress(ConnectionResetError):
                part = self.near.recv(1 << 16)
            self._text += part
            self.closed = not part
        line, found, self._text = self._text.partition(b"\n")
        if not found:
            return None
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"expected a JSON object, got {line[:80]!r}")
        return message


class GuardedProcess:
    """A running command under a guard. `pid` is the command's process, `guard_pid` its guard.

    Nothing of its tree survives `stop`, or the end of kvtune.
    """

    def __init__(self, near: socket.socket, guard: subprocess.Popen[bytes] | int) -> None:
        self._channel = Channel(near)
        self._popen = None if isinstance(guard, int) else guard
        self.guard_pid = guard if isinstance(guard, int) else guard.pid
        self.leftover_pids: tuple[int, ...] = ()
        self._returncode: int | None = None
        said = self._channel.receive(_START_S) or {}
        self.pid: int | None = said.get("pid")
        if self.pid is None:
            self.stop()

    def poll(self) -> int | None:
        """Return the command's exit status (negative: a signal) once it has ended, else `None`."""
        self._listen(0.0)
        return self._returncode

    def stop(self) -> None:
        """End the tree and wait until it is gone; at most about half a minute."""
        if not self._channel.closed:
            with contextlib.suppress(OSError):
                self._channel.near.shutdown(socket.SHUT_WR)
        deadline_s = time.monotonic() + GRACE_S + _MARGIN_S
        while not self._channel.closed and time.monotonic() < deadline_s:
            self._listen(deadline_s - time.monotonic())
        if not self._channel.closed and self._popen is not None:
            self._popen.kill()
            self._listen(_MARGIN_S)
        self._channel.close()

    def _listen(self, timeout_s: float) -> None:
        """Take in what the guard has said since the last time."""
        while not self._channel.closed and (said := self._channel.receive(timeout_s)) is not None:
            self._returncode = said.get("exit", self._returncode)
            self.leftover_pids = tuple(said.get("left", self.leftover_pids))
        if self._channel.closed:
            # A guard that is gone without a word was killed itself.
            self._returncode = -signal.SIGKILL if self._returncode is None else self._returncode
            if self._popen is not None:
                self._popen.wait()


def start_guarded(
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    pass_fds: Sequence[int] = (),
) -> GuardedProcess:
    """Start `command` under a guard, its output appended to `log_path`."""
    near, far = socket.socketpair()
    with far, log_path.open("ab") as log:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD), str(far.fileno()), str(GRACE_S), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            pass_fds=(far.fileno(), *pass_fds),
            start_new_session=True,
        )
    return GuardedProcess(near, guard)
