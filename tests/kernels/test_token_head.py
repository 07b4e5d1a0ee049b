"""Codes, scales and bytes are those of vLLM's per-token-head caches."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtune.kernels.token_head import (  # noqa: E402
    dequantize_fp8_tensor,
    dequantize_int4_rotated,
    dequantize_token_head,
    int4_rotate,
    int4_unrotate,
    quantize_fp8_tensor,
    quantize_token_head,
)

torch.set_num_threads(1)


def heads(shape=(5, 2, 64), seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("fmt", "expected"), [("int4", 136), ("int8", 264), ("fp8", 264)])
def test_a_slot_of_128_channels_takes_the_bytes_that_vllm_reserves(fmt, expected):
    x = heads((1, 1, 128))
    owned = sum(t.numel() * t.element_size() for t in quantize_token_head(x, fmt))
    assert 2 * owned == expected


def test_int8_of_a_worked_example():
    """Absmax 254 gives scale 2: 1/2 rounds away from zero, not to even."""
    data, scale = quantize_token_head(torch.tensor([254.0, 1.0, -1.0, 5.0, -254.0]), "int8")
    assert scale.item() == 2.0
    assert data.tolist() == [127, 1, -1, 3, -127]
    restored = dequantize_token_head(data, scale, "int8")
    assert restored.tolist() == [254, 2, -2, 6, -254]


@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8"])
def test_zero_vectors_stay_zero_and_the_scale_has_a_floor(fmt):
    data, scale = quantize_token_head(torch.zeros(2, 8), fmt)
    assert scale.tolist() == pytest.approx([1e-6, 1e-6], rel=1e-5)
    assert dequantize_token_head(data, scale, fmt).abs().max() == 0


def test_int8_error_stays_within_half_a_step():
    x = heads()
    data, scale = quantize_token_head(x, "int8")
    error = (dequantize_token_head(data, scale, "int8") - x).abs()
    assert (error <= scale[..., None] * 0.50001).all()


def test_fp8_keeps_its_largest_channel_and_three_mantissa_bits():
    x = heads(scale=30)
    data, scale = quantize_token_head(x, "fp8")
    assert data.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(scale, x.abs().amax(-1) / 448)
    restored = dequantize_token_head(data, scale, "fp8")
    normal = x.abs() > scale[..., None] * 2**-6
    assert ((restored - x).abs() / x.abs())[normal].max() <= 2**-4 * 1.001
    assert restored.isfinite().all()


def test_fp8_per_tensor_saturates_instead_of_overflowing():
    x = torch.tensor([1000.0, -1000.0, 1.0, 17.0])
    assert dequantize_fp8_tensor(quantize_fp8_tensor(x)).tolist() == [448, -448, 1, 16]
    assert dequantize_fp8_tensor(quantize_fp8_tensor(x, 4.0), 4.0).tolist() == [1024, -1024, 1, 16]


def sylvester(d):
    h = np.ones((1, 1))
    while len(h) < d:
        h = np.block([[h, h], [h, -h]])
    return h


def vllm_int4_signs(d):
    generator = torch.Generator().manual_seed(0x9E3779B9)
    return (2.0 * torch.bernoulli(torch.full((d,), 0.5), generator=generator) - 1.0).numpy()


def test_int4_equals_a_dense_recipe():
    """H D x, minimum and maximum in 15 steps, the zero point in the scale's low four bits."""
    d = 64
    x = heads((3, d), seed=1)
    rotated = (x.numpy() * vllm_int4_signs(d)) @ sylvester(d).T
    low, high = rotated.min(-1), rotated.max(-1)
    step = (high - low) / 15
    zero = np.floor(-low / step + 0.5)
    codes = np.clip(np.floor(rotated / step[:, None] + zero[:, None] + 0.5), 0, 15)
    data, scale = quantize_token_head(x, "int4")
    assert data.shape == (3, d // 2)
    unpacked = np.stack((data.numpy() & 15, data.numpy() >> 4), -1).reshape(3, d)
    assert (unpacked != codes).mean() < 0.01  # Codes on a border may fall either way in float32.
    assert np.abs(unpacked - codes).max() <= 1
    assert (scale.view(torch.int32) & 15).tolist() == zero.astype(int).tolist()
    np.testing.assert_allclose(scale.numpy(), step, rtol=16 * 2**-23)
    restored = ((unpacked - zero[:, None]) * step[:, None]) @ sylvester(d) / d * vllm_int4_signs(d)
    ours = dequantize_token_head(data, scale, "int4").numpy()
    np.testing.assert_allclose(ours, restored, atol=1e-5)
    assert np.square(ours - x.numpy()).mean() < 0.02


def test_int4_rounds_the_rotated_head_to_the_models_dtype():
    x = heads((40, 64)).bfloat16()
    assert not torch.equal(
        quantize_token_head(x, "int4")[1], quantize_token_head(x.float(), "int4")[1]
    )


def test_int4_turns_blocks_where_the_dimension_is_no_power_of_two():
    x = heads((4, 96))
    data, scale = quantize_token_head(x, "int4")
    restored = dequantize_token_head(data, scale, "int4")
    assert (restored - x).square().mean() < 0.02
    lone = torch.zeros(96)
    lone[40] = 3.0
    kept = dequantize_token_head(*quantize_token_head(lone, "int4"), "int4")
    assert kept[:32].abs().max() == 0
    assert kept[64:].abs().max() == 0


def test_rows_are_quantized_apart():
    x = heads()
    for fmt in ("int8", "int4", "fp8"):
        data, scale = quantize_token_head(x, fmt)
        alone, alone_scale = quantize_token_head(x[2, 1], fmt)
        assert torch.equal(data[2, 1].view(torch.uint8), alone.view(torch.uint8))
        assert torch.equal(scale[2, 1], alone_scale)


def test_unknown_formats_and_odd_heads_are_refused():
    with pytest.raises(ValueError, match="is 'int2'"):
        quantize_token_head(heads(), "int2")
    with pytest.raises(ValueError, match="is 'int2'"):
        dequantize_token_head(torch.zeros(1), torch.zeros(1), "int2")
    with pytest.raises(ValueError, match="even head dimension but got 7"):
        quantize_token_head(torch.zeros(7), "int4")


@pytest.mark.parametrize("width", [64, 80, 96])
def test_int4_in_rotated_axes_is_what_it_stored_rotated(width):
    x = torch.randn(20, width, generator=torch.Generator().manual_seed(0))
    stored = quantize_token_head(x, "int4")
    decoded = dequantize_token_head(*stored, "int4")
    rotated = dequantize_int4_rotated(*stored)
    assert torch.allclose(rotated, int4_rotate(decoded), atol=1e-5)
    assert torch.allclose(int4_unrotate(rotated), decoded, atol=1e-5)
    assert torch.allclose(rotated.norm(dim=-1), decoded.norm(dim=-1))
