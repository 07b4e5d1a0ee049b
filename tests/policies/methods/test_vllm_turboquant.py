"""vLLM's TurboQuant presets: bytes of a slot, layers in full precision, head sizes."""

from __future__ import annotations

import pytest
import torch
from contracts.method import MethodContract

from kvtune.errors import BadInput
from kvtune.policies.footprint import ROLES, footprint
from kvtune.policies.method import History, LayerShape
from kvtune.policies.method_stack import MethodStack
from kvtune.policies.methods.vllm_turboquant import PRESETS, VllmTurboQuant
from kvtune.policies.plane import FullCodec, PlaneContext, full_plane

SLOTS = {"k8v4": 196, "4bit_nc": 134, "k3v4_nc": 118, "3bit_nc": 102}


class TestVllmTurboQuant(MethodContract):
    samples = (
        "vllm-turboquant:boundary_layers=1",
        *(f"vllm-turboquant:preset={preset},boundary_layers=0" for preset in SLOTS),
    )
    exact = "vllm-turboquant:preset=3bit_nc,boundary_layers=2"  # All of the four layers.
    ladder = (
        "vllm-turboquant:preset=3bit_nc,boundary_layers=0",
        "vllm-turboquant:preset=4bit_nc,boundary_layers=0",
        "vllm-turboquant:preset=k8v4,boundary_layers=0",
    )
    stores_each_token_alone = True
    # A rounding in the seventh digit may put a value on the other side of a step.
    logit_tolerance = 2e-2


def layer(index=5, layers=32, width=128, element_bytes=2):
    return LayerShape(index, layers, 4, 1, width, width, element_bytes)


def planes(method, shape):
    return [
        method.plane(
            PlaneContext(shape.plane(role), torch.float32, torch.device("cpu")), full_plane
        )
        for role in ROLES
    ]


def none(*_):
    return 0


@pytest.mark.parametrize("preset", SLOTS)
def test_a_slot_takes_the_bytes_that_vllm_reserves(preset):
    method = VllmTurboQuant(preset=preset)
    both = planes(method, layer())
    for plane in both:
        plane.append(torch.randn(1, 1, 128, generator=torch.Generator().manual_seed(0)))
    assert sum(plane.nbytes for plane in both) == SLOTS[preset]
    assert (
        sum(method.plane_bytes(layer().plane(role), History(1), none) for role in ROLES)
        == (SLOTS[preset])
    )


def test_a_slot_of_an_odd_size_is_padded_and_read_back_without_the_padding():
    """66 + 33 + 4 = 103 bytes become 104."""
    method = VllmTurboQuant(preset="k8v4")
    keys, values = planes(method, layer(width=66))
    x = torch.arange(66.0).reshape(1, 1, 66) / 13 - 2
    keys.append(x)
    values.append(x)
    assert keys.nbytes + values.nbytes == 104
    torch.testing.assert_close(values.read(), x, atol=0.5 * 5 / 15 + 2e-3, rtol=0)
    expected = sum(
        method.plane_bytes(layer(width=66).plane(role), History(1), none) for role in ROLES
    )
    assert expected == 104


@pytest.mark.parametrize(
    ("preset", "ratio"), [("k8v4", 2.17), ("4bit_nc", 2.83), ("k3v4_nc", 3.06), ("3bit_nc", 3.34)]
)
def test_ratio_with_four_of_32_layers_in_full_precision(preset, ratio):
    shapes = [layer(index) for index in range(32)]
    stack = MethodStack((VllmTurboQuant(preset=preset),))
    full = footprint(MethodStack(), shapes, 100).resident_bytes
    assert full / footprint(stack, shapes, 100).resident_bytes == pytest.approx(ratio, abs=0.006)


@pytest.mark.parametrize(
    ("layers", "kept"), [(32, {0, 1, 30, 31}), (5, {0, 1, 3, 4}), (3, {0, 2}), (1, set())]
)
def test_layers_at_both_ends_stay_as_they_are(layers, kept):
    method = VllmTurboQuant()
    full = {
        index
        for index in range(layers)
        if all(isinstance(p.codec, FullCodec) for p in planes(method, layer(index, layers)))
    }
    assert full == kept


@pytest.mark.parametrize("width", [96, 4])
def test_head_sizes_that_vllm_cannot_rotate_are_refused(width):
    with pytest.raises(BadInput, match="power of two"):
        planes(VllmTurboQuant(), layer(width=width))


def test_fp8_keys_work_with_any_head_size():
    keys, values = planes(VllmTurboQuant(preset="k8v4"), layer(width=96))
    x = torch.randn(1, 20, 96, generator=torch.Generator().manual_seed(0))
    keys.append(x)
    values.append(x)
    assert (keys.read() - x).abs().max() < 0.13 < (values.read() - x).abs().max() < 0.26


def test_every_preset_is_an_option_of_vllm():
    assert set(PRESETS) == set(SLOTS)
