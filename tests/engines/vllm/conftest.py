"""Real processes without a real vLLM: a stand-in for it, and trees that do not want to end."""

import contextlib
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvtune.engines.vllm import process
from kvtune.engines.vllm.engine import VllmEngine

HERE = Path(__file__).parent


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for(condition, limit_s=60.0):
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def alive():
    """Say whether a process runs; one that only waits to be reaped does not."""
    return _alive


@pytest.fixture
def wait_for():
    """Wait until a condition holds, or fail."""
    return _wait_for


@pytest.fixture
def new_children():
    """List the processes that this test has started and that still run."""
    before = psutil.Process().children(recursive=True)

    def find():
        return [c for c in psutil.Process().children(recursive=True) if c not in before]

    return find


@pytest.fixture
def warm_parents(new_children):
    """Find the processes that have vLLM imported, without their guards."""

    def find():
        found = []
        for child in new_children():
            with contextlib.suppress(psutil.Error):
                words = " ".join(child.cmdline())
                if "warm_parent.py" in words and "guard.py" not in words:
                    found.append(child)
        return found

    return find


@pytest.fixture
def stubborn():
    """The words that start a stubborn tree, and what reads the pids it wrote."""
    script = HERE / "stubborn_tree.py"

    def pids(path, count=4):
        _wait_for(lambda: path.exists() and len(path.read_text().split()) == count)
        return [int(word) for word in path.read_text().split()]

    return [sys.executable, str(script)], pids


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.6)
    monkeypatch.setattr("kvtune.engines.vllm.warm.GRACE_S", 0.6)


@pytest.fixture
def fake_vllm(monkeypatch, tmp_path, new_children):
    """Make every interpreter find the stand-in instead of a vLLM."""
    monkeypatch.setenv("PYTHONPATH", str(HERE / "fake"))
    monkeypatch.setenv("KVTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FAKE_VLLM_IMPORTS", str(tmp_path / "imports"))


@pytest.fixture
def engine(fake_vllm, request, new_children):
    with VllmEngine(start=getattr(request, "param", "cold")) as engine:
        yield engine
    assert new_children() == []
