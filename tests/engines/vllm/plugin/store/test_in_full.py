"""The stock attention over pages that are read back."""

import pytest
import torch

from kvtune.engines.vllm.plugin.store import in_full
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import StoreConfig

ASKED = StoreConfig(format="turboquant", bits_key=3, bits_value=2)


def test_decoding_in_small_chunks_changes_nothing(engine, monkeypatch):
    whole, chunked = engine(ASKED), engine(ASKED)
    expected = whole.step(a=90, b=11)
    monkeypatch.setattr(in_full, "_CHUNK_BYTES", 1)
    found = chunked.step(a=90, b=11)
    assert all(torch.equal(found[name][1], expected[name][1]) for name in "ab")


@pytest.mark.parametrize("asked", [ASKED, StoreConfig(format="kivi")], ids=["cells", "pages"])
def test_a_warm_up_reads_no_pages(engine, asked):
    served = engine(asked)
    output = torch.ones(2, 3)
    assert served.impl.forward(None, None, None, None, None, None, output) is output
    assert served.impl.pages_at_once == []


@pytest.mark.parametrize(
    "layer", [{"attn_type": "encoder"}, {"kv_sharing_target_layer_name": "model.layers.1"}]
)
@pytest.mark.parametrize("asked", [ASKED, StoreConfig(format="kivi")], ids=["cells", "pages"])
def test_layers_that_read_other_tokens_are_refused(engine, asked, layer):
    impl = type(engine(asked).impl)
    with pytest.raises(BadInput, match="store cannot serve a layer"):
        impl(**layer)
