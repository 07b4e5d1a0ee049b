"""Layers that attend by more than the scores of their own tokens are refused, whatever is asked."""

import pytest

from kvtune.engines.vllm.plugin.layers import checked
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig

WINDOW = {"streaming_llm": {"window_tokens": 64}}


class Stock:
    attn_type = "decoder"
    kv_sharing_target_layer_name = alibi_slopes = sinks = None
    logits_soft_cap = 0

    def __init__(self, **named):
        vars(self).update(named)


def made(asked, **named):
    return checked(Stock, PluginConfig.model_validate(asked))(**named)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ({"attn_type": "encoder"}, "attends as encoder"),
        ({"kv_sharing_target_layer_name": "model.layers.1"}, "another layer"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"sinks": [0.0]}, "sinks of its own"),
    ],
)
@pytest.mark.parametrize(
    "asked", [WINDOW, {"quest": {"pages": 2}}, {"store": {"format": "int8"}}], ids=str
)
def test_a_layer_that_would_be_served_wrong_is_refused(asked, layer, why):
    with pytest.raises(BadInput, match="cannot serve a layer") as refused:
        made(asked, **layer)
    assert why in refused.value.message
    assert refused.value.__notes__ == [f"To fix: {refused.value.fix}."]


def test_a_soft_cap_goes_with_all_but_a_store():
    assert made(WINDOW, logits_soft_cap=50.0).logits_soft_cap == 50.0
    with pytest.raises(BadInput, match="soft cap") as refused:
        made({"store": {"format": "kivi"}}, logits_soft_cap=50.0)
    assert "take store out" in refused.value.fix
