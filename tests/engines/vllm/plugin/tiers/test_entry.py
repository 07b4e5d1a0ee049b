"""The folder that a server is given for its pages on disk, looked at before anything starts."""

import importlib
import warnings
from types import SimpleNamespace

import pytest

from kvtune.engines.vllm.plugin.tiers import memory
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


def config(cache_bytes=None, api_servers=1, api_server=0):
    return SimpleNamespace(
        kv_transfer_config=None,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=cache_bytes),
        parallel_config=SimpleNamespace(
            _api_process_count=api_servers, _api_process_rank=api_server
        ),
    )


def entered(path):
    made = config()
    enter(made, TiersConfig(host_bytes=1, disk_bytes=1, disk_path=str(path)))
    return made.kv_transfer_config


def test_the_connector_is_one_that_vllm_finds_and_that_computes_what_cannot_be_loaded(tmp_path):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    made = entered(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
    assert made.is_kv_transfer_instance
    assert made.kv_load_failure_policy == "recompute"
    assert KVConnectorFactory.supports_hma_config(made)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be a folder") as refused:
        entered(tmp_path / "file")
    assert "tiers.disk_path" in refused.value.fix


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(BadInput, match="cannot be written to"):
        entered(tmp_path)


def test_more_host_memory_than_the_cache_leaves_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(BadInput, match="take 701 bytes of memory, and the KV cache leaves 700"):
        enter(config(cache_bytes=300), TiersConfig(host_bytes=701))
    enter(config(cache_bytes=300), TiersConfig(host_bytes=700))
    enter(config(cache_bytes=None), TiersConfig(host_bytes=1000))


def test_an_api_server_beside_an_engine_that_has_its_memory_starts(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    asked = TiersConfig(host_bytes=701)
    for api_server in (0, 1):
        made = config(api_servers=2, api_server=api_server)
        enter(made, asked)
        assert made.kv_transfer_config is not None
    # The process that starts them all, before the engine.
    with pytest.raises(BadInput, match="take 701 bytes"):
        enter(config(api_servers=2, api_server=-1), asked)
