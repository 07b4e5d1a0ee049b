"""How much memory a server can still take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtune.errors import BadInput


@dataclass(frozen=True, slots=True)
class _Controller:
    """Where a version of cgroups says what a group may take, and how it names that."""

    folder: str
    limit: str
    used: str
    droppable: str


# By what /proc/self/cgroup says of the controllers of a line: version 2 and version 1.
_CONTROLLERS = {
    "": _Controller("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": _Controller(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


def available_bytes(root: Path = Path("/")) -> int:
    """What this process can still take before it is killed for it, or others are pushed out.

    That is what the machine has left, or its container: of each control group that the process is
    in, the limit less what is used, but for cached files, which give way.
    """
    import psutil

    left = [int(psutil.virtual_memory().available)]
    for controller, folder in _groups(root):
        # It has no limit, says "max", or is outside of what a container sees.
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / controller.limit).read_text())
            used = int((folder / controller.used).read_text())
            told = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left.append(limit - used + int(told.get(controller.droppable, 0)))
    return max(min(left), 0)


def _groups(root: Path) -> Iterator[tuple[_Controller, Path]]:
    """The control groups that this process is in, each with those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # this is not Linux
    for line in lines:
        _, names, group = line.split(":", 2)
        for name in _CONTROLLERS.keys() & set(names.split(",")):
            base = root / _CONTROLLERS[name].folder
            parts = Path(group).parts[1:]
            for depth in range(len(parts) + 1):
                yield _CONTROLLERS[name], base.joinpath(*parts[:depth])


def check(host_bytes: int, cache_bytes: int = 0) -> None:
    """See that tiers can take so much memory, beside a KV cache that is not there yet.

    Raises:
        BadInput: there is less.
    """
    left = available_bytes() - cache_bytes
    if host_bytes > left:
        raise BadInput(
            f"tiers take {host_bytes} bytes of memory, and the KV cache leaves {max(left, 0)}",
            fix="set a smaller tiers.host_bytes or --kv-cache-memory-bytes",
        )
