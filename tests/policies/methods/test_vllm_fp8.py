"""vLLM's fp8 cache: a byte a number, three mantissa bits, saturation."""

import pytest
import torch
from contracts.method import MethodContract

from kvtune.policies.method import History, PlaneShape
from kvtune.policies.methods.vllm_fp8 import VllmFp8
from kvtune.policies.plane import PlaneContext, full_plane


class TestVllmFp8(MethodContract):
    samples = ("vllm-fp8", "vllm-fp8:key_scale=0.5,value_scale=2.0")
    ladder = ("vllm-fp8:key_scale=0.001,value_scale=0.001", "vllm-fp8")
    stores_each_token_alone = True


def stored(method, role, x):
    shape = PlaneShape(role, x.shape[0], x.shape[2], 4, 0, 4)
    plane = method.plane(PlaneContext(shape, torch.float32, torch.device("cpu")), full_plane)
    plane.append(x)
    return plane


def test_numbers_are_rounded_to_three_mantissa_bits_and_cut_at_448():
    x = torch.tensor([[[17.0, 1.0625, -1000.0, 0.0]]])
    assert stored(VllmFp8(), "key", x).read().tolist() == [[[16.0, 1.0, -448.0, 0.0]]]


def test_keys_and_values_have_their_own_scale():
    method = VllmFp8(key_scale=4.0, value_scale=0.5)
    x = torch.tensor([[[1000.0]]])
    assert stored(method, "key", x).read().item() == 1024.0
    assert stored(method, "value", x).read().item() == 224.0


def test_a_slot_of_128_channels_takes_256_bytes():
    keys = PlaneShape("key", 1, 128, 2, 0, 4)
    assert 2 * VllmFp8().plane_bytes(keys, History(1), lambda *_: 0) == 256


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_divides_nothing_is_refused(scale):
    with pytest.raises(ValueError, match="key_scale"):
        VllmFp8(key_scale=scale)
