"""A layer's spec says how large its packed pages are."""

from types import SimpleNamespace

import pytest
import torch

from kvtune.engines.vllm.plugin.store.spec import packed
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig, StoreConfig


def layer(**changes):
    heads = {"head_size": 64, "head_size_v": 64, "dtype": torch.bfloat16, "block_size": 32}
    return SimpleNamespace(**heads | changes)


def test_cells_are_bytes_of_the_format():
    asked = StoreConfig(format="turboquant", bits_key=4, bits_value=3)
    expected = {"dtype": torch.uint8, "state_content_bytes": 32 + 2 + 24 + 2}
    assert packed(layer(), asked) == expected


def test_cells_of_grouped_pages_are_their_share_of_a_page():
    asked = StoreConfig(format="kivi", bits_key=4, bits_value=2)
    # Keys: 32 bytes of codes, and 4 of range for 32 tokens of 64 channels. Values: 16 and 8.
    assert packed(layer(), asked)["state_content_bytes"] == 32 + 8 + 16 + 8


def test_values_of_another_size_than_keys_are_refused():
    with pytest.raises(BadInput, match="values of 128"):
        packed(layer(head_size_v=128), StoreConfig(format="int8"))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_vllm_sizes_pages_by_it():
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvtune.engines.vllm.plugin.spec import PolicySpec, policy_spec

    stock = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    asked = PluginConfig(store=StoreConfig(format="int8"))
    ours = policy_spec(stock, asked, max_in_flight_tokens=512)
    assert ours.page_size_bytes == 3 * 32 * 2 * (64 + 4)
    merged = PolicySpec.merge([ours, ours])
    assert (merged.page_size_bytes, merged.dtype) == (ours.page_size_bytes, torch.uint8)
