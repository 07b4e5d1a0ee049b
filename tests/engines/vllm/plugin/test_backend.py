"""What the wrapped backend is made of, around stand-ins for the stock one."""

import sys
import types
from types import SimpleNamespace

import pytest

from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig

pytest.importorskip("torch")

from kvtune.engines.vllm.plugin.backend import backend_class

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
