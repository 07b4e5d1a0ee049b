"""Bytes of a token in a store, by hand and as the plugin's own cells and pages add up."""

import pytest
import torch

from kvtune.engines.vllm.plugin.store.cells import cells_of
from kvtune.engines.vllm.plugin.store.grouped import grouped_pages
from kvtune.policies.plugin_config import StoreConfig
from kvtune.policies.store_bytes import cell_bytes

BY_HAND = [
    # A key and a value of 64 channels: codes, and a float32 scale or a float16 norm for each.
    ({"format": "int8"}, 64, 2 * 64 + 2 * 4),
    ({"format": "int4"}, 64, 2 * 32 + 2 * 4),
    ({"format": "turboquant"}, 64, 2 * 32 + 2 * 2),
    ({"format": "turboquant", "bits_key": 3, "bits_value": 2}, 64, 24 + 16 + 2 * 2),
    # 4 bytes for 32 tokens of each of 64 channels of a key, and for each 32 channels of a value.
    ({"format": "kivi"}, 64, 2 * 32 + 64 * 4 // 32 + 2 * 4),
    ({"format": "kivi", "bits_key": 2, "bits_value": 2}, 64, 2 * 16 + 8 + 8),
    ({"format": "kivi"}, 80, 2 * 40 + 10 + 3 * 4),
    ({"format": "kivi"}, 128, 2 * 64 + 16 + 16),
    ({"format": "int8"}, 128, 2 * 128 + 8),
]


@pytest.mark.parametrize(("given", "head_dim", "nbytes"), BY_HAND)
def test_bytes_are_those_of_codes_and_what_scales_them(given, head_dim, nbytes):
    assert cell_bytes(StoreConfig(**given), head_dim) == nbytes


@pytest.mark.parametrize("block_tokens", [32, 128])
@pytest.mark.parametrize(("given", "head_dim", "nbytes"), BY_HAND)
def test_a_page_of_the_plugin_takes_as_many(given, head_dim, nbytes, block_tokens):
    asked = StoreConfig(**given)
    if asked.is_grouped:
        assert grouped_pages(asked, head_dim, block_tokens).nbytes == nbytes
    else:
        assert cells_of(asked, head_dim, torch.float32).nbytes == nbytes
