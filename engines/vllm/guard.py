"""Stand between kvtune and a server, so that nothing of the server outlives kvtune.

Run by path, under any Python: `guard.py CHANNEL_FD GRACE_S COMMAND...`. The guard leads a session
of its own (a Ctrl-C in kvtune's terminal does not reach the server), starts the command as its
child and adopts every orphan among its descendants. The channel is a socket whose other end only
kvtune holds. When that end closes, for whatever reason (a stop, an exit, kill -9), or when the
server exits, the guard ends the whole tree: SIGTERM first, SIGKILL after `GRACE_S` seconds. It
signals its own descendants and nothing else.

On the channel it writes one JSON object a line: `{"pid": N}` once the server is started,
`{"exit": N}` when the server's own process has ended (a negative number is a signal, as in
`subprocess`), and `{"left": []}` when the tree is gone, but for what even SIGKILL did not end.

Linux, standard library only, and Python 3.10: the warm parent, which runs under the engine's
interpreter, loads this file by path too and calls `supervise` after a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_KILL_LIMIT_S = 10.0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _parents() -> dict[int, int]:
    """Map every live process to its parent; zombies are left out."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            found[int(entry.name)] = int(fields[1])
    return found


def descendants() -> list[int]:
    """Live descendants of this process, in no particular order."""
    parents = _parents()
    tree = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in tree} - tree
        if not more:
            return sorted(tree - {os.getpid()})
        tree |= more


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class _Server:
    """The server process and, once it ended, how, which is told on the channel at once."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel

    def reap(self) -> bool:
        """Collect every ended child, adopted ones too; say whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                _say(self._channel, {"exit": self.returncode})

    def end(self, grace_s: float) -> None:
        """End the tree: the server by SIGTERM, then what is left, then all by SIGKILL."""
        start_s = time.monotonic()
        if self.returncode is None:
            _signal([self.pid], signal.SIGTERM)
        # Its own children get the time to leave by themselves that the server gives them.
        patience_s = grace_s / 4 if self.returncode is None else min(1.0, grace_s / 4)
        asked_all = False
        while self.reap() and (waited_s := time.monotonic() - start_s) < grace_s + _KILL_LIMIT_S:
            if waited_s > grace_s:
                _signal(descendants(), signal.SIGKILL)
            elif waited_s > patience_s and not asked_all:
                _signal(descendants(), signal.SIGTERM)
                asked_all = True
            time.sleep(_POLL_S)


def _run_child(body: Callable[[], Any], channel: socket.socket, guard_pid: int) -> None:
    """Be the server: leave the guard's group, forget its signals, and never return."""
    code = 127
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        channel.close()
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard_pid:
            return  # the guard was killed before it could be followed
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = body() or 0
    except OSError as error:
        sys.stderr.write(f"cannot start the server: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _close_all_but(keep: set[int]) -> None:
    """Close what only the server is to hold: a copy here would hide that the server let go."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a name is all that is needed
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _say(channel: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n")


def supervise(body: Callable[[], Any], channel: socket.socket, grace_s: float) -> int:
    """Run `body` as the server in a child, and see to it that it ends.

    `body` replaces the process (exec) or returns an exit code. Returns the server's exit status
    (negative: ended by that signal) when nothing of its tree is left.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: stops.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    guard_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        woken.close()
        waker.close()
        _run_child(body, channel, guard_pid)
    _close_all_but({channel.fileno(), woken.fileno(), waker.fileno()})
    server = _Server(pid, channel)
    _say(channel, {"pid": pid})
    while server.reap() and server.returncode is None and not stops:
        readable, _, _ = select.select([channel, woken], [], [])
        if channel in readable:
            break
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)
    server.end(grace_s)
    _say(channel, {"left": descendants()})
    return -signal.SIGKILL if server.returncode is None else server.returncode


def main(arguments: list[str]) -> int:
    """Guard the command in `arguments`; return its exit code as a shell would."""
    channel = socket.socket(fileno=int(arguments[0]))
    channel.set_inheritable(False)
    command = arguments[2:]
    returncode = supervise(lambda: os.execvp(command[0], command), channel, float(arguments[1]))
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
