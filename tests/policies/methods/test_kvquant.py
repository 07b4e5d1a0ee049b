"""KVQuant: learned ranges and levels, exact outliers and first tokens, and their bytes."""

from __future__ import annotations

import pytest
import torch
from contracts.method import MethodContract
from contracts.tiny_models import follow, tiny_engine, tokens

from kvtune.engines.reference.groups import HeadGroup
from kvtune.errors import BadInput
from kvtune.kernels.rope import apply_rope, cos_sin
from kvtune.policies.calibration import LayerSamples
from kvtune.policies.footprint import footprint
from kvtune.policies.method import History, LayerShape, PlaneShape
from kvtune.policies.method_stack import parse_method, parse_stack
from kvtune.policies.plane import PlaneContext, full_plane


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def samples_of(role, vectors, gradients=None):
    heads, count, width = vectors.shape
    return LayerSamples(
        shape=LayerShape(0, 1, heads, heads, width, width, 4),
        role=role,
        vectors=vectors,
        inputs=torch.zeros(count, 1),
        weight=torch.zeros(heads * width, 1),
        bias=None,
        gradients=torch.ones_like(vectors) if gradients is None else gradients,
    )


def plane_of(text, role, vectors, gradients=None, first_head=0, heads=None):
    method = parse_method(text)
    learned = method.calibrate(samples_of(role, vectors, gradients))
    shape = PlaneShape(role, heads or vectors.shape[0], vectors.shape[2], 4, 0, 1)
    ctx = PlaneContext(
        shape, torch.float32, torch.device("cpu"), {"kvquant": learned}, first_head=first_head
    )
    return method.plane(ctx, full_plane)


def bytes_of(text, role, count, heads=1, width=128, element_bytes=2):
    shape = PlaneShape(role, heads, width, element_bytes, 0, 1)
    return parse_method(text).plane_bytes(shape, History(count), lambda *_: 0)


def mean_squared_error(plane, x):
    plane.append(x)
    return float((plane.read() - x).square().mean())


class TestKVQuant(MethodContract):
    samples = (
        "kvquant",
        "kvquant:bits=2,q_norm=true,exact_tokens=5,outlier_ratio=0.1",
        "kvquant:bits=4,outlier_ratio=0,exact_tokens=0",
    )
    exact = "kvquant:bits=1,outlier_ratio=1"
    ladder = tuple(f"kvquant:bits={bits}" for bits in (1, 2, 4))
    stores_each_token_alone = True
    # A rounding in the seventh digit may put a value on the other side of a border.
    logit_tolerance = 5e-2


@pytest.mark.parametrize("role", ["key", "value"])
def test_all_outliers_or_a_first_token_are_exact(role):
    x = random(2, 40, 32)
    plane = plane_of("kvquant:bits=1,outlier_ratio=1,exact_tokens=0", role, x)
    plane.append(x)
    assert torch.equal(plane.read(), x)
    plane = plane_of("kvquant:bits=2,exact_tokens=5", role, x)
    for piece in x.split(3, dim=1):
        plane.append(piece)
    assert torch.equal(plane.read()[:, :5], x[:, :5])
    assert not torch.equal(plane.read()[:, 5:], x[:, 5:])


class TurningRope:
    """RoPE of base 10,000, as an engine's layers have it."""

    frequencies = 1e4 ** -(torch.arange(0, 32, 2) / 32)

    def rotate(self, x, positions):
        return apply_rope(x, *cos_sin(self.frequencies, positions))

    def unrotate(self, x, positions):
        cos, sin = cos_sin(self.frequencies, positions)
        return apply_rope(x, cos, -sin)


def test_keys_stored_before_the_rotation_come_back_rotated():
    before = random(2, 50, 32)
    positions = torch.arange(50)[None]
    after = TurningRope().rotate(before, positions)
    exact = "kvquant:bits=8,outlier_ratio=1"
    group = HeadGroup(
        plane_of(exact, "key", before), plane_of(exact, "value", before), TurningRope(), False
    )
    group.append(after, before, positions)
    keys, values, _ = group.read()
    torch.testing.assert_close(keys, after, atol=1e-6, rtol=1e-6)
    assert torch.equal(values, before)
    torch.testing.assert_close(group.keys.read(), before, atol=1e-6, rtol=1e-6)


def test_a_shifted_channel_is_easier_before_the_rotation():
    keys = random(1, 512, 32)
    keys[..., 3] += 20
    turned = TurningRope().rotate(keys, torch.arange(512))
    before, after = (
        mean_squared_error(plane_of("kvquant:outlier_ratio=0", "key", x), x) for x in (keys, turned)
    )
    assert before < after / 3


def test_a_channel_has_the_range_that_leaves_its_outliers_out():
    x = torch.linspace(-1, 1, 1001).repeat(1, 4, 1).mT.contiguous() * torch.tensor([1.0, 2, 4, 8])
    x[..., 3] += 5
    learned = parse_method("kvquant:outlier_ratio=0.01").calibrate(samples_of("key", x))
    reach = torch.tensor([[1.0, 2, 4, 8]]) * 0.99
    torch.testing.assert_close(learned["reach"].float(), reach, atol=1e-3, rtol=1e-3)
    middle = torch.tensor([[0.0, 0, 0, 5]])
    torch.testing.assert_close(learned["middle"].float(), middle, atol=1e-3, rtol=1e-3)


def test_two_outliers_of_each_token_are_exact():
    x = random(1, 60, 64)
    spikes = x.clone()
    spikes[:, :, 5] += 40
    spikes[:, :, 9] -= 70
    for role in ("key", "value"):
        # Keys' ranges come from samples without spikes.
        plane = plane_of("kvquant:bits=4,exact_tokens=0", role, x)
        plane.append(spikes)
        error = (plane.read() - spikes).abs()
        assert error[..., [5, 9]].max() == 0, role
        assert error.max() < 0.8, role


def test_a_token_without_its_outliers_gives_a_value_its_range():
    """Levels -1 and 1 of one bit: the range is that of what is left."""
    x = torch.tensor([[[-50.0, 3, 5, 3, 5, 90, 3, 5]]]).repeat(1, 20, 1)
    plane = plane_of("kvquant:bits=1,outlier_ratio=0.01,exact_tokens=0", "value", x)
    plane.append(x)
    torch.testing.assert_close(plane.read(), x)


def test_levels_follow_the_gradients():
    """Where the loss is sensitive, levels lie closer."""
    x = random(1, 2000, 8)
    sensitive = (x > 0.5).float() * 10 + 0.01
    square = {
        name: (plane_of("kvquant:bits=2,outlier_ratio=0", "key", x, weights), x)
        for name, weights in (("fisher", sensitive), ("even", torch.ones_like(x)))
    }
    errors = {}
    for name, (plane, own) in square.items():
        plane.append(own)
        errors[name] = float(((plane.read() - own) * sensitive).square().mean())
    assert errors["fisher"] < 0.7 * errors["even"]


def test_two_values_with_weights_give_the_levels_worked_by_hand():
    """Normalised to [-1, 1], {0, 1, 10} weighted 1000 : 1000 : 1 has centroids 0 and 1.00899."""
    x = torch.tensor([0.0, 1.0, 10.0]).reshape(1, 3, 1)
    gradients = torch.tensor([1000.0, 1000.0, 1.0]).sqrt().reshape(1, 3, 1)
    learned = parse_method("kvquant:bits=1,outlier_ratio=0").calibrate(
        samples_of("key", x, gradients)
    )
    levels = learned["levels"].float() * 5 + 5
    torch.testing.assert_close(levels, torch.tensor([0.0, 1.00899]), atol=3e-3, rtol=0)


@pytest.mark.parametrize("role", ["key", "value"])
def test_q_norm_keeps_mean_and_deviation(role):
    x = random(2, 500, 32)
    x[..., 1] *= 3 if role == "key" else 1
    common = "kvquant:bits=2,exact_tokens=0,outlier_ratio=0"
    off = {}
    for text in (common, f"{common},q_norm=true"):
        plane = plane_of(text, role, x)
        plane.append(x)
        off[text] = abs(float(plane.read().std() / x.std()) - 1)
        assert float((plane.read() - x).mean().abs()) < 0.01
    plain, normed = off.values()
    assert plain > 0.04  # Levels in the middle of their cells shrink what they stand for.
    assert normed < plain / 5


def test_zero_gradients_count_all_samples_alike():
    x = random(1, 300, 8)
    method = parse_method("kvquant")
    none = method.calibrate(samples_of("key", x, torch.zeros_like(x)))
    tiny = method.calibrate(samples_of("key", x, torch.full_like(x, 1e-30)))
    even = method.calibrate(samples_of("key", x))
    assert torch.equal(none["levels"], even["levels"])
    assert torch.equal(tiny["levels"], even["levels"])


def test_samples_without_gradients_are_refused():
    samples = samples_of("key", random(1, 10, 8))
    bare = LayerSamples(
        samples.shape, "key", samples.vectors, samples.inputs, samples.weight, None, None
    )
    with pytest.raises(BadInput, match="gradients"):
        parse_method("kvquant").calibrate(bare)


def test_ranges_of_other_widths_are_refused():
    method = parse_method("kvquant")
    learned = method.calibrate(samples_of("key", random(2, 50, 32)))
    ctx = PlaneContext(
        PlaneShape("key", 2, 16, 4, 0, 1),
        torch.float32,
        torch.device("cpu"),
        {"kvquant": learned},
    )
    with pytest.raises(BadInput, match="32 channels"):
        method.plane(ctx, full_plane)


def test_the_first_tokens_do_not_change_what_is_learned():
    keys = {parse_method(f"kvquant:exact_tokens={n}").calibration_key for n in (0, 1, 5)}
    assert len(keys) == 1
    assert parse_method("kvquant:bits=2").calibration_key not in keys


def test_bytes_are_those_of_the_formula_worked_by_hand():
    # One exact token of 256 B; the others 48 B of codes and two outliers of 2 + 1 B.
    assert bytes_of("kvquant", "key", 1000) == 256 + 999 * (48 + 6)
    assert bytes_of("kvquant", "value", 1000) == 256 + 999 * (48 + 6 + 4)
    # Above 256 channels an index takes two bytes, and 1 % of 512 is two at each end.
    assert bytes_of("kvquant", "key", 2, width=512) == 1024 + 192 + 4 * (2 + 2)
    assert bytes_of("kvquant:exact_tokens=5", "value", 3) == 3 * 256


def test_constants_are_the_ranges_of_channels_and_the_levels():
    method = parse_method("kvquant:q_norm=true")
    assert method.constant_bytes(PlaneShape("key", 8, 128, 2, 0, 1)) == 8 * 128 * 4 + 2 * 8 * 2
    assert method.constant_bytes(PlaneShape("value", 8, 128, 2, 0, 1)) == 2 * 8 * 2


@pytest.mark.parametrize("exact_tokens", [0, 3, 30])
@pytest.mark.parametrize("role", ["key", "value"])
def test_survivors_keep_their_codes(role, exact_tokens):
    x = random(2, 30, 32)
    plane = plane_of(f"kvquant:exact_tokens={exact_tokens}", role, x)
    plane.append(x)
    before = plane.read()
    index = torch.stack([torch.arange(0, 20, 2), torch.arange(20, 30)])
    plane.keep(index)
    expected = torch.stack([before[0, :20:2], before[1, 20:]])
    assert torch.equal(plane.read(), expected)
    method = parse_method(f"kvquant:exact_tokens={exact_tokens}")
    assert plane.nbytes == method.plane_bytes(
        PlaneShape(role, 2, 32, 4, 0, 1), History(10), lambda *_: 0
    )
    plane.append(x[:, :2])
    assert plane.tokens == 12
    assert torch.equal(plane.read()[:, :10], expected)


@pytest.mark.parametrize("role", ["key", "value"])
def test_selected_tokens_are_read_alone_with_the_exact_ones(role):
    x = random(2, 30, 32)
    plane = plane_of("kvquant:exact_tokens=2", role, x)
    plane.append(x)
    index = torch.tensor([[0, 5, 9], [1, 2, 29]])
    found, touched = plane.select(index)
    assert torch.equal(found, torch.stack([plane.read()[0, index[0]], plane.read()[1, index[1]]]))
    shape = PlaneShape(role, 2, 32, 4, 0, 1)
    method = parse_method("kvquant:exact_tokens=2")
    assert touched == method.selected_bytes(shape, History(30), 3)


def test_only_tokens_in_one_form_are_shared():
    x = random(2, 20, 32)
    apart, alike, other = (
        plane_of(f"kvquant:exact_tokens={exact_tokens}", "key", x) for exact_tokens in (2, 0, 0)
    )
    assert not apart.shares_tokens
    apart.append(x)
    with pytest.raises(BadInput, match="cannot be shared"):
        apart.share(0, 7)
    assert alike.shares_tokens
    alike.append(x)
    other.adopt(alike.share(3, 12))
    assert torch.equal(other.read(), alike.read()[:, 3:12])


def test_one_head_alone_is_stored_with_its_own_ranges():
    x = random(3, 40, 32) * torch.tensor([1.0, 10, 100]).reshape(3, 1, 1)
    whole = plane_of("kvquant", "key", x)
    whole.append(x)
    for head in range(3):
        alone = plane_of("kvquant", "key", x, first_head=head, heads=1)
        alone.append(x[head : head + 1])
        assert torch.equal(alone.read()[0], whole.read()[head])


def test_sequences_share_what_was_learned():
    engine = tiny_engine()
    stack = parse_stack("kvquant")
    _, one = follow(engine, stack, tokens(20), tokens(1, 1))
    _, two = follow(engine, stack, tokens(30), tokens(1, 1))
    first, second = (
        {x.data_ptr() for plane in sequence.layers[2].planes() for x in plane.constants.values()}
        for sequence in (one, two)
    )
    assert first == second
    assert one.measured() == footprint(stack, engine.layers, 20, 1)


@pytest.mark.parametrize(
    "evictor", ["h2o:heavy_tokens=8,recent_tokens=12", "snapkv:budget_tokens=24,window_tokens=4"]
)
@pytest.mark.parametrize("decoded", [0, 1, 19])
def test_bytes_are_exact_behind_an_evictor(evictor, decoded):
    engine = tiny_engine()
    stack = parse_stack(f"{evictor} + kvquant:exact_tokens=2")
    _, sequence = follow(engine, stack, tokens(41), tokens(decoded, 1))
    assert sequence.measured() == footprint(stack, engine.layers, 41, decoded)
