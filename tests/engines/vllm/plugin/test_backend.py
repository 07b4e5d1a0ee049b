"""What the wrapped backend is made of, around stand-ins for the stock one."""

import sys
import types
from types import SimpleNamespace

import pytest

from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig

pytest.importorskip("torch")

from kvtune.engines.vllm.plugin import backend, front
from kvtune.engines.vllm.plugin.backend import backend_class
from kvtune.engines.vllm.plugin.refusals import Facts

ASKED = [
    {"streaming_llm": {"window_tokens": 64}},
    {"quest": {"pages": 2}},
    {"page_eviction": {"budget_tokens": 64}},
    {"store": {"format": "int8"}},
    {"store": {"format": "kivi"}, "streaming_llm": {"window_tokens": 64}},
]


class Impl:
    attn_type = "decoder"
    kv_sharing_target_layer_name = alibi_slopes = sinks = None
    logits_soft_cap = 0

    def __init__(self, **named):
        vars(self).update(named)


class Builder:
    pass


class Stock:
    @staticmethod
    def get_name():
        return "STOCK"

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder


@pytest.fixture(params=ASKED, ids=str)
def wrapped(request, monkeypatch):
    module = types.ModuleType("vllm.v1.attention.backend")
    module.AttentionCGSupport = SimpleNamespace(NEVER="never")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return backend_class(Stock, PluginConfig.model_validate(request.param), 512)


def test_it_goes_by_the_stock_name_with_classes_of_its_own(wrapped):
    assert wrapped.get_name() == "STOCK"
    assert issubclass(wrapped.get_builder_cls(), Builder)
    assert isinstance(wrapped.get_impl_cls()(), Impl)


def test_every_policy_refuses_layers_that_it_would_serve_wrong(wrapped):
    with pytest.raises(BadInput, match="ALiBi"):
        wrapped.get_impl_cls()(alibi_slopes=[0.5])


@pytest.fixture
def looked_up(monkeypatch):
    """The backend that a worker's layers get: `looked_up(section, **facts)`."""

    def looked_up(section, *, transfer=None, **facts):
        config = SimpleNamespace(
            additional_config={"kvtune": section},
            kv_transfer_config=transfer,
            max_in_flight_tokens=512,
        )
        module = types.ModuleType("vllm.config")
        module.get_current_vllm_config = lambda: config
        monkeypatch.setitem(sys.modules, "vllm.config", module)
        monkeypatch.setattr(front, "facts_of", lambda _: Facts("0.32.0", "cpu", **facts))
        monkeypatch.setattr(backend, "stock_backend", lambda: Stock)
        return backend.Backend

    return looked_up


@pytest.mark.parametrize("section", [{"quest": {"pages": 2}}, {"tiers": {"host_bytes": 1 << 30}}])
def test_a_worker_refuses_what_no_front_end_has_checked(looked_up, section):
    with pytest.raises(BadInput, match="speculative decoding") as refused:
        looked_up(section, is_speculative=True)
    assert "--speculative-config" in refused.value.__notes__[0]


@pytest.mark.parametrize(
    "section", [{"page_eviction": {"budget_tokens": 64}}, {"tiers": {"host_bytes": 1 << 30}}]
)
def test_a_worker_refuses_policies_whose_connector_no_front_end_has_entered(looked_up, section):
    with pytest.raises(BadInput, match="could not enter its connector"):
        looked_up(section)
    looked_up({"tiers": {"host_bytes": 1 << 30}}, transfer=object())


def test_a_worker_of_a_server_that_asks_for_nothing_checks_nothing(looked_up):
    assert looked_up({}, is_speculative=True) is Stock
