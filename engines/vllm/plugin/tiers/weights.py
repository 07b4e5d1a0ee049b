"""Which weights a model path stands for, told from their files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_SMALL_BYTES = 1 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 12


def has_weights(model: str) -> bool:
    """Whether the path is a file with weights or a folder that has some."""
    return any(file.suffix in _WEIGHTS for file in _files(model))


def weights_digest(model: str) -> str:
    """A digest of the content of a checkpoint's files.

    Small files count whole. Of a large one its size and 64 places of 4 KiB count, from its first to
    its last byte: training changes nearly every number, and nobody waits for a whole checkpoint to
    be read once more.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in _files(model):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for part in _parts(file):
            digest.update(part)
    return digest.hexdigest()


def _files(model: str) -> list[Path]:
    path = Path(model)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    return [path] if path.is_file() else []


def _parts(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= _SMALL_BYTES:
            yield opened.read()
            return
        for number in range(_SAMPLES):
            opened.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            yield opened.read(_SAMPLE_BYTES)
