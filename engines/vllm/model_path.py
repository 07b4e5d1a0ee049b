"""Check a model's folder before minutes are spent on starting a server for it."""

from __future__ import annotations

import difflib
from pathlib import Path

from kvtune.errors import EngineError
from kvtune.types import FailureClass


def expand_model(model: str) -> str:
    """Return `model` with a leading `~` resolved; a Hugging Face id is returned as it is.

    Raises:
        EngineError: `WRONG_MODEL`; it looks like a path and holds no model.
    """
    if not model.startswith(("/", "./", "../", "~")):
        return model
    path = Path(model).expanduser()
    if path.is_file():
        return str(path)
    if not path.is_dir():
        raise EngineError(
            FailureClass.WRONG_MODEL, f"there is no model folder {model}", _hint(path)
        )
    if not any((path / name).is_file() for name in ("config.json", "params.json")):
        raise EngineError(
            FailureClass.WRONG_MODEL,
            f"the folder {model} holds no model: it has no config.json",
            "Name the folder that holds config.json, the tokenizer and the weights.",
        )
    return str(path)


def _hint(path: Path) -> str:
    """Name what is there instead: a folder with a similar name, or the nearest one that exists."""
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    missing = path.absolute().relative_to(parent).parts[0]
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    if close := difflib.get_close_matches(missing, names, n=1, cutoff=0.6):
        return f"Did you mean {parent / close[0]}?"
    return f"The nearest folder that exists is {parent}."
