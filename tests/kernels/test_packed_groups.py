"""Stored groups: bytes as said, short last groups, and the numbers of the plain arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvtune.kernels.minmax import dequantize, quantize  # noqa: E402
from kvtune.kernels.packed_groups import PackedGroups  # noqa: E402


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.sampled_from(["tokens", "channels"]),
    st.sampled_from([None, 1, 3, 8]),
    st.integers(1, 17),
    st.integers(1, 11),
)
def test_formula_gives_the_bytes_and_the_error_stays_within_half_a_step(bits, along, group, n, w):
    x = torch.randn(2, 3, n, w, generator=torch.Generator().manual_seed(n))
    fmt = PackedGroups(bits, along, group)
    held = fmt.encode(x)
    stored = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    assert stored == 6 * fmt.nbytes(n, w)
    found = fmt.decode(held, w, torch.float32)
    assert found.shape == x.shape
    # Half of the widest step there can be, and float16 rounding of range and minimum.
    step = (x.max() - x.min()) / (2**bits - 1)
    assert float((found - x).abs().max()) <= step / 2 + 0.01


@pytest.mark.parametrize(("along", "dim"), [("tokens", -2), ("channels", -1)])
def test_whole_groups_are_those_of_the_plain_arithmetic(along, dim):
    x = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0))
    fmt = PackedGroups(3, along, 4)
    expected = dequantize(*quantize(x, 3, dim, 4), dim, 4)
    assert torch.equal(fmt.decode(fmt.encode(x), 12, torch.float32), expected)


def test_a_short_last_group_has_its_own_range():
    x = torch.tensor([[0.0, 100.0, 1.0, 2.0, 1.5]])
    held = PackedGroups(8, "channels", 3).encode(x)
    assert held["minimum"].tolist() == [[0.0, 1.5]]
    assert held["scale"].float()[0, 1] == pytest.approx(0.5 / 255, rel=1e-3)


def test_nothing_takes_no_bytes():
    assert PackedGroups(2, "tokens", 32).nbytes(0, 128) == 0
    assert PackedGroups(2, "channels", None).nbytes(0, 128) == 0
