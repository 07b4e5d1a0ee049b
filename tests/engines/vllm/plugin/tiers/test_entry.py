"""The folder that a server is given for its pages on disk, looked at before anything starts."""

import importlib
import warnings
from types import SimpleNamespace

import pytest

from kvtune.engines.vllm.plugin.tiers import entry
from kvtune.engines.vllm.plugin.tiers.entry import enter
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import TiersConfig

# Importing vLLM takes longer than all else here.
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """vLLM's own imports warn, and a warning is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("kvtune.engines.vllm.plugin.tiers.connector")


def entered(path):
    config = SimpleNamespace(kv_transfer_config=None)
    enter(config, TiersConfig(host_bytes=1, disk_bytes=1, disk_path=str(path)))
    return config.kv_transfer_config


def test_the_connector_is_one_that_vllm_finds_and_that_computes_what_cannot_be_loaded(tmp_path):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = entered(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
    assert config.is_kv_transfer_instance
    assert config.kv_load_failure_policy == "recompute"
    assert KVConnectorFactory.supports_hma_config(config)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be a folder") as refused:
        entered(tmp_path / "file")
    assert "tiers.disk_path" in refused.value.fix


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(BadInput, match="cannot be written to"):
        entered(tmp_path)


def test_more_host_memory_than_there_is_is_refused():
    with pytest.raises(BadInput, match="more than the memory of"):
        enter(SimpleNamespace(), TiersConfig(host_bytes=1 << 60))


def test_more_host_memory_than_a_container_may_take_is_refused(tmp_path, monkeypatch):
    limits = tmp_path / "none", tmp_path / "open", tmp_path / "limit"
    monkeypatch.setattr(entry, "_LIMITS", limits)
    limits[1].write_text("max\n")
    limits[2].write_text("1000000\n")
    with pytest.raises(BadInput, match="more than the memory of 1000000"):
        enter(SimpleNamespace(), TiersConfig(host_bytes=1000000))
    enter(SimpleNamespace(), TiersConfig(host_bytes=999999))
