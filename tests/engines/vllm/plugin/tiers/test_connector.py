"""The connector within a step as vLLM's model runner makes it, on caches of its own."""

import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch

from kvtune.engines.vllm.plugin import counters
from kvtune.engines.vllm.plugin.tiers import files
from kvtune.engines.vllm.plugin.tiers.placement import Store
from kvtune.engines.vllm.plugin.tiers.planner import Step

# Importing vLLM takes longer than all else here.
pytestmark = pytest.mark.integration
PAGES = 4
NAME = f"0123456789abcdef-{1:064x}"
GROUP = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4), layer_names=["one"])


@pytest.fixture(scope="module")
def ours():
    """Importing vLLM warns, and a warning is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("kvtune.engines.vllm.plugin.tiers.connector")


@pytest.fixture
def step(ours, tmp_path, monkeypatch):
    """Go through a step that completes page 2 and is to keep it on disk."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.worker import kv_connector_model_runner_mixin as runner

    counters.start_anew()
    tiers = {"host_bytes": 1 << 20, "disk_bytes": 1 << 20, "disk_path": str(tmp_path)}
    config = SimpleNamespace(
        additional_config={"kvtune": {"tiers": tiers}}, kv_transfer_config=SimpleNamespace()
    )
    connector = ours.TiersConnector(
        config,
        KVConnectorRole.WORKER,
        SimpleNamespace(kv_cache_groups=[GROUP], num_blocks=PAGES),
    )
    connector.register_kv_caches({"one": torch.randn(PAGES, 2, 4, 8)})
    monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(runner, "get_forward_context", lambda: None)
    plan = ours.Planned(Step({}, [Store(NAME, 2, 0, writes_file=True)], []))
    scheduled = SimpleNamespace(
        kv_connector_metadata=plan, has_sync_kv_loads=False, finished_req_ids=set()
    )

    def go(forward):
        try:
            with runner.KVConnectorModelRunnerMixin._get_kv_connector_output(scheduled):
                forward()
        finally:
            connector.shutdown()  # which waits for what is being written

    return go


def test_pages_are_kept_once_their_step_is_computed(step, tmp_path):
    step(lambda: None)
    assert [name for name, _ in files.kept(tmp_path)] == [NAME]


@pytest.mark.parametrize("error", [SystemExit, RuntimeError])
def test_pages_of_a_step_that_was_broken_off_are_not_kept(step, tmp_path, error):
    def forward():
        raise error

    with pytest.raises(error):
        step(forward)
    assert files.kept(tmp_path) == []
