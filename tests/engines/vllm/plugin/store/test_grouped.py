"""KIVI's pages hold what its kernels keep, in the bytes of the paper's formula."""

import numpy as np
import pytest
import torch

from kvtune.engines.vllm.plugin.store.grouped import GroupedPages, grouped_pages
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import StoreConfig

torch.set_num_threads(1)


def pages(bits, width=64, tokens=64):
    return GroupedPages(StoreConfig(format="kivi", bits_key=bits, bits_value=bits), width, tokens)


def naive(x, bits):
    """Min/max quantization of one group, as floats, against float16 ranges."""
    low, high = np.float16(x.min()), x.max()
    scale = np.float16((high - x.min()) / (2**bits - 1)) or np.float16(1)
    codes = np.clip(np.round((x - np.float32(low)) / np.float32(scale)), 0, 2**bits - 1)
    return codes * np.float32(scale) + np.float32(low)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_keys_are_grouped_along_tokens_and_values_along_channels(bits):
    random = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 64, 64, generator=random).unbind(0)
    fmt = pages(bits)
    found_keys, found_values = fmt.decode(fmt.encode(keys, values), torch.float32)
    for head in range(3):
        for group in range(2):
            span = slice(group * 32, group * 32 + 32)
            for other in range(64):
                key = naive(keys[head, span, other].numpy(), bits)
                value = naive(values[head, other, span].numpy(), bits)
                assert np.allclose(found_keys[head, span, other].numpy(), key, atol=1e-6)
                assert np.allclose(found_values[head, other, span].numpy(), value, atol=1e-6)


@pytest.mark.parametrize(
    ("bits", "width", "cell"),
    # Of a key and of a value: codes, and 4 bytes of range for 32 of them.
    [(2, 64, 2 * (16 + 8)), (4, 64, 2 * (32 + 8)), (2, 128, 2 * (32 + 16)), (3, 128, 128)],
)
def test_a_cell_takes_the_bits_of_the_paper(bits, width, cell):
    assert pages(bits, width).nbytes == cell
    keys = values = torch.zeros(2, 64, width)
    assert pages(bits, width).encode(keys, values).shape == (2, 64, cell)


def test_pages_whose_bytes_do_not_divide_by_tokens_are_filled_up():
    # 80 channels: 20 bytes of codes and 10 of ranges, of a value 20 and 3 ranges; 62 in all. With
    # 36 channels, 9 and 4.5, and 9 and 2 ranges: 30.5.
    assert pages(2, 80).nbytes == 20 + 10 + 20 + 12
    fmt = pages(2, 36, tokens=32)
    assert (fmt.used_bytes, fmt.nbytes) == (32 * 9 + 36 * 4 + 32 * 9 + 32 * 8, 31)
    random = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 32, 36, generator=random).unbind(0)
    decoded = fmt.decode(fmt.encode(keys, values), torch.float32)
    for x, found, axis in zip((keys, values), decoded, (1, 2), strict=True):
        step = (x.amax(axis, keepdim=True) - x.amin(axis, keepdim=True)) / 3
        assert bool(((found - x).abs() <= 0.51 * step + 0.01).all())


def test_groups_that_go_over_the_edge_of_a_page_are_refused():
    asked = StoreConfig(format="kivi")
    assert grouped_pages(asked, 64, 96).tokens == 96
    with pytest.raises(BadInput, match="pages have 48"):
        grouped_pages(asked, 64, 48)
