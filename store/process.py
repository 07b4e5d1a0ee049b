"""Which process began an attempt, and whether it still lives."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """The name of this host."""
    return socket.gethostname()


def own_pid() -> int:
    """The id of this process."""
    return os.getpid()


def process_identity(pid: int) -> str | None:
    """What tells a process from a later one with the same id; None when none lives by that id.

    On Linux this is the boot and the clock ticks from boot to the start of the process, which,
    unlike a start time, no change of the clock moves.
    """
    if _BOOT_ID.exists():
        return _linux_identity(pid)
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


def _linux_identity(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return None
    # The command, second in the line, may hold spaces and brackets: count from its last bracket.
    fields = stat.rpartition(")")[2].split()
    state, start_ticks = fields[0], fields[19]
    return None if state in "ZX" else f"{boot}:{start_ticks}"
