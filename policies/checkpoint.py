"""What a checkpoint on this disk says about the model: its shape, its vocabulary, its weights."""

from __future__ import annotations

import json
from pathlib import Path

from kvtune.errors import BadInput
from kvtune.policies.model_shape import ModelShape, read_model_shape

INDEX = "model.safetensors.index.json"
WEIGHT_FILES = (
    "model*.safetensors",
    "*.safetensors",
    "pytorch_model*.bin",
    "*.bin",
    "*.gguf",
)
"""The first pattern that matches names the weights. Mistral's checkpoints hold them a second time
in `consolidated*.safetensors`, which an engine does not load beside the others."""


def model_shape(model: str) -> ModelShape | None:
    """The shape of a model on this disk; `None` for a hub id or an architecture not known."""
    path = Path(model).expanduser()
    if not path.exists():
        return None
    try:
        return read_model_shape(path)
    except BadInput:
        return None


def vocab_size(model: str) -> int | None:
    """The number of token ids of a model on this disk."""
    shape = model_shape(model)
    return None if shape is None else shape.vocab_size


def weight_bytes(model: str) -> int | None:
    """Size of a model's weight files on this disk.

    `None` for a hub id, and for a checkpoint that lacks a file which its index names.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        return None
    files = _indexed(path)
    if files is None:
        matches = (sorted(path.glob(pattern)) for pattern in WEIGHT_FILES)
        files = next((found for found in matches if found), [])
    if not files or not all(file.is_file() for file in files):
        return None
    return sum(file.stat().st_size for file in files)


def _indexed(directory: Path) -> list[Path] | None:
    """The files that the checkpoint's index names; `None` without a readable index."""
    try:
        names = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
