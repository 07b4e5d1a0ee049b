"""Packing is exact, and its bytes lie as documented."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvtune.kernels.packing import (  # noqa: E402
    look_up,
    pack_bits,
    packed_bytes,
    table_of_fours,
    unpack_bits,
    unpack_fours,
)

torch.set_num_threads(1)


def bit_stream(codes: list[int], bits: int) -> list[int]:
    """Return the bytes of codes through one big integer, a second way to the same layout."""
    whole = sum(code << (index * bits) for index, code in enumerate(codes))
    return list(whole.to_bytes((len(codes) * bits + 7) // 8, "little"))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_codes_come_back_and_bytes_are_a_little_endian_bit_stream(bits, n, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, size=(2, 3, n), dtype=np.uint8)
    packed = pack_bits(torch.from_numpy(codes), bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, packed_bytes(n, bits))
    assert packed[1, 2].tolist() == bit_stream(codes[1, 2].tolist(), bits)
    assert unpack_bits(packed, bits, n).numpy().tolist() == codes.tolist()


def test_three_codes_of_three_bits_fill_two_bytes_as_worked_by_hand():
    packed = pack_bits(torch.tensor([5, 3, 6], dtype=torch.uint8), 3)
    assert packed.tolist() == [0b10_011_101, 0b1]


def test_bits_above_the_width_never_reach_a_neighbour():
    packed = pack_bits(torch.tensor([255, 0, 255, 0], dtype=torch.uint8), 2)
    assert unpack_bits(packed, 2, 4).tolist() == [3, 0, 3, 0]


def test_a_strided_view_packs_like_its_copy():
    codes = torch.arange(24, dtype=torch.uint8).reshape(4, 6).T
    assert torch.equal(pack_bits(codes, 5), pack_bits(codes.contiguous(), 5))


@pytest.mark.parametrize(("n", "bits", "expected"), [(0, 3, 0), (1, 1, 1), (128, 3, 48), (9, 7, 8)])
def test_packed_bytes_round_up(n, bits, expected):
    assert packed_bytes(n, bits) == expected


@pytest.mark.parametrize("bits", [0, 9])
def test_widths_outside_one_to_eight_are_refused(bits):
    with pytest.raises(ValueError, match=f"1 to 8 but got {bits}"):
        packed_bytes(1, bits)


def test_wrong_dtype_and_wrong_size_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        pack_bits(torch.zeros(4, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="fill 2 bytes but packed has 3"):
        unpack_bits(torch.zeros(3, dtype=torch.uint8), 4, 4)
    with pytest.raises(ValueError, match="at least 0"):
        packed_bytes(-1, 4)


def test_bytes_can_be_counted_where_torch_is_absent():
    code = (
        "import sys; sys.modules['torch'] = None; from kvtune.kernels.packing import packed_bytes; "
        "print(packed_bytes(3, 3))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "2\n"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_fours_are_four_codes_in_one_number(bits, eights, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, size=(2, 8 * eights), dtype=np.uint8)
    fours = unpack_fours(pack_bits(torch.from_numpy(codes), bits), bits, 8 * eights)
    base = 2**bits
    assert fours.tolist() == [
        [
            a + base * b + base**2 * c + base**3 * d
            for a, b, c, d in np.asarray(row, dtype=int).reshape(-1, 4).tolist()
        ]
        for row in codes
    ]


@pytest.mark.parametrize(("bits", "n", "nbytes"), [(5, 8, 5), (3, 4, 2), (4, 8, 3), (4, 0, 0)])
def test_fours_need_few_bits_and_whole_bytes(bits, n, nbytes):
    with pytest.raises(ValueError, match="multiple of 8"):
        unpack_fours(torch.zeros(nbytes, dtype=torch.uint8), bits, n)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_are_looked_up_by_code(bits):
    random = np.random.default_rng(bits)
    codes = torch.from_numpy(random.integers(0, 2**bits, size=(3, 5, 24), dtype=np.uint8))
    levels = torch.randn(2**bits, generator=torch.Generator().manual_seed(0))
    found = look_up(pack_bits(codes, bits), bits, 24, table_of_fours(levels, bits))
    assert torch.equal(found, levels[codes.long()])
