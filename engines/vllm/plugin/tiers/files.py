"""Pages as files: written whole or not at all, and read only if every byte is as it was written.

A file is a header and the page's bytes. The header: 8 bytes that tell the format, the number of
bytes that follow (unsigned, little endian, 8 bytes), and the SHA-256 of the name and those bytes.
The name is in it so that a file under another name is no more valid than a damaged one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b"kvtune\x00\x01"
_HEADER = struct.Struct("<8sQ32s")
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{64}")
_SUFFIX = ".kv"
_UNFINISHED = ".new"


class Damaged(Exception):
    """A file is not what was written under its name."""


def file_bytes(page_bytes: int) -> int:
    """What a page takes on disk."""
    return _HEADER.size + page_bytes


def path_of(folder: Path, name: str) -> Path:
    """Where the page of this name is; 256 folders keep each short to list."""
    return folder / name[-2:] / f"{name}{_SUFFIX}"


def write(folder: Path, name: str, page: memoryview) -> None:
    """Write a page. Whoever reads, also after this process was killed, sees all of it or nothing.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    path = path_of(folder, name)
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(_UNFINISHED)
    try:
        with unfinished.open("wb", buffering=0) as file:
            _write_all(file.fileno(), _HEADER.pack(_MAGIC, len(page), _digest(name, page)))
            _write_all(file.fileno(), page)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def read_into(folder: Path, name: str, page: memoryview) -> None:
    """Read a page, and note that it was used.

    Raises:
        OSError: it cannot be read.
        Damaged: it is not what was written under this name; `page` is to be forgotten.
    """
    path = path_of(folder, name)
    with path.open("rb", buffering=0) as file:
        header = file.read(_HEADER.size)
        if len(header) != _HEADER.size:
            raise Damaged("it ends within its header")
        magic, told_bytes, digest = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise Damaged("it is of another format")
        if not told_bytes == len(page) == os.fstat(file.fileno()).st_size - _HEADER.size:
            raise Damaged(f"it does not hold the {len(page)} bytes of a page")
        read = 0
        while read < len(page):
            got = file.readinto(page[read:])
            if not got:
                raise Damaged("it became shorter")
            read += got
        if _digest(name, page) != digest:
            raise Damaged("its checksum is another")
        os.utime(file.fileno())


def remove(folder: Path, name: str) -> None:
    """Remove a page, if it is there.

    Raises:
        OSError: it cannot be removed.
    """
    path_of(folder, name).unlink(missing_ok=True)


def kept(folder: Path) -> list[tuple[str, int]]:
    """The name and size in bytes of each page there is, the least recently used first.

    What a killed server left unfinished is removed. Files of others are no concern of ours.

    Raises:
        OSError: the folder cannot be read.
    """
    for path in _named(folder, _UNFINISHED):
        path.unlink(missing_ok=True)
    found = []
    for path in _named(folder, _SUFFIX):
        # The worker of a server that was killed may still be removing some.
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime_ns, path.stem, status.st_size))
    return [(name, size) for _, name, size in sorted(found)]


def _named(folder: Path, suffix: str) -> Iterator[Path]:
    for path in folder.glob(f"??/*{suffix}"):
        if _NAME.fullmatch(path.stem) and path.parent.name == path.stem[-2:]:
            yield path


def lock(folder: Path) -> int | None:
    """Take the folder until what is returned is closed; `None` while another has it.

    Raises:
        OSError: the folder cannot be written to.
    """
    opened = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        return None
    return opened


def _digest(name: str, page: memoryview) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(page)
    return digest.digest()


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    """A full disk may take a part of what is given, and says so only when it is given the rest."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
