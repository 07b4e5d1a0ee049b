"""What all tests need: contracts that explain their failures, and an interrupt that arrives."""

import signal
from pathlib import Path

import pytest

pytest.register_assert_rewrite("contracts")

# A runner that was started in the background ignores Ctrl-C, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
UNTIMED = (
    *(TESTS / folder for folder in ("kernels", "policies", "engines/reference")),
    *(TESTS / "autotune" / folder for folder in ("emit", "forecast", "report")),
    *(TESTS / "profilers" / folder for folder in ("metrics", "quality", "traces")),
    *(TESTS / "autotune" / f"test_{name}.py" for name in ("search", "space")),
    *(TESTS / "autotune" / f"test_{name}.py" for name in ("tune", "tune_again", "tune_quality")),
)
"""Folders and files of tests that start no server and look at no clock but one of their own."""


def pytest_collection_modifyitems(items):
    """Keep timed tests on one worker, one after another: busy cores would change what they see.

    Only a run with several workers (`-n`) takes notice.
    """
    for item in items:
        if {item.path, *item.path.parents}.isdisjoint(UNTIMED):
            item.add_marker(pytest.mark.xdist_group("servers"))
