"""From a database's error to a StoreError that says what to do."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from kvtune.errors import StoreError
from kvtune.store.location import Location

_ELSEWHERE = "or keep the history elsewhere: set KVTUNE_STORE to another file"
_FULL_BELOW_BYTES = 1 << 20

_SQLITE: dict[str, tuple[str, str]] = {
    "SQLITE_BUSY": (
        "{where} is locked: another program has kept it for itself for too long",
        "let the other program end or close it, then run the same command again",
    ),
    "SQLITE_READONLY": (
        "{where} is read-only: kvtune cannot write its history there",
        f"make the file and its directory writable, {_ELSEWHERE}",
    ),
    "SQLITE_CANTOPEN": (
        "{where} cannot be opened",
        f"check that the file and its directory are readable and writable, {_ELSEWHERE}",
    ),
    "SQLITE_NOTADB": (
        "{where} is not a kvtune store: the file is not a database",
        "give the path of another file",
    ),
    "SQLITE_CORRUPT": (
        "{where} is damaged: {reason}",
        f"restore a copy, or rescue it with `sqlite3 FILE .recover`, {_ELSEWHERE}",
    ),
    "SQLITE_IOERR": (
        "{where} cannot be read or written: {reason}",
        f"check the disk, {_ELSEWHERE}",
    ),
}
_SQLITE |= {"SQLITE_LOCKED": _SQLITE["SQLITE_BUSY"], "SQLITE_PERM": _SQLITE["SQLITE_CANTOPEN"]}

_POSTGRESQL: dict[str, tuple[str, str]] = {
    "55P03": _SQLITE["SQLITE_BUSY"],
    "25006": ("{where} is read-only", "connect to the primary server"),
    "42501": ("{where} refused: {reason}", "grant this user CREATE and USAGE on the schema"),
}


@contextmanager
def faults_explained(location: Location) -> Iterator[None]:
    """Raise StoreError for whatever the database at `location` raises inside."""
    try:
        yield
    except DBAPIError as error:
        raise _explain(error.orig, location) from error
    except (sqlite3.Error, PoolTimeoutError) as error:
        raise _explain(error, location) from error
    except ValidationError as error:
        raise StoreError(
            f"{location} holds a record that this kvtune cannot read: {error.title}, "
            f"{error.errors(include_url=False)[0]['msg']}",
            "use the kvtune version that wrote it, or restore a copy",
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Whether the operating system refused to write for want of space."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_full(where: object) -> StoreError:
    """The error for a disk without space."""
    return StoreError(
        f"disk full writing {where}: what was recorded before is safe",
        "free space and run the same command again",
    )


def _explain(error: BaseException | None, location: Location) -> StoreError:
    reason = " ".join(str(error).split())
    sqlite_name = getattr(error, "sqlite_errorname", "")
    sqlstate = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""
    if sqlite_name == "SQLITE_FULL" or sqlstate == "53100":
        return disk_full(location)
    if sqlite_name.startswith("SQLITE_IOERR") and _no_space_beside(location.path):
        return disk_full(location)
    known = _POSTGRESQL.get(sqlstate) or _SQLITE.get("_".join(sqlite_name.split("_")[:2]))
    if known:
        message, fix = known
        return StoreError(message.format(where=location, reason=reason), fix)
    if location.path is None and not sqlstate:
        return StoreError(
            f"{location} cannot be reached: {reason}",
            "check the URL, the password and that the server accepts connections",
        )
    return StoreError(f"{location} cannot be used: {reason}")


def _no_space_beside(path: Path | None) -> bool:
    # SQLite reports a disk too full for its shared-memory file as a plain I/O error.
    return path is not None and shutil.disk_usage(path.parent).free < _FULL_BELOW_BYTES
