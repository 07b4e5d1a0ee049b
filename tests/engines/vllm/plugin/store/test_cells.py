"""Cells have the bytes that their format says, and hold of each vector what the format keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin.store.cells import cells_of
from kvtune.errors import BadInput
from kvtune.kernels.token_head import dequantize_token_head, quantize_token_head
from kvtune.policies.plugin_config import StoreConfig

torch.set_num_threads(1)

FORMATS = {
    "int8": StoreConfig(format="int8"),
    "int4": StoreConfig(format="int4"),
    "turboquant 4": StoreConfig(format="turboquant"),
    "turboquant 3": StoreConfig(format="turboquant", bits_key=3, bits_value=3),
    "turboquant 5 and 2": StoreConfig(format="turboquant", bits_key=5, bits_value=2),
}


def cells(name, width=64, dtype=torch.float32):
    return cells_of(FORMATS[name], width, dtype)


def vectors(tokens, width=64, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, tokens, width, generator=generator).to(dtype).unbind(0)


@pytest.mark.parametrize(
    ("name", "width", "nbytes"),
    [
        # A code a channel and a float32 scale, twice.
        ("int8", 64, 64 + 4 + 64 + 4),
        ("int4", 64, 32 + 4 + 32 + 4),
        # Codes and a float16 norm, twice.
        ("turboquant 4", 64, 32 + 2 + 32 + 2),
        ("turboquant 3", 64, 24 + 2 + 24 + 2),
        ("turboquant 5 and 2", 64, 40 + 2 + 16 + 2),
        ("int8", 128, 264),
        ("int4", 96, 104),
        ("turboquant 3", 128, 100),
        ("turboquant 3", 80, 64),
    ],
)
def test_a_cell_is_as_large_as_its_codes_and_scales(name, width, nbytes):
    assert cells(name, width).nbytes == nbytes
    assert cells(name, width).encode(*vectors(5, width)).shape == (3, 5, nbytes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("width", [64, 80])
def test_attention_in_the_axes_of_the_cells_is_that_over_decoded_vectors(name, width):
    keys, values = vectors(40, width)
    ours = cells(name, width)
    held = ours.encode(keys, values)
    queries = vectors(2, width, seed=1)[0]
    attend = torch.nn.functional.scaled_dot_product_attention
    found = ours.outputs(attend(ours.queries(queries), *ours.decode(held)))
    decoded = [
        part.codec.decode(part.codec.encode(x))
        for part, x in ((ours.key, keys), (ours.value, values))
    ]
    assert torch.allclose(found, attend(queries, *decoded), atol=1e-5)
    for part, x, after in zip((ours.key, ours.value), (keys, values), decoded, strict=True):
        assert not torch.equal(x, after)
        assert part.codec.unrotate(part.read(held)) == pytest.approx(after, abs=1e-5)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_scales_of_a_token_and_head_keep_what_the_kernel_keeps(fmt):
    keys, values = vectors(7)
    ours = cells(fmt)
    decoded = ours.decode(ours.encode(keys, values))
    for part, x, found in zip((ours.key, ours.value), (keys, values), decoded, strict=True):
        expected = dequantize_token_head(*quantize_token_head(x, fmt), fmt)
        assert torch.allclose(part.codec.unrotate(found), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "lost"),
    # Lloyd-Max distortions of a rotated vector of 64 channels.
    [("turboquant 4", (0.0092, 0.0092)), ("turboquant 3", (0.0335, 0.0335))],
)
def test_turboquant_loses_what_theory_says(name, lost):
    given_vectors = vectors(700)
    ours = cells(name)
    found = ours.decode(ours.encode(*given_vectors))
    parts = (ours.key, ours.value)
    for part, x, decoded, share in zip(parts, given_vectors, found, lost, strict=True):
        error = (part.codec.unrotate(decoded) - x).square().sum(-1) / x.square().sum(-1)
        assert float(error.mean()) == pytest.approx(share, rel=0.03)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 9), st.integers(0, 2**20))
def test_a_token_is_stored_as_if_it_were_alone(name, tokens, seed):
    keys, values = vectors(tokens, seed=seed)
    together = cells(name).encode(keys, values)
    for head in range(3):
        for token in range(tokens):
            alone = (x[head : head + 1, token : token + 1] for x in (keys, values))
            assert torch.equal(cells(name).encode(*alone)[0, 0], together[head, token])


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_an_empty_page_are_zeros(name):
    empty = torch.zeros(1, 4, cells(name).nbytes, dtype=torch.uint8)
    assert all(bool((x == 0).all()) for x in cells(name).decode(empty))


def test_bfloat16_is_decoded_to_bfloat16():
    ours = cells("turboquant 4", dtype=torch.bfloat16)
    keys, values = vectors(4, dtype=torch.bfloat16)
    assert {x.dtype for x in ours.decode(ours.encode(keys, values))} == {torch.bfloat16}
    assert ours.queries(keys).dtype == ours.outputs(values).dtype == torch.bfloat16


def test_int4_needs_an_even_number_of_channels():
    with pytest.raises(BadInput, match="two channels a byte"):
        cells("int4", 65)
