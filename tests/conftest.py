"""What all tests need: contracts that explain their failures, and an interrupt that arrives."""

import signal
from pathlib import Path

import pytest

pytest.register_assert_rewrite("contracts")

# A runner that was started in the background ignores Ctrl-C, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
ARITHMETIC = (TESTS / "kernels", TESTS / "policies", TESTS / "engines" / "reference")
"""Tests that start no process and look at no clock."""


def pytest_collection_modifyitems(items):
    """Keep all other tests on one worker, one after another: busy cores would change what they see.

    Only a run with several workers (`-n`) takes notice.
    """
    for item in items:
        if not any(folder in item.path.parents for folder in ARITHMETIC):
            item.add_marker(pytest.mark.xdist_group("servers"))
