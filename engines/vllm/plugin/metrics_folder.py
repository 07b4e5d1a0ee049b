"""Where the processes of a server leave their figures for the one that answers /metrics.

vLLM starts its processes from each other, and the environment is what they inherit: so each names
a folder for itself and its descendants below that of its parent, and reads what lies below its
own. A folder is made by the first process that counts something; a server that is asked nothing
leaves no trace. The first process removes it when it ends. One that was killed cannot, so whoever
makes a folder removes those that no process holds any more.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
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
    """Name this process's folder, for it and for all that it starts; return the path.

    Nothing is made yet. A process that no other Python process started is a server of its own,
    whatever its environment says.
    """
    outer = os.environ.get(VARIABLE)
    if outer and multiprocessing.parent_process() is not None:
        folder = Path(outer) / str(os.getpid())
    else:
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
    root = next(path for path in (folder, *folder.parents) if path.name.startswith(_PREFIX))
    if root not in _held:
        _sweep(root)
        _hold(root)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _owned() -> str:
    """How the folders of this user begin."""
    return f"{_PREFIX}{os.getuid()}-"


def _hold(root: Path) -> None:
    """Keep the folder from being swept while this process, or a fork of it, lives.

    A lock and not a process number, which means nothing to a server in another container.
    """
    while root not in _held:
        with suppress(FileNotFoundError):
            root.mkdir(mode=0o700, exist_ok=True)
            opened = os.open(root, os.O_RDONLY)
            fcntl.flock(opened, fcntl.LOCK_SH)
            if _is_at(root, opened):
                _held[root] = opened
            else:  # swept in between
                os.close(opened)


def _sweep(root: Path) -> None:
    """Remove the folders of this user beside `root` that no process holds."""
    for other in root.parent.glob(f"{_owned()}*"):
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
