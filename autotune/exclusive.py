"""One search of a study at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtune.errors import BadInput

LOCK_FILE = "search.lock"


@contextmanager
def only_search_of(study: str, directory: Path) -> Iterator[None]:
    """Keep every other search of `study` on this machine out while the block runs.

    The lock is on a file in `directory`, where the logs of the study's servers are. It ends with
    the process, however that ends.

    Raises:
        BadInput: another process searches the study.
    """
    path = directory / LOCK_FILE
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise BadInput(
                f"study {study} is being searched already, by process {owner}",
                fix="let that search end, or give this one another name with --study",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
