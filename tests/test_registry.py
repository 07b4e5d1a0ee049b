"""Implementations are found by being there: one file each, no list to keep."""

import importlib.metadata
import sys
import uuid

import pytest

from kvtune.registry import discover
from kvtune.types import Goal

BASE = """
from abc import ABC, abstractmethod
from typing import ClassVar
class Shape(ABC):
    name: ClassVar[str]
    @abstractmethod
    def draw(self): ...
"""
SHAPE = """
from {package}.base import Shape
class {cls}(Shape):
    name = {name!r}
    def draw(self): ...
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package of the given modules and imports its base class."""
    name = f"shapes_{uuid.uuid4().hex}"
    monkeypatch.syspath_prepend(tmp_path)

    def make(**modules):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "base.py").write_text(BASE)
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text.replace("{package}", name))
        base = __import__(f"{name}.base", fromlist=["Shape"]).Shape
        return name, base

    yield make
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def shape(cls, name):
    return SHAPE.replace("{cls}", cls).replace("{name!r}", repr(name))


def test_a_file_is_enough(package):
    name, base = package(square=shape("Square", "square"), circle=shape("Circle", "circle"))
    found = discover(name, base)
    assert {key: cls.__name__ for key, cls in found.items()} == {
        "circle": "Circle",
        "square": "Square",
    }
    assert list(found) == ["circle", "square"], "by file name"


def test_abstract_nameless_and_imported_classes_are_left_out(package):
    name, base = package(
        square=shape("Square", "square"),
        other="from {package}.square import Square\nfrom {package}.base import Shape\n"
        "class Half(Shape):\n    name = 'half'\n"
        "class Nameless(Shape):\n    def draw(self): ...\n",
    )
    assert list(discover(name, base)) == ["square"]


def test_a_name_that_is_taken_names_both_files(package):
    name, base = package(one=shape("One", "same"), two=shape("Two", "same"))
    with pytest.raises(
        ValueError, match=rf"'same' is declared twice: in {name}.one and in {name}.two"
    ):
        discover(name, base)


def test_other_distributions_add_theirs_by_entry_point(package, monkeypatch):
    name, base = package(square=shape("Square", "square"))
    plugin = type("Plugin", (base,), {"name": "plugin", "draw": lambda self: None})

    class Point:
        name = "plugin"

        def load(self):
            return plugin

    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [Point()] if group == "shapes" else []
    )
    assert set(discover(name, base, group="shapes")) == {"square", "plugin"}


def test_what_is_handed_out_can_be_changed_without_harm(package):
    name, base = package(square=shape("Square", "square"))
    discover(name, base).clear()
    assert list(discover(name, base)) == ["square"]


def test_a_package_that_holds_none_is_empty():
    assert discover("kvtune.profilers.traces", Goal) == {}
