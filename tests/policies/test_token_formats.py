"""vLLM's per-token-head formats: bytes of a slot, equal numerics, tokens that move alone."""

from __future__ import annotations

import pytest
import torch

from kvtune.errors import BadInput
from kvtune.kernels.token_head import dequantize_token_head, quantize_token_head
from kvtune.policies.method import History, PlaneShape
from kvtune.policies.method_stack import parse_method
from kvtune.policies.plane import PlaneContext, full_plane

SLOTS = {"int8": 264, "fp8": 264, "int4": 136}


def built(fmt, width=128, heads=2, dtype=torch.float32):
    method = parse_method(f"vllm-{fmt}-per-token-head")
    shape = PlaneShape("key", heads, width, 4, 0, 4)
    return method, shape, method.plane(PlaneContext(shape, dtype, torch.device("cpu")), full_plane)


def vectors(heads=2, tokens=9, width=128, seed=0):
    return torch.randn(heads, tokens, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fmt", SLOTS)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 1000])
def test_a_slot_takes_the_bytes_that_vllm_reserves(fmt, tokens):
    method, shape, plane = built(fmt)
    plane.append(vectors(tokens=tokens))
    expected = 2 * tokens * SLOTS[fmt] // 2
    assert plane.nbytes == expected
    assert method.plane_bytes(shape, History(tokens), lambda *_: 0) == expected


@pytest.mark.parametrize("fmt", SLOTS)
def test_tokens_are_stored_alone_and_moved_without_a_change(fmt):
    _, _, plane = built(fmt)
    x = vectors()
    for part in x.split([4, 1, 4], dim=1):
        plane.append(part)
    expected = dequantize_token_head(*quantize_token_head(x, fmt), fmt)
    assert torch.equal(plane.read(), expected)
    index = torch.tensor([[0, 3, 8], [1, 2, 5]])
    some, touched = plane.select(index)
    assert touched * 9 == plane.nbytes * 3
    plane.keep(index)
    assert torch.equal(plane.read(), some)
    assert torch.equal(some[1], expected[1, [1, 2, 5]])


@pytest.mark.parametrize("fmt", SLOTS)
def test_vectors_come_back_in_the_compute_dtype(fmt):
    _, _, plane = built(fmt, dtype=torch.bfloat16)
    plane.append(vectors().bfloat16())
    assert plane.read().dtype == torch.bfloat16


def test_four_bits_lose_more_than_eight():
    x = vectors(tokens=200)
    errors = []
    for fmt in SLOTS:
        _, _, plane = built(fmt)
        plane.append(x)
        errors.append(float((plane.read() - x).square().mean()))
    assert errors[0] < errors[1] < errors[2] < 0.05


@pytest.mark.parametrize(("fmt", "width", "signs"), [("int4", 96, 32), ("int8", 96, 0)])
def test_the_signs_of_a_rotation_are_counted_once_for_all_layers(fmt, width, signs):
    method, shape, plane = built(fmt, width=width)
    assert sum(x.numel() * x.element_size() for x in plane.constants.values()) == signs * 4
    assert method.constants_bytes([shape] * 6) == signs * 4
    again = built(fmt, width=width)[2]
    assert all(again.constants[name] is x for name, x in plane.constants.items())


def test_an_odd_number_of_channels_does_not_pair():
    with pytest.raises(BadInput, match="two channels a byte"):
        built("int4", width=33)
    _, _, plane = built("int8", width=33)
    plane.append(vectors(width=33))
    assert plane.nbytes == 2 * 9 * (33 + 4)
