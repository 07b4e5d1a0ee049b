"""Write emitted files, never over work that is not kvtune's.

A manifest beside the files lists the SHA-256 of what kvtune wrote. A file that it does not list,
or that was edited since, is left alone unless the caller forces it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvtune.errors import BadInput

MANIFEST = "kvtune-manifest.json"

_FIXES = {
    errno.ENOSPC: "free some space or choose another directory",
    errno.EDQUOT: "free some of your quota or choose another directory",
    errno.EROFS: "choose a directory on a writable file system",
    errno.EACCES: "choose a directory that you may write to",
    errno.EPERM: "choose a directory that you may write to",
}


def write_files(
    files: Mapping[str, str], directory: Path, *, force: bool = False
) -> dict[str, str]:
    """Write the files and the manifest into `directory`, which is made if it is missing.

    Each file appears whole or not at all, and none is written when one of them is refused. A text
    that starts with `#!` becomes executable. Returns file name to SHA-256.

    Raises:
        BadInput: a file there is not kvtune's or was edited since, or the disk refuses.
    """
    contents = {name: text.encode() for name, text in files.items()}
    for name in contents:
        if Path(name).name != name or name in {"", "..", MANIFEST}:
            raise BadInput(f"{name!r} is not a name for an emitted file", "use a plain file name")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        known = _read_manifest(directory / MANIFEST, force=force)
        if not force:
            _refuse_foreign(contents, directory, known)
        digests = {name: _digest(data) for name, data in contents.items()}
        # The manifest comes last: after a crash in between, the same call simply succeeds again.
        for name, data in contents.items():
            _write(directory / name, data, 0o755 if data.startswith(b"#!") else 0o644)
        manifest = {"schema_version": 1, "files": {**known, **digests}}
        text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
        _write(directory / MANIFEST, text.encode(), 0o644)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(
            f"cannot write to {directory}: {reason}",
            _FIXES.get(error.errno or 0, "choose another directory"),
        ) from error
    return digests


def _refuse_foreign(
    contents: Mapping[str, bytes], directory: Path, known: Mapping[str, str]
) -> None:
    for name, data in contents.items():
        path = directory / name
        if not os.path.lexists(path):
            continue
        present = _digest(path.read_bytes()) if path.is_file() and not path.is_symlink() else ""
        if present == _digest(data):
            continue
        if name not in known:
            raise BadInput(
                f"{path} exists and was not written by kvtune",
                "choose another directory, move the file away, or pass --force",
            )
        if present != known[name]:
            raise BadInput(
                f"{path} was edited after kvtune wrote it",
                "choose another directory, keep your edits elsewhere, or pass --force",
            )


def _read_manifest(path: Path, *, force: bool) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        files = json.loads(path.read_bytes())["files"]
        return {str(name): str(digest) for name, digest in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if force:
            return {}
        raise BadInput(
            f"{path} is not a manifest of kvtune, so it is unknown which files are safe to replace",
            "choose another directory, or pass --force",
        ) from error


def _write(path: Path, data: bytes, mode: int) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
