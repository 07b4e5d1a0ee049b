"""Keys come back from caches that hold them in orders of their own."""

import pytest

torch = pytest.importorskip("torch")

from kvtune.engines.vllm.plugin.evict.keys import KeyReader  # noqa: E402
from kvtune.errors import BadInput  # noqa: E402

PAGE, HEADS, WIDTH = 32, 3, 64


def plain(keys, values):
    return torch.cat((keys, values), dim=-1)


def transposed(keys, values):
    """All keys before all values, channel by channel, as vLLM's vector kernels on CPU."""
    flat = (keys.transpose(-1, -2).flatten(-2), values.flatten(-2))
    return torch.cat(flat, dim=-1).view(*keys.shape[:-2], PAGE, 2 * WIDTH)


def pairs(keys, values):
    """Two channels of 16 tokens side by side, as matrix units take them."""
    packed = keys.unflatten(-2, (-1, 16)).unflatten(-1, (-1, 2)).transpose(-2, -3)
    flat = (values.flatten(-2), packed.flatten(-4))
    return torch.cat(flat, dim=-1).view(*keys.shape[:-2], PAGE, 2 * WIDTH)


def writer(layout):
    def write(keys, values, cache, slots):
        (page,) = set((slots // PAGE).tolist())
        cache[page] = layout(keys.transpose(0, 1), values.transpose(0, 1))

    return write


def cache(pages, dtype):
    return torch.zeros(pages, HEADS, PAGE, 2 * WIDTH, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [plain, transposed, pairs])
def test_keys_come_back_as_they_were_written(layout, dtype):
    write, held = writer(layout), cache(6, dtype)
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(6, PAGE, HEADS, WIDTH, generator=random).to(dtype)
    for page, each in enumerate(keys):
        write(each, each + 1, held, torch.arange(page * PAGE, (page + 1) * PAGE))
    reader = KeyReader.of(write, cache(2, dtype), WIDTH)
    read = reader.read(held, torch.tensor([[4, 0, 5], [1, 1, 2]]))
    assert torch.equal(read[0], torch.cat([keys[4], keys[0], keys[5]]).transpose(0, 1))
    assert torch.equal(read[1], torch.cat([keys[1], keys[1], keys[2]]).transpose(0, 1))


def test_a_cache_that_does_not_hold_keys_as_they_are_is_refused():
    def halves(keys, values, cache, slots):
        writer(plain)(keys / 2, values, cache, slots)

    with pytest.raises(BadInput, match="cannot read keys back"):
        KeyReader.of(halves, cache(2, torch.float32), WIDTH)
