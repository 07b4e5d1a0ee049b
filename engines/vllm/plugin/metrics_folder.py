"""Where the processes of a server leave their figures for the one that answers /metrics.

That one names a folder in its environment before it starts the others, which inherit it. The folder
is made by the first process that counts something, and goes when the one that named it ends. One
that was killed cannot remove it, so whoever makes a folder removes those that no process holds any
more.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "KVTUNE_METRICS_DIR"
SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""Set where vLLM, or whoever starts it, has prometheus_client put the files of many processes
together: several API servers then answer, and none of them started the others."""

_PREFIX = "kvtune-metrics-"
_MEMORY = Path("/dev/shm")
_held: dict[Path, int] = {}


def settle() -> Path:
    """Name a folder for the server that this process is about to start; return its path.

    Nothing is made yet.
    """
    # Memory, where there is such a file system: a disk may hold up a process that counts.
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"{_owned()}{secrets.token_hex(6)}"
    atexit.register(_remove, folder, os.getpid())
    os.environ[VARIABLE] = str(folder)
    return folder


def writing() -> Path | None:
    """The folder that this process writes to, made if need be; `None` where nobody reads.

    Raises:
        OSError: it cannot be made.
    """
    if shared := os.environ.get(SHARED):
        return Path(shared)
    if not (own := os.environ.get(VARIABLE)):
        return None
    folder = Path(own)
    if folder not in _held:
        _sweep(folder)
        _hold(folder)
    return folder


def _owned() -> str:
    """How the folders of this user begin."""
    return f"{_PREFIX}{os.getuid()}-"


def _hold(folder: Path) -> None:
    """Keep the folder from being swept while this process, or a fork of it, lives.

    A lock and not a process number, which means nothing to a server in another container.
    """
    while folder not in _held:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # swept in between
            opened = os.open(folder, os.O_RDONLY)
            fcntl.flock(opened, fcntl.LOCK_SH)
            if _is_at(folder, opened):
                _held[folder] = opened
            else:
                os.close(opened)


def _sweep(folder: Path) -> None:
    """Remove the folders of this user beside this one that no process holds."""
    for other in folder.parent.glob(f"{_owned()}*"):
        with suppress(OSError):  # it is held, or another sweeps it too
            opened = os.open(other, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)
            finally:
                os.close(opened)


def _is_at(path: Path, opened: int) -> bool:
    """Whether what is opened is still at the path."""
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except FileNotFoundError:
        return False


def _remove(folder: Path, pid: int) -> None:
    """Remove the folder when the process that named it ends, not when a fork of it does."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
