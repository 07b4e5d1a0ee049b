"""The walls: every package ships, and the command line starts without anything heavy."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("kvtune", "kernels", "policies", "profilers", "store", "engines", "autotune")
HEAVY = ("torch", "vllm", "transformers", "optuna", "sqlalchemy", "numpy", "asyncio", "pydantic")


def test_every_package_is_listed_and_mapped_for_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        init.parent.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }
    expected = {
        ".".join(("kvtune", *(part for part in path.split("/") if part != "kvtune"))): path
        for path in found
    }
    assert settings["package-dir"] == expected
    assert settings["packages"] == sorted(expected)


def test_no_folder_with_python_files_lacks_an_init_file():
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), file


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['kvtune', '--help']\n"
        "from kvtune.autotune.cli.app import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_is_longer_than_a_reader_can_hold(folder):
    long = {
        str(file.relative_to(ROOT)): lines
        for file in (ROOT / folder).rglob("*.py")
        if (lines := len(file.read_text().splitlines())) > 400
    }
    assert long == {}
