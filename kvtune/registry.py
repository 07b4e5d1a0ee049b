"""Find the implementations of a contract: one file each, no list to keep.

`discover` imports the modules of a package in sorted order and collects the concrete subclasses
of a base class that declare a `name`; entry points of a group are added after them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
from functools import cache
from typing import Any, TypeVar, cast

T = TypeVar("T")


@cache
def _discover(package: str, base: type[Any], group: str | None) -> dict[str, type[Any]]:
    module = importlib.import_module(package)
    found: dict[str, type[Any]] = {}
    candidates: list[type[Any]] = []
    for info in sorted(pkgutil.iter_modules(module.__path__), key=lambda item: item.name):
        member = importlib.import_module(f"{package}.{info.name}")
        candidates += [
            value
            for value in vars(member).values()
            if inspect.isclass(value) and value.__module__ == member.__name__
        ]
    if group is not None:
        for point in sorted(importlib.metadata.entry_points(group=group), key=lambda p: p.name):
            candidates.append(point.load())
    for candidate in candidates:
        if not issubclass(candidate, base) or inspect.isabstract(candidate):
            continue
        name = getattr(candidate, "name", None)
        if candidate is base or not isinstance(name, str):
            continue
        if name in found:
            raise ValueError(
                f"{base.__name__} {name!r} is declared twice: in {found[name].__module__} "
                f"and in {candidate.__module__}"
            )
        found[name] = candidate
    return found


def discover(package: str, base: type[T], group: str | None = None) -> dict[str, type[T]]:
    """Map the name of every concrete subclass of `base` in `package` to its class.

    `group` names an entry-point group through which other distributions add theirs.

    Raises:
        ValueError: two classes declare the same name; the message names both modules.
    """
    return dict(_discover(package, cast(Any, base), group))
