import os
import subprocess
import sys

import pytest

from kvtune.store import process
from kvtune.store.process import process_identity


@pytest.fixture(params=["linux", "elsewhere"])
def platform(request, monkeypatch, tmp_path):
    if request.param == "linux" and not process._BOOT_ID.exists():
        pytest.skip("not on Linux")
    if request.param == "elsewhere":
        monkeypatch.setattr(process, "_BOOT_ID", tmp_path / "missing")


@pytest.mark.usefixtures("platform")
def test_process_has_one_identity_until_it_ends():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first = process_identity(child.pid)
    assert first is not None
    assert process_identity(child.pid) == first
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_identity(child.pid) is None, "a zombie is dead"
    child.communicate()
    assert process_identity(child.pid) is None


def test_command_with_spaces_and_brackets_is_no_trouble(tmp_path):
    if not process._BOOT_ID.exists():
        pytest.skip("not on Linux")
    odd = tmp_path / "a) R (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "60"])
    boot, _, ticks = process_identity(child.pid).partition(":")
    assert boot == process._BOOT_ID.read_text().strip()
    assert ticks.isdecimal()
    child.kill()
    child.communicate()
