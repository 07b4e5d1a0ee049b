"""TurboQuant stores what it says, and what it learns from the prompt it keeps."""

from __future__ import annotations

import pytest
import torch
from contracts.method import MethodContract

from kvtune.errors import BadInput
from kvtune.policies.footprint import footprint
from kvtune.policies.method import History, LayerShape, PlaneShape
from kvtune.policies.method_stack import MethodStack, parse_stack
from kvtune.policies.methods.turboquant import TurboQuant
from kvtune.policies.plane import FullCodec, PlaneContext, full_plane


class TestTurboQuant(MethodContract):
    samples = (
        "turboquant",
        "turboquant:bits_key=3,bits_value=2,mode_key=prod,rotation=haar,protected_layers=1",
    )
    exact = "turboquant:bits_key=1,bits_value=1,protected_layers=2"  # All of the four layers.
    ladder = (
        "turboquant:bits_key=1,bits_value=1",
        "turboquant:bits_key=2,bits_value=2",
        "turboquant:bits_key=4,bits_value=4",
        "turboquant:bits_key=8,bits_value=8",
    )
    stores_each_token_alone = True


class TestTurboQuantThatLearnsFromThePrompt(MethodContract):
    samples = (
        "turboquant:bits_key=2,bits_value=3,outlier_channels=8,center_keys=true",
        "turboquant:outlier_channels=5,mode_key=prod",
        "turboquant:center_keys=true,protected_layers=1",
    )


def built(role="key", width=128, heads=2, dtype=torch.float32, layer=0, layers=4, **parameters):
    method = TurboQuant(**parameters)
    shape = PlaneShape(role, heads, width, dtype.itemsize, layer, layers)
    return method, shape, method.plane(PlaneContext(shape, dtype, torch.device("cpu")), full_plane)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found, x):
    return float((found - x).square().sum() / x.square().sum())


@pytest.mark.parametrize(
    ("parameters", "token_bytes", "head_bytes"),
    [
        ({"bits_key": 1}, 16 + 2, 0),
        ({"bits_key": 3}, 48 + 2, 0),
        ({"bits_key": 4}, 64 + 2, 0),
        ({"bits_key": 4, "mode_key": "prod"}, 48 + 16 + 4, 0),
        ({"bits_key": 2, "outlier_channels": 32}, 12 + 2 + 24 + 2, 16),
        ({"bits_key": 3, "outlier_channels": 64}, 32 + 2 + 24 + 2, 16),
        ({"bits_key": 4, "center_keys": True}, 66, 128 * 2),
    ],
)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 1000])
def test_bytes_of_a_token_and_of_a_head(parameters, token_bytes, head_bytes, tokens):
    method, shape, plane = built(dtype=torch.bfloat16, **parameters)
    plane.append(gaussian(2, tokens, 128).bfloat16())
    expected = 2 * (tokens * token_bytes + head_bytes)
    assert plane.nbytes == expected
    assert method.plane_bytes(shape, History(tokens), lambda *_: 0) == expected
    assert plane.read().dtype == torch.bfloat16
    index = torch.zeros(2, 1, dtype=torch.long)
    touched = method.selected_bytes(shape, History(tokens), 1)
    assert plane.select(index)[1] == touched == 2 * (token_bytes + head_bytes)


def test_stored_bits_count_the_norms():
    """32 channels at 3 bits and 96 at 2 are 2.25; two norms of 16 bits make it 2.5."""
    split = TurboQuant(bits_key=2, bits_value=3, outlier_channels=32)
    assert split.stored_bits("key", 128) == 2.5
    assert split.stored_bits("value", 128) == 3.5
    assert TurboQuant().stored_bits("key", 128) == 4.125
    assert TurboQuant(mode_key="prod").stored_bits("key", 128) == 4.25


def test_outliers_get_more_bits_and_save_the_others():
    """32 channels six times as wide: 0.1153 at 2 bits, 0.0389 with one bit more for those."""
    x = gaussian(1, 3000, 128)
    x[..., 10:42] *= 6
    errors = []
    for parameters in ({"bits_key": 2}, {"bits_key": 2, "outlier_channels": 32}, {"bits_key": 3}):
        _, _, plane = built(heads=1, **parameters)
        plane.append(x)
        errors.append(relative_error(plane.read(), x))
    assert errors == pytest.approx([0.1153, 0.0389, 0.0337], rel=0.03)


def test_each_head_has_its_own_outliers_through_decoding_and_evictions():
    x = gaussian(2, 40, 64)
    x[0, :, [3, 60]] *= 50
    x[1, :, [0, 17]] *= 50
    _, _, plane = built(width=64, bits_key=2, bits_value=2, outlier_channels=2)
    plane.append(x[:, :30])
    mask = plane.held["outliers"].clone()
    assert _set_bits(mask) == [[3, 60], [0, 17]]
    quiet = x[:, 30:].clone()
    quiet[..., 5] *= 1000
    plane.append(quiet)
    whole = plane.read()
    index = torch.tensor([[0, 7, 33], [2, 30, 39]])
    some, _ = plane.select(index)
    plane.keep(index)
    assert torch.equal(plane.held["outliers"], mask)
    assert torch.equal(plane.read(), some)
    assert torch.equal(some[1], whole[1, [2, 30, 39]])
    plane.clear()
    assert plane.nbytes == 0
    plane.append(quiet)
    assert all(5 in row for row in _set_bits(plane.held["outliers"]))


def _set_bits(mask):
    return [
        [8 * byte + bit for byte, value in enumerate(row) for bit in range(8) if value >> bit & 1]
        for row in mask.tolist()
    ]


def test_equal_channels_leave_the_lower_ones_outliers():
    _, _, plane = built(width=16, outlier_channels=3)
    plane.append(torch.ones(2, 4, 16))
    assert _set_bits(plane.held["outliers"]) == [[0, 1, 2], [0, 1, 2]]


def test_a_mean_that_all_keys_share_costs_no_bits():
    x = gaussian(2, 500, 64)
    x[..., 9] += 100
    errors = {}
    for centred in (False, True):
        _, _, plane = built(width=64, bits_key=3, center_keys=centred)
        plane.append(x)
        errors[centred] = float((plane.read() - x).square().sum(-1).mean()) / 64
    assert errors[True] == pytest.approx(0.0335, rel=0.05)
    assert errors[False] > 50 * errors[True]


def test_leaving_the_mean_out_does_not_change_attention():
    x = gaussian(2, 50, 64)
    x[..., 9] += 20
    _, _, plane = built(width=64, center_keys=True)
    plane.append(x)
    queries = gaussian(2, 8, 64, seed=3) / 8
    keys = plane.read()
    without = keys - plane.held["mean"].unsqueeze(1)
    torch.testing.assert_close(
        (queries @ without.mT).softmax(-1), (queries @ keys.mT).softmax(-1), atol=1e-6, rtol=1e-4
    )
    assert (queries @ without.mT - queries @ keys.mT).abs().max() > 0.1


def test_values_have_no_mean_and_no_sketch():
    method, shape, plane = built("value", center_keys=True, mode_key="prod", bits_key=3)
    plane.append(gaussian(2, 9, 128))
    assert set(plane.tensors()) == {"codes", "norm"}
    assert plane.nbytes == method.plane_bytes(shape, History(9), lambda *_: 0) == 2 * 9 * 66


@pytest.mark.parametrize("protected", [0, 1, 2, 9])
def test_protected_layers_stay_in_full_precision(protected):
    full = set()
    for layer in range(6):
        plane = built(layer=layer, layers=6, protected_layers=protected)[2]
        if isinstance(getattr(plane, "codec", None), FullCodec):
            full.add(layer)
    assert full == {n for n in range(6) if n < protected or n >= 6 - protected}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("turboquant", 16 * 4 + 2 * 32 * 4),
        ("turboquant:bits_value=2", (16 + 4) * 4 + 2 * 32 * 4),
        ("turboquant:rotation=haar", 16 * 4 + 32 * 32 * 4),
        ("turboquant:mode_key=prod", (8 + 16) * 4 + 2 * 2 * 32 * 4),
        (
            "turboquant:outlier_channels=8",
            (16 + 32) * 4 + (24 * 24 + 2 * 8) * 4,
        ),
        ("turboquant:protected_layers=2", 0),
    ],
)
def test_tables_are_counted_once_for_all_layers(text, expected):
    layers = [LayerShape(n, 4, 4, 2, 32, 32, 4) for n in range(4)]
    assert footprint(parse_stack(text), layers, 10).constant_bytes == expected


def test_only_what_learns_from_the_prompt_is_private():
    assert TurboQuant().publish == "fingerprint"
    assert TurboQuant(center_keys=True).publish == "never"
    assert TurboQuant(outlier_channels=8).publish == "never"
    assert TurboQuant(seed=1).fingerprint != TurboQuant().fingerprint


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"mode_key": "prod", "bits_key": 1}, "at least 2"),
        ({"bits_value": 8, "outlier_channels": 4}, "9 bits"),
        ({"bits_key": 9}, "less than or equal to 8"),
    ],
)
def test_bits_that_cannot_be_stored_are_refused(parameters, reason):
    with pytest.raises(ValueError, match=reason):
        TurboQuant(**parameters)


def test_more_outliers_than_channels_are_refused():
    with pytest.raises(BadInput, match="outlier_channels=32 leaves none"):
        built(width=32, outlier_channels=32)


def test_tokens_of_a_plane_that_learned_are_not_shared():
    _, _, plane = built(center_keys=True)
    plane.append(gaussian(2, 9, 128))
    with pytest.raises(BadInput, match="cannot be shared"):
        plane.share(0, 4)


def test_the_stack_writes_itself_down():
    text = "turboquant:bits_key=3,mode_key=prod,center_keys=True"
    assert str(MethodStack((TurboQuant(bits_key=3, mode_key="prod", center_keys=True),))) == text
