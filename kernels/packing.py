"""Pack small unsigned codes into bytes and back, exactly, for 1 to 8 bits a code.

torch is imported only where tensors are, so that `packed_bytes` is usable where torch is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtune.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


def packed_bytes(n: int, bits: int) -> int:
    """Return how many bytes `n` codes of `bits` bits fill: `ceil(n * bits / 8)`.

    Raises:
        ValueError: `bits` is not 1 to 8, or `n` is negative.
    """
    _check_bits(bits)
    if n < 0:
        raise ValueError(f"n must be at least 0 but got {n}")
    return (n * bits + 7) // 8


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last dimension, little-endian in bits.

    Bit j of code i becomes bit `i * bits + j` of the stream; byte k holds stream bits 8k to 8k + 7,
    the lowest first. Unused bits of the last byte are 0.

    Args:
        codes: (..., n) uint8. Bits of a code above `bits` are dropped: they never reach a
            neighbour.
        bits: 1 to 8.

    Returns:
        (..., ceil(n * bits / 8)) uint8.

    Raises:
        ValueError: `bits` is not 1 to 8, or `codes` is not uint8.
    """
    _check_bits(bits)
    _check_uint8(codes, "codes")
    n = codes.shape[-1]
    lanes, word_bytes = _word(bits)
    words = -(-n // lanes)
    padded = codes.new_zeros((*codes.shape[:-1], words * lanes))
    padded[..., :n] = codes & ((1 << bits) - 1)
    lane_codes = padded.reshape(*codes.shape[:-1], words, lanes)
    if word_bytes > 1:
        lane_codes = lane_codes.long()
    word = lane_codes[..., 0].clone()
    for lane in range(1, lanes):
        word |= lane_codes[..., lane] << (lane * bits)
    packed = codes.new_empty((*codes.shape[:-1], words, word_bytes))
    for byte in range(word_bytes):
        packed[..., byte] = (word >> (8 * byte)) & 0xFF
    return packed.flatten(-2)[..., : packed_bytes(n, bits)].contiguous()


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """Return the `n` codes that `pack_bits` packed.

    Args:
        packed: (..., ceil(n * bits / 8)) uint8.
        bits: 1 to 8, as packed.
        n: codes per row.

    Returns:
        (..., n) uint8.

    Raises:
        ValueError: `bits` is not 1 to 8, or `packed` is not uint8 of the size that `n` needs.
    """
    _check_bits(bits)
    _check_uint8(packed, "packed")
    if packed.shape[-1] != packed_bytes(n, bits):
        raise ValueError(
            f"{n} codes of {bits} bits fill {packed_bytes(n, bits)} bytes "
            f"but packed has {packed.shape[-1]}"
        )
    lanes, word_bytes = _word(bits)
    words = -(-n // lanes)
    padded = packed.new_zeros((*packed.shape[:-1], words * word_bytes))
    padded[..., : packed.shape[-1]] = packed
    word_parts = padded.reshape(*packed.shape[:-1], words, word_bytes)
    if word_bytes > 1:
        word_parts = word_parts.long()
    word = word_parts[..., 0].clone()
    for byte in range(1, word_bytes):
        word |= word_parts[..., byte] << (8 * byte)
    codes = packed.new_empty((*packed.shape[:-1], words, lanes))
    for lane in range(lanes):
        codes[..., lane] = (word >> (lane * bits)) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :n].contiguous()


def unpack_fours(packed: Tensor, bits: int, n: int) -> Tensor:
    """Return `n` codes four at a time, as numbers to look four values up by in one go.

    Four at a time are c0 + c1 2^bits + c2 2^(2 bits) + c3 2^(3 bits).

    Args:
        packed: (..., n * bits / 8) uint8, by `pack_bits`.
        bits: 1 to 4, as packed.
        n: codes per row, a multiple of 8, at least 8.

    Returns:
        (..., n / 4) int32.

    Raises:
        ValueError: `bits` is not 1 to 4, `n` is no such multiple of 8, or `packed` is not theirs.
    """
    if not 1 <= bits <= 4 or n < 8 or n % 8 or packed.shape[-1] != packed_bytes(n, bits):
        raise ValueError(
            f"fours need 1 to 4 bits and a multiple of 8 codes but there are {n} codes of {bits} "
            f"bits in {packed.shape[-1]} bytes"
        )
    _check_uint8(packed, "packed")
    if bits == 2:
        return packed.int()
    if bits == 4:
        return packed.contiguous().view(torch.int16).int() & 0xFFFF
    parts = packed.reshape(*packed.shape[:-1], n // 8, bits).int()
    word = parts[..., 0].clone()
    for byte in range(1, bits):
        word |= parts[..., byte] << (8 * byte)
    fours = word.new_empty((*word.shape, 2))
    fours[..., 0] = word & ((1 << 4 * bits) - 1)
    fours[..., 1] = word >> (4 * bits)
    return fours.flatten(-2)


def table_of_fours(levels: Tensor, bits: int) -> Tensor:
    """Return what `look_up` needs to read codes of `bits` bits, 1 to 4, as `levels`, float32.

    One number of 16 bytes for each of `unpack_fours`, (2^(4 bits),): picking those takes a third of
    the time of picking rows of four.
    """
    numbers = torch.arange(1 << 4 * bits, device=levels.device)
    shifts = torch.arange(0, 4 * bits, bits, device=levels.device)
    fours = levels[(numbers[:, None] >> shifts) & ((1 << bits) - 1)]
    return fours.view(torch.complex128).flatten()


def look_up(packed: Tensor, bits: int, n: int, table: Tensor) -> Tensor:
    """Return the levels (..., n) float32 of packed codes; arguments as those of `unpack_fours`."""
    fours = unpack_fours(packed, bits, n)
    picked = table.index_select(0, fours.flatten())
    return picked.view(torch.float32).view(*fours.shape[:-1], n)


def _word(bits: int) -> tuple[int, int]:
    """Return (codes, bytes) of the smallest unit that starts and ends on a byte.

    1, 2, 4 and 8 bits fit a whole number of times in one byte, and stay in uint8 arithmetic.
    """
    lanes = 8 // bits if 8 % bits == 0 else 8
    return lanes, lanes * bits // 8


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 to 8 but got {bits}")


def _check_uint8(tensor: Tensor, name: str) -> None:
    # Compared by name, because torch is not imported here.
    if str(tensor.dtype) != "torch.uint8":
        raise ValueError(f"{name} must be uint8 but is {tensor.dtype}")
