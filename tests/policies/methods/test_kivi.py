"""KIVI: what waits, what is quantized, the bytes of both, and why keys go per channel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contracts.method import MethodContract
from contracts.tiny_models import follow, tiny_engine, tokens

from kvtune.errors import BadInput
from kvtune.policies.footprint import footprint
from kvtune.policies.method import History, PlaneShape
from kvtune.policies.method_stack import parse_method, parse_stack
from kvtune.policies.plane import PlaneContext, full_plane


def plane_of(text, role, heads=2, width=32):
    shape = PlaneShape(role, heads, width, 4, 0, 1)
    ctx = PlaneContext(shape, torch.float32, torch.device("cpu"))
    return parse_method(text).plane(ctx, full_plane)


def bytes_of(text, role, tokens, width=128, element_bytes=2):
    shape = PlaneShape(role, 1, width, element_bytes, 0, 1)
    return parse_method(text).plane_bytes(shape, History(tokens), lambda *_: 0)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestKivi(MethodContract):
    samples = (
        "kivi:key_group_tokens=8,residual_tokens=16",
        "kivi:bits=4,key_group_tokens=16,value_group_channels=24,residual_tokens=32",
        "kivi:bits=3,key_group_tokens=4,value_group_channels=64,residual_tokens=4",
    )
    exact = "kivi:bits=1,residual_tokens=64,key_group_tokens=1"
    ladder = tuple(f"kivi:bits={bits},key_group_tokens=8,residual_tokens=8" for bits in (1, 2, 4))
    # A rounding in the seventh digit may put a value on the other side of a step.
    logit_tolerance = 2e-2


@pytest.mark.parametrize(
    ("tokens", "key_state", "value_state"),
    [
        (1, (0, 1), (0, 1)),
        (127, (0, 127), (0, 127)),
        (128, (128, 0), (0, 128)),
        (129, (128, 1), (1, 128)),
        (255, (128, 127), (127, 128)),
        (256, (256, 0), (128, 128)),
    ],
)
@pytest.mark.parametrize("pieces", ["at once", "one by one", "in sevens"])
def test_keys_wait_in_blocks_and_values_in_a_window(tokens, key_state, value_state, pieces):
    size = {"at once": tokens, "one by one": 1, "in sevens": 7}[pieces]
    x = random(2, tokens, 32)
    for role, (coded, tail) in (("key", key_state), ("value", value_state)):
        plane = plane_of("kivi", role)
        for piece in x.split(size, dim=1):
            plane.append(piece)
        assert (plane.coded, plane.held["tail"].shape[1]) == (coded, tail)
        assert torch.equal(plane.read()[:, coded:], x[:, coded:])


@pytest.mark.parametrize("role", ["key", "value"])
def test_a_prompt_is_stored_as_its_tokens_one_by_one(role):
    x = random(2, 70, 32)
    whole = plane_of("kivi:residual_tokens=32", role)
    single = plane_of("kivi:residual_tokens=32", role)
    whole.append(x)
    for token in x.split(1, dim=1):
        single.append(token)
    assert whole.tensors().keys() == single.tensors().keys()
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, single.tensors()[name]), name


def test_bytes_are_those_of_the_formula_worked_by_hand():
    # 896 keys of 32 B of codes, 28 groups x 128 channels x 4 B of ranges, 104 of 256 B in full.
    assert bytes_of("kivi", "key", 1000) == 28_672 + 14_336 + 26_624 == 69_632
    # 872 values of 32 B of codes and 4 groups x 4 B, 128 of 256 B in full.
    assert bytes_of("kivi", "value", 1000) == 41_856 + 32_768 == 74_624


@pytest.mark.parametrize(("bits", "stored_bits"), [(2, 3.0), (4, 5.0)])
def test_a_long_cache_approaches_the_codes_and_their_ranges(bits, stored_bits):
    tokens = 1 << 20
    both = sum(bytes_of(f"kivi:bits={bits}", role, tokens) for role in ("key", "value"))
    assert both * 8 / (tokens * 2 * 128) == pytest.approx(stored_bits, rel=1e-3)


@pytest.mark.parametrize("role", ["key", "value"])
def test_values_on_the_grid_come_back_exactly(role):
    plane = plane_of("kivi:residual_tokens=32", role)
    x = torch.randint(0, 4, (2, 96, 32), generator=torch.Generator().manual_seed(1)).float() - 1
    x[:, ::16], x[:, 1::16] = -1.0, 2.0  # Every group of 32 tokens spans the whole grid,
    x[..., 0], x[..., 1] = -1.0, 2.0  # and every group of 32 channels.
    if role == "key":
        x[..., 0], x[..., 1] = x[..., 2], x[..., 3]
    plane.append(x)
    assert plane.coded > 0
    assert torch.equal(plane.read(), x)


def test_error_is_at_most_half_a_step_of_the_own_channel_for_keys():
    x = random(1, 64, 32)
    x[..., 7] *= 50
    plane = plane_of("kivi:residual_tokens=32,bits=2", "key", heads=1)
    plane.append(x)
    blocks = x.reshape(2, 32, 32)
    step = (blocks.amax(1) - blocks.amin(1)) / 3
    error = (plane.read() - x).abs().reshape(2, 32, 32).amax(1)
    assert (error <= step / 2 * 1.01).all()


def outlier_keys(seed):
    keys = np.random.default_rng(seed).standard_normal((1024, 128))
    keys[:, 7] += 20
    keys[:, 70] *= 10
    return torch.from_numpy(keys).float()[None]


def test_channels_with_outliers_do_not_spoil_the_others():
    """Keys with a shifted and a wide channel, stored along tokens and, as values are, across."""
    sharing = [channel for channel in range(32) if channel != 7]
    overall, neighbours = {}, {}
    for role in ("key", "value"):
        squares = []
        for seed in range(3):
            plane = plane_of("kivi:residual_tokens=32", role, heads=1, width=128)
            keys = outlier_keys(seed)
            plane.append(torch.cat((keys, torch.zeros(1, 32, 128)), dim=1))
            squares.append((plane.read()[:, :1024] - keys).square())
        error = torch.cat(squares)
        overall[role] = float(error.mean())
        neighbours[role] = float(error[..., sharing].mean())
    assert overall["key"] == pytest.approx(0.26, abs=0.02)
    assert overall["value"] == pytest.approx(1.62, abs=0.1)
    assert overall["value"] >= 4 * overall["key"]
    assert neighbours["key"] == pytest.approx(0.155, abs=0.01)
    assert neighbours["value"] == pytest.approx(4.9, rel=0.1)
    assert neighbours["value"] >= 25 * neighbours["key"]


def test_evicted_values_are_not_quantized_again():
    x = random(2, 50, 32)
    plane = plane_of("kivi:residual_tokens=8,key_group_tokens=8", "value")
    plane.append(x)
    before = plane.read()
    index = torch.stack([torch.arange(0, 50, 2), torch.arange(25)])
    plane.keep(index)
    assert plane.tokens == 25
    assert plane.coded == 17
    assert torch.equal(plane.read(), torch.stack([before[0, ::2], before[1, :25]]))


def test_evicted_keys_are_grouped_anew_with_the_bytes_of_as_many_tokens():
    x = random(2, 50, 32)
    plane = plane_of("kivi:residual_tokens=8,key_group_tokens=8", "key")
    plane.append(x)
    before = plane.read()
    plane.keep(torch.arange(1, 38)[None])
    assert (plane.tokens, plane.coded) == (37, 32)
    assert torch.equal(plane.read()[:, 32:], before[:, 33:38])
    fresh = plane_of("kivi:residual_tokens=8,key_group_tokens=8", "key")
    fresh.append(x[:, :37])
    assert plane.nbytes == fresh.nbytes


def test_blocks_that_no_group_fits_are_refused():
    with pytest.raises(BadInput, match="residual_tokens must be a multiple"):
        parse_stack("kivi:residual_tokens=48")


def test_attention_over_keys_with_outliers_is_closer_per_channel():
    """Mean L1 distance of attention probabilities, 64 random queries."""
    distance = {}
    for role in ("key", "value"):
        found = []
        for seed in range(3):
            plane = plane_of("kivi:residual_tokens=32", role, heads=1, width=128)
            keys = outlier_keys(seed)
            plane.append(torch.cat((keys, torch.zeros(1, 32, 128)), dim=1))
            queries = random(64, 128, seed=seed)
            exact = (queries @ keys[0].T / 128**0.5).softmax(-1)
            rough = (queries @ plane.read()[0, :1024].T / 128**0.5).softmax(-1)
            found.append(float((exact - rough).abs().sum(-1).mean()))
        distance[role] = sum(found) / len(found)
    assert distance["key"] == pytest.approx(0.38, abs=0.05)
    assert distance["value"] == pytest.approx(0.87, abs=0.08)


@pytest.mark.parametrize(
    "evictor", ["h2o:heavy_tokens=8,recent_tokens=12", "snapkv:budget_tokens=24,window_tokens=4"]
)
@pytest.mark.parametrize("decoded", [0, 1, 19])
def test_bytes_are_exact_behind_an_evictor(evictor, decoded):
    engine = tiny_engine()
    stack = parse_stack(f"{evictor} + kivi:key_group_tokens=8,residual_tokens=8")
    _, sequence = follow(engine, stack, tokens(41), tokens(decoded, 1))
    assert sequence.measured() == footprint(stack, engine.layers, 41, decoded)
