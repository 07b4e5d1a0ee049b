"""Rotations are orthogonal, follow from their fields alone, and spread what they must spread."""

from __future__ import annotations

from dataclasses import asdict

import pytest

torch = pytest.importorskip("torch")

from kvtune.kernels.lloyd_max import lloyd_max, nearest  # noqa: E402
from kvtune.kernels.rotation import Rotation  # noqa: E402

torch.set_num_threads(1)

EVERY = [
    Rotation("haar", 64),
    Rotation("hadamard", 64),
    Rotation("hadamard", 64, rounds=3, seed=5),
    Rotation("hadamard", 80),
    Rotation("plain", 64),
    Rotation("hadamard", 1),
]


@pytest.mark.parametrize("rotation", EVERY, ids=str)
def test_rotating_back_returns_the_vector_and_keeps_inner_products(rotation):
    x = torch.randn(2, 3, rotation.dim, generator=torch.Generator().manual_seed(1))
    turned = rotation.rotate(x)
    torch.testing.assert_close(rotation.unrotate(turned), x, atol=2e-6, rtol=0)
    torch.testing.assert_close(rotation.rotate(rotation.unrotate(x)), x, atol=2e-6, rtol=0)
    gram = x @ x.transpose(-1, -2)
    torch.testing.assert_close(turned @ turned.transpose(-1, -2), gram, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("rotation", EVERY, ids=str)
def test_a_rotation_is_rebuilt_from_its_fields(rotation):
    x = torch.randn(rotation.dim, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Rotation(**asdict(rotation)).rotate(x), rotation.rotate(x))


def test_seeds_give_other_rotations():
    x = torch.ones(64)
    for kind in ("haar", "hadamard"):
        one, other = Rotation(kind, 64, seed=0).rotate(x), Rotation(kind, 64, seed=1).rotate(x)
        assert (one - other).abs().max() > 0.1


def test_half_precision_is_rotated_in_float32():
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for rotation in EVERY[:3]:
        turned = rotation.rotate(x)
        assert turned.dtype == torch.float32
        assert torch.equal(turned, rotation.rotate(x.float()))


def test_two_rounds_are_one_round_after_another():
    x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first = Rotation("hadamard", 64, rounds=1, seed=9).rotate(x)
    second_signs = Rotation("hadamard", 64, seed=9)._signs(x)[1]
    expected = Rotation("plain", 64).rotate(first * second_signs)
    torch.testing.assert_close(Rotation("hadamard", 64, seed=9).rotate(x), expected)


def test_a_dimension_without_a_power_of_two_says_that_it_runs_as_haar():
    assert Rotation("hadamard", 80).carried_out_as == "haar"
    assert Rotation("hadamard", 128).carried_out_as == "hadamard"
    # Blocks of 16 would leave a vector of one block there; a full rotation spreads it.
    unit = torch.eye(80)[3]
    assert Rotation("hadamard", 80).rotate(unit)[16:].norm() > 0.7


def test_plain_leaves_a_row_of_its_matrix_in_one_channel_and_signs_spread_it():
    row = Rotation("plain", 128).rotate(torch.eye(128)[5])
    assert Rotation("plain", 128).rotate(row).max() == pytest.approx(1.0, abs=1e-6)
    assert Rotation("hadamard", 128).rotate(row).abs().max() < 0.5


def relative_error(x, bits, kind, rounds, draws=60):
    """Mean squared error over signal of x's rotated rows, each coded with N(0, 1) levels."""
    dim = x.shape[-1]
    levels = lloyd_max(bits).tensor(scale=dim**-0.5)
    norm = x.norm(dim=-1, keepdim=True)
    errors = []
    for seed in range(draws):
        rotation = Rotation(kind, dim, rounds, seed)
        coded = levels[nearest(rotation.rotate(x / norm), levels).long()]
        errors.append((rotation.unrotate(coded) * norm - x).square().sum(-1))
    return torch.stack(errors).mean(0) / x.square().sum(-1)


def hard_vectors(dim):
    """Return a unit vector, a Hadamard row, and a vector with two outlier channels."""
    outliers = torch.randn(dim, generator=torch.Generator().manual_seed(4))
    outliers[[7, 70]] *= 20
    row = Rotation("plain", dim).rotate(torch.eye(dim)[5])
    return torch.stack((torch.eye(dim)[9], row, outliers))


@pytest.mark.parametrize("kind", ["hadamard", "haar"])
def test_two_signed_rounds_and_haar_reach_the_error_of_the_codebook(kind):
    for bits, expected in {1: 0.3612, 2: 0.1162, 3: 0.0340, 4: 0.0093}.items():
        errors = relative_error(hard_vectors(128), bits, kind, 2).tolist()
        assert errors == pytest.approx([expected] * 3, rel=0.1), bits


def test_one_round_fails_on_a_unit_vector_and_no_signs_fail_on_a_row():
    one_round = relative_error(hard_vectors(128), 2, "hadamard", 1, draws=5)
    assert float(one_round[0]) == pytest.approx(0.2605, rel=0.01)
    unsigned = relative_error(hard_vectors(128), 2, "plain", 1, draws=1)
    assert float(unsigned[1]) == pytest.approx(0.95, rel=0.05)


def test_fields_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="is 'dct'"):
        Rotation("dct", 64)
    with pytest.raises(ValueError, match="dim must be at least 1"):
        Rotation("haar", 0)
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        Rotation("hadamard", 64, rounds=0)
    with pytest.raises(ValueError, match="power of two but dim is 96"):
        Rotation("plain", 96)
    with pytest.raises(ValueError, match="turns 64 channels but got 32"):
        Rotation("haar", 64).rotate(torch.zeros(32))


@pytest.mark.parametrize(
    ("rotation", "shape"),
    [
        (Rotation("hadamard", 64, rounds=3), (3, 64)),
        (Rotation("haar", 64), (64, 64)),
        (Rotation("hadamard", 80), (80, 80)),
        (Rotation("plain", 64), (0,)),
    ],
    ids=str,
)
def test_its_table_is_one_tensor_for_all_equal_rotations(rotation, shape):
    table = rotation.table(torch.device("cpu"))
    assert tuple(table.shape) == shape
    assert table.data_ptr() == Rotation(**asdict(rotation)).table(torch.device("cpu")).data_ptr()
    if rotation.carried_out_as == "haar":
        x = torch.randn(5, rotation.dim, generator=torch.Generator().manual_seed(1))
        assert torch.equal(rotation.rotate(x), x @ table.T)
