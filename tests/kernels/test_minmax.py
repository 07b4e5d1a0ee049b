"""Min/max quantization keeps its error bound, and shows what grouping is worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvtune.kernels.minmax import dequantize, quantize  # noqa: E402

torch.set_num_threads(1)


def round_trip(x, bits, dim, group, stored_dtype=torch.float16):
    codes, scale, minimum = quantize(x, bits, dim, group, stored_dtype)
    return dequantize(codes, scale, minimum, dim, group)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.sampled_from([-3, -2, -1, 0, 1, 2]),
    st.sampled_from([2, 4]),
    st.floats(-50, 50),
    st.floats(1e-3, 100),
    st.integers(0, 999),
)
def test_error_stays_within_half_a_step(bits, dim, group, mean, spread, seed):
    x = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(seed)) * spread + mean
    codes, scale, minimum = quantize(x, bits, dim, group, torch.float32)
    assert codes.shape == x.shape
    assert codes.dtype == torch.uint8
    assert int(codes.max()) <= 2**bits - 1
    error = (dequantize(codes, scale, minimum, dim, group) - x).abs()
    bound = (scale / 2).repeat_interleave(group, dim) + 1e-5 * (spread + abs(mean))
    assert (error <= bound).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(0, 999))
def test_storing_halves_adds_their_rounding_only(bits, seed):
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed)) * 3 + 5
    codes, scale, minimum = quantize(x, bits, -1, 8)
    assert scale.dtype == minimum.dtype == torch.float16
    assert scale.shape == minimum.shape == (2, 2)
    _, exact_scale, exact_minimum = quantize(x, bits, -1, 8, torch.float32)
    rounding = (minimum.float() - exact_minimum).abs()
    rounding += (2**bits - 1) * (scale.float() - exact_scale).abs()
    bound = (scale.float() / 2 + rounding + 1e-5).repeat_interleave(8, -1)
    assert ((dequantize(codes, scale, minimum, -1, 8) - x).abs() <= bound).all()


def test_codes_are_chosen_against_the_stored_scale():
    """The scale rounds in fp16 by up to 2^-11, which 255 steps would add up to an eighth of one."""
    x = torch.linspace(0, 1000, 256)[None] + 0.123
    codes, scale, minimum = quantize(x, 8, -1, 256)
    best = torch.arange(256) * scale.float() + minimum.float()
    nearest = (x[0, :, None] - best).abs().min(-1).values
    error = (dequantize(codes, scale, minimum, -1, 256)[0] - x[0]).abs()
    torch.testing.assert_close(error, nearest, atol=1e-4, rtol=0)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_grid_points_come_back_exactly(bits):
    grid = -3 + 0.25 * torch.arange(2**bits, dtype=torch.float32)
    x = torch.stack((grid, grid.flip(0)))
    assert torch.equal(round_trip(x, bits, -1, 2**bits), x)


def test_a_worked_example():
    codes, scale, minimum = quantize(torch.tensor([[1.0, 2.0, 5.8, 7.0]]), 2, -1, 4)
    assert scale.tolist() == [[2.0]]
    assert minimum.tolist() == [[1.0]]
    assert codes.tolist() == [[0, 0, 2, 3]]  # 0.5 steps goes to the even code.


@pytest.mark.parametrize("value", [0.0, 1.5, -2.25])
def test_constant_groups_and_single_values_are_exact(value):
    assert torch.equal(round_trip(torch.full((3, 4), value), 2, 0, 3), torch.full((3, 4), value))
    assert torch.equal(round_trip(torch.full((1, 2), value), 4, -1, 1), torch.full((1, 2), value))


def test_spreads_too_small_for_a_half_and_values_too_big_stay_finite():
    tiny = torch.tensor([[0.0, 1e-9]])
    assert (round_trip(tiny, 2, -1, 2) - tiny).abs().max() <= 1e-9
    huge = torch.tensor([[-1e6, 1e6]])
    assert round_trip(huge, 8, -1, 2).isfinite().all()


def test_half_precision_inputs_give_the_codes_of_their_float32_values():
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    for low, wide in zip(quantize(x, 4, 0, 4), quantize(x.float(), 4, 0, 4), strict=True):
        assert torch.equal(low, wide)
    codes, scale, minimum = quantize(x, 4, 0, 4)
    assert dequantize(codes, scale, minimum, 0, 4, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(("bits", "group", "expected"), [
    (2, 32, 0.154), (2, 128, 0.2505), (3, 32, 0.0281), (4, 32, 0.0061),
])  # fmt: skip
def test_error_on_a_normal_distribution(bits, group, expected):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2048, 128))).float()
    error = float((round_trip(x, bits, -1, group) - x).square().mean())
    assert error == pytest.approx(expected, rel=0.03)


def outlier_keys(seed):
    keys = np.random.default_rng(seed).standard_normal((1024, 128))
    keys[:, 7] += 20
    keys[:, 70] *= 10
    return torch.from_numpy(keys).float()


def test_keys_with_outlier_channels_want_groups_along_tokens():
    neighbours = [channel for channel in range(32) if channel != 7]
    channel, token, channel_near, token_near = [], [], [], []
    for seed in range(3):
        keys = outlier_keys(seed)
        by_channel = (round_trip(keys, 2, 0, 32) - keys).square()
        by_token = (round_trip(keys, 2, 1, 32) - keys).square()
        channel.append(float(by_channel.mean()))
        token.append(float(by_token.mean()))
        channel_near.append(float(by_channel[:, neighbours].mean()))
        token_near.append(float(by_token[:, neighbours].mean()))
    assert np.mean(channel) == pytest.approx(0.26, rel=0.1)
    assert np.mean(token) > 4 * np.mean(channel)
    assert np.mean(channel_near) == pytest.approx(0.155, rel=0.05)
    assert np.mean(token_near) > 25 * np.mean(channel_near)


def test_groups_that_do_not_fit_and_odd_widths_are_refused():
    with pytest.raises(ValueError, match="divide the 10 values of dimension 1 but is 4"):
        quantize(torch.zeros(2, 10), 2, -1, 4)
    with pytest.raises(ValueError, match="1 to 8 but got 9"):
        quantize(torch.zeros(2, 4), 9, -1, 4)
