"""Two searches of one study never run at once, and a dead one keeps nobody out."""

import os
import subprocess
import sys

import pytest

from kvtune.autotune.exclusive import only_search_of
from kvtune.errors import BadInput

HOLD = """
import sys, time
from pathlib import Path
from kvtune.autotune.exclusive import only_search_of
with only_search_of("s", Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_search_is_refused_and_told_who_is_first(tmp_path):
    with (
        only_search_of("s", tmp_path),
        pytest.raises(BadInput, match=f"searched already, by process {os.getpid()}"),
        only_search_of("s", tmp_path),
    ):
        pytest.fail("two at once")
    with only_search_of("s", tmp_path):
        pass


def test_another_study_is_free(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with only_search_of("a", tmp_path / "a"), only_search_of("b", tmp_path / "b"):
        pass


def test_a_search_that_was_killed_keeps_nobody_out(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(BadInput, match=f"process {holder.pid}"),
            only_search_of("s", tmp_path),
        ):
            pytest.fail("two at once")
        holder.kill()
        holder.wait(10)
    with only_search_of("s", tmp_path):
        pass
