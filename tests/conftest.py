"""What all tests need: contracts that explain their failures, and an interrupt that arrives."""

import signal
from pathlib import Path

import pytest

pytest.register_assert_rewrite("contracts")

# A runner that was started in the background ignores Ctrl-C, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
UNTIMED_FOLDERS = (
    *("kernels", "policies", "engines/reference"),
    *("autotune/emit", "autotune/forecast", "autotune/report"),
    *("profilers/metrics", "profilers/quality", "profilers/traces"),
)
UNTIMED_FILES = (
    *("autotune/test_search", "autotune/test_space", "autotune/test_tune"),
    *("autotune/test_tune_again", "autotune/test_tune_quality"),
    *("profilers/test_fingerprint", "profilers/test_materialize", "profilers/test_prefix_reuse"),
    *("profilers/test_statistics", "profilers/test_step_time", "profilers/test_synthetic"),
    *("profilers/test_verdict", "profilers/test_workload"),
)
UNTIMED = {TESTS / name for name in (*UNTIMED_FOLDERS, *(f"{file}.py" for file in UNTIMED_FILES))}
"""Folders and files of tests that start no server and look at no clock but one of their own."""


def pytest_collection_modifyitems(items):
    """Keep timed tests on one worker, one after another: busy cores would change what they see.

    Only a run with several workers (`-n`) takes notice.
    """
    for item in items:
        if {item.path, *item.path.parents}.isdisjoint(UNTIMED):
            item.add_marker(pytest.mark.xdist_group("servers"))
