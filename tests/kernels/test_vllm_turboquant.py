"""Levels and bytes are those of vLLM 0.32's own functions, run by Triton's interpreter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvtune.kernels.lloyd_max import lloyd_max  # noqa: E402
from kvtune.kernels.vllm_turboquant import (  # noqa: E402
    decode_key,
    decode_value,
    encode_key,
    encode_value,
    levels,
)

CPU = torch.device("cpu")
KEY = (-10.0, -1, 0, -8, -2, -5, 6, 8, 1, 8, 6, -5, -2, -8, 0, -1)
VALUE = tuple(((5 * i * i + i) % 19 - 6) / 4 for i in range(16))
KEY_BYTES = {
    8: "d2b800d0c0ca4c5038504ccac0d000b8",
    4: "9533771d66848188874d",
    3: "62b2199b0892874d",
}
VALUE_BYTES = {4: "6093f75ee57f3906443400be", 3: "58b85ffac70c923800be"}


def hexadecimal(stored):
    return bytes(stored.tolist()).hex()


@pytest.mark.parametrize("bits", KEY_BYTES)
def test_key_bytes_are_those_that_vllm_writes(bits):
    assert hexadecimal(encode_key(torch.tensor(KEY), bits)) == KEY_BYTES[bits]


@pytest.mark.parametrize("bits", VALUE_BYTES)
def test_value_bytes_are_those_that_vllm_writes(bits):
    assert hexadecimal(encode_value(torch.tensor(VALUE), bits)) == VALUE_BYTES[bits]


@pytest.mark.parametrize("dim", [64, 128])
def test_levels_are_those_of_vllm_and_nearly_lloyd_max(dim):
    """Positive halves as vLLM's solve_lloyd_max prints them, in standard deviations."""
    golden = {
        3: (0.2449836, 0.7556455, 1.3431800, 2.1503496),
        4: (
            *(0.1284277, 0.3881378, 0.6568799, 0.9424482),
            *(1.2562575, 1.6178819, 2.0684472, 2.7309222),
        ),
    }
    for bits, upper in golden.items():
        found = torch.tensor(levels(dim, bits), dtype=torch.float64) * dim**0.5
        torch.testing.assert_close(found[len(upper) :].tolist(), list(upper), atol=1e-6, rtol=0)
        torch.testing.assert_close(found, -found.flip(0))
        optimal = torch.tensor(lloyd_max(bits).centroids, dtype=torch.float64)
        assert 0 < (found - optimal).abs().max() < 0.0017


def test_a_ramp_of_values_comes_back_exactly():
    """Sixteen equally spaced values with a scale that float16 holds: every code is its index."""
    ramp = torch.arange(16.0) / 4 - 2
    stored = encode_value(ramp, 4)
    assert hexadecimal(stored[:8]) == "1032547698badcfe"
    assert torch.equal(decode_value(stored, 16, 4), ramp)


def test_equal_values_come_back_as_float16_holds_them():
    stored = encode_value(torch.full((16,), 0.1), 3)
    assert torch.equal(decode_value(stored, 16, 3), torch.full((16,), 0.1).half().float())


def test_renormalised_keys_have_the_stored_length():
    keys = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * 7
    stored = encode_key(keys, 3)
    length = keys.norm(dim=-1).half().float()
    torch.testing.assert_close(decode_key(stored, 64, 3, True).norm(dim=-1), length)
    assert (decode_key(stored, 64, 3, False).norm(dim=-1) < length * 0.9999).any()


@pytest.mark.parametrize(("bits", "distortion"), [(3, 0.0335), (4, 0.0092)])
def test_gaussian_keys_lose_what_the_levels_must(bits, distortion):
    keys = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
    read = decode_key(encode_key(keys, bits), 64, bits, False)
    found = ((read - keys).square().sum(-1) / keys.square().sum(-1)).mean()
    assert float(found) == pytest.approx(distortion, rel=0.03)


def test_a_key_along_a_row_of_the_transform_is_not_spread():
    """Error 0.72 and 0.59 at 3 and 4 bits: without signs there is nothing that spreads it."""
    row = torch.tensor([1.0, -1.0]).repeat(64)
    for bits, expected in ((3, 0.72), (4, 0.59)):
        read = decode_key(encode_key(row, bits), 128, bits, False)
        found = (read - row).square().sum() / row.square().sum()
        assert float(found) == pytest.approx(expected, abs=0.01)


def test_fp8_keys_saturate():
    stored = encode_key(torch.tensor([1000.0, -1000.0, 1.0, 0.0]), 8)
    assert decode_key(stored, 4, 8, False).tolist() == [448, -448, 1, 0]
