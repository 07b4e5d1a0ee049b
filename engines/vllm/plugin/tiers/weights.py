"""Which weights a model path stands for, told from their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
    its last byte, and of safetensors the first 4 KiB of each tensor: training changes nearly every
    number of what it does not freeze, and nobody waits for a whole checkpoint to be read once more.

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
        if file.suffix == ".safetensors":
            for start in _tensor_starts(opened, size):
                opened.seek(start)
                yield opened.read(_SAMPLE_BYTES)


def _tensor_starts(opened: BinaryIO, size: int) -> list[int]:
    """Where the tensors of a safetensors file begin; none if it is no such file.

    8 bytes say how long the JSON is that follows, and that says where tensors lie behind it.
    """
    opened.seek(0)
    data_start = 8 + int.from_bytes(opened.read(8), "little")
    if data_start > size:
        return []
    try:
        header = json.loads(opened.read(data_start - 8))
        return sorted(
            data_start + tensor["data_offsets"][0]
            for name, tensor in header.items()
            if name != "__metadata__"
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
