"""GEAR: what each of its three parts is worth, when blocks are made, and their bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from contracts.method import MethodContract
from contracts.tiny_models import follow, tiny_engine, tokens

from kvtune.policies.footprint import footprint
from kvtune.policies.method import History, PlaneShape
from kvtune.policies.method_stack import parse_method, parse_stack
from kvtune.policies.plane import PlaneContext, full_plane


def plane_of(text, role, heads=2, width=32):
    shape = PlaneShape(role, heads, width, 4, 0, 1)
    ctx = PlaneContext(shape, torch.float32, torch.device("cpu"))
    return parse_method(text).plane(ctx, full_plane)


def bytes_of(text, role, at_once, appended=0, width=128, element_bytes=2):
    shape = PlaneShape(role, 1, width, element_bytes, 0, 1)
    return parse_method(text).plane_bytes(shape, History(at_once, appended), lambda *_: 0)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(plane, x):
    """Squared error over squared size."""
    return float((plane.read() - x).square().sum() / x.square().sum())


class TestGear(MethodContract):
    samples = (
        "gear:group_values=16,buffer_tokens=16",
        "gear:backbone=kcvt,bits=4,buffer_tokens=8,outlier_ratio=0.1,generated_rank=0",
        "gear:bits=3,group_values=24,buffer_tokens=32,outlier_ratio=0,prompt_rank=40",
    )
    exact = "gear:outlier_ratio=1,buffer_tokens=4"
    ladder = tuple(
        f"gear:bits={bits},buffer_tokens=8,group_values=16,outlier_ratio={ratio},"
        f"prompt_rank={rank},generated_rank={rank}"
        for bits, ratio, rank in ((1, 0, 0), (2, 0, 2), (4, 0.1, 4))
    )
    # A rounding in the seventh digit may put a value on the other side of a step.
    logit_tolerance = 5e-2


def spiky_keys():
    """Random keys with a rank-1 part, 1 % of them ten times as large."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((256, 128))
    keys += 2 * np.outer(rng.standard_normal(256), rng.standard_normal(128))
    keys[rng.random((256, 128)) < 0.01] *= 10
    return torch.from_numpy(keys).float()[None]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("outlier_ratio=0,prompt_rank=0", 0.433),
        ("outlier_ratio=0,prompt_rank=4", 0.287),
        ("outlier_ratio=0.02,prompt_rank=0", 0.107),
        ("outlier_ratio=0.02,prompt_rank=4", 0.085),
    ],
)
def test_rank_and_outliers_each_take_their_share_of_the_error(parameters, expected):
    keys = spiky_keys()
    plane = plane_of(f"gear:{parameters}", "key", heads=1, width=128)
    plane.append(keys)
    # The references are truncated singular values; power iteration comes close.
    assert relative_error(plane, keys) == pytest.approx(expected, rel=0.05, abs=5e-4)


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("text", ["prompt_rank=32,generated_rank=32", "outlier_ratio=1"])
def test_full_rank_or_all_outliers_are_exact(role, text):
    x = random(2, 100, 32)
    plane = plane_of(f"gear:bits=1,buffer_tokens=16,{text}", role)
    plane.append(x[:, :50])
    plane.append(x[:, 50:])
    torch.testing.assert_close(plane.read(), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("role", ["key", "value"])
def test_error_does_not_grow_with_rank(role):
    x = random(1, 128, 32) + 2 * random(1, 128, 1, seed=1) * random(1, 1, 32, seed=2)
    errors = []
    for rank in (0, 1, 2, 4, 8, 16, 32):
        plane = plane_of(f"gear:prompt_rank={rank}", role, heads=1)
        plane.append(x)
        errors.append(relative_error(plane, x))
    assert all(more <= less for less, more in itertools.pairwise(errors)), errors
    assert errors[-1] < 1e-9


def test_outliers_are_a_channels_for_keys_and_a_tokens_for_values():
    x = random(1, 64, 32)
    x[0, 10, :] += 100  # One token far off in all channels, then one channel in all tokens.
    for role, exact in (("key", x), ("value", x.transpose(1, 2).repeat(1, 2, 1))):
        width = exact.shape[2]
        plane = plane_of("gear:prompt_rank=0,bits=4", role, heads=1, width=width)
        plane.append(exact)
        far = exact > 50
        assert torch.equal(plane.read()[far], exact[far])
        assert float((plane.read() - exact).abs().max()) < 1


@pytest.mark.parametrize("pieces", [1, 7, 16, 50])
def test_generated_tokens_wait_and_are_compressed_a_buffer_at_once(pieces):
    x = random(2, 90, 32)
    plane = plane_of("gear:buffer_tokens=16", "key")
    plane.append(x[:, :40])
    assert (plane.settled_tokens, plane.held["buffer"].shape[1]) == (32, 8)
    assert plane.held["prompt.left"].shape == (2, 1, 32, 4)
    for piece in x[:, 40:].split(pieces, dim=1):
        plane.append(piece)
    assert (plane.settled_tokens, plane.held["buffer"].shape[1]) == (80, 10)
    assert plane.held["later.left"].shape == (2, 3, 16, 2)
    assert torch.equal(plane.read()[:, 80:], x[:, 80:])
    once = plane_of("gear:buffer_tokens=16", "key")
    once.append(x[:, :40])
    once.append(x[:, 40:])
    torch.testing.assert_close(plane.read(), once.read(), atol=1e-4, rtol=1e-4)


def test_a_prompt_shorter_than_the_buffer_is_not_touched():
    x = random(2, 63, 32)
    plane = plane_of("gear", "value")
    plane.append(x)
    assert torch.equal(plane.read(), x)
    assert plane.nbytes == 2 * 63 * 32 * 4


def test_bytes_are_those_of_the_formula_worked_by_hand():
    codes = 1024 * 32 + 16 * 128 * 4  # 2 bits and 16 groups of 64 tokens a channel,
    sparse = 128 * 20 * (2 + 2)  # ten largest and ten smallest of each channel's 1,024 tokens,
    rank = 4 * (1024 + 128) * 2
    assert bytes_of("gear", "key", 1024) == codes + sparse + rank
    assert rank * 8 / (1024 * 128) == pytest.approx(0.56, abs=0.005)
    assert sparse * 8 / (1024 * 128) == pytest.approx(0.64, abs=0.02)
    codes = 1024 * (32 + 2 * 4)  # values have 2 groups of 64 channels a token,
    sparse = 1024 * 2 * (2 + 1)  # and one value at each end, whose index fits in a byte.
    assert bytes_of("gear", "value", 1024) == codes + sparse + rank


def test_a_block_of_generated_tokens_costs_its_own_rank():
    more = bytes_of("gear:outlier_ratio=0", "key", 1024, 64) - bytes_of(
        "gear:outlier_ratio=0,generated_rank=0", "key", 1024, 64
    )
    assert more == 2 * (64 + 128) * 2
    assert more * 8 / (64 * 128) == pytest.approx(0.75)


def test_survivors_are_compressed_anew_as_one_block():
    x = random(2, 100, 32)
    plane = plane_of("gear:buffer_tokens=16", "key")
    plane.append(x[:, :50])
    plane.append(x[:, 50:])
    plane.keep(torch.arange(0, 100, 2)[None])
    assert plane.tokens == 50
    assert plane.held["prompt.left"].shape == (2, 1, 48, 4)
    assert not any(name.startswith("later") for name in plane.held)
    assert plane.nbytes == 2 * bytes_of("gear:buffer_tokens=16", "key", 50, 0, 32, 4)


def test_what_is_stored_of_a_prompt_is_never_shared():
    assert parse_method("gear").publish == "never"


@pytest.mark.parametrize(
    "evictor", ["h2o:heavy_tokens=8,recent_tokens=12", "snapkv:budget_tokens=24,window_tokens=4"]
)
@pytest.mark.parametrize("decoded", [0, 1, 19])
def test_bytes_are_exact_behind_an_evictor(evictor, decoded):
    engine = tiny_engine()
    stack = parse_stack(f"{evictor} + gear:buffer_tokens=8")
    _, sequence = follow(engine, stack, tokens(41), tokens(decoded, 1))
    assert sequence.measured() == footprint(stack, engine.layers, 41, decoded)
