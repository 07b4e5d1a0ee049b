"""Modules that are imported when they are first used, because they are large or optional."""

from __future__ import annotations

import importlib
from typing import Any

from kvtune.errors import MissingExtra

EXTRAS = {"torch": "reference", "transformers": "reference", "safetensors": "reference"}
"""The extra of the distribution that brings a package."""


class LazyModule:
    """Stands for a module until one of its names is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # What inspection asks for shall not import anything.
            raise AttributeError(attribute)
        try:
            module = importlib.import_module(self._name)
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            raise MissingExtra(
                f"{error.name} is not installed", fix=f"pip install 'kvtune[{extra}]'"
            ) from error
        value = getattr(module, attribute)
        setattr(self, attribute, value)
        return value


def lazy_import(name: str) -> Any:
    """Return a stand-in for the module `name`; using one of its names imports it.

    Raises (on use):
        MissingExtra: the package is part of an extra that is not installed.
    """
    return LazyModule(name)
