"""Layers that attend by more than the scores of their own tokens are refused."""

import pytest

from kvtune.errors import BadInput
from kvtune.policies.plugin_config import StoreConfig


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ({"attn_type": "encoder"}, "attends as encoder"),
        ({"kv_sharing_target_layer_name": "model.layers.1"}, "another layer"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"logits_soft_cap": 50.0}, "soft cap"),
        ({"sinks": [0.0]}, "sinks of its own"),
    ],
)
@pytest.mark.parametrize("form", ["int8", "kivi"])
def test_a_layer_that_would_be_served_wrong_is_refused(engine, form, layer, why):
    impl = type(engine(StoreConfig(format=form)).impl)
    with pytest.raises(BadInput, match="store cannot serve") as refused:
        impl(**layer)
    assert why in refused.value.message
