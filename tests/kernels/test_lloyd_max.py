"""Codebooks equal the published ones, and satisfy the two conditions that define them."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtune.kernels.lloyd_max import lloyd_max, nearest  # noqa: E402

torch.set_num_threads(1)


@pytest.mark.parametrize(("bits", "positive"), [
    (1, [0.79788]),
    (2, [0.45278, 1.51042]),
    (3, [0.24509, 0.75601, 1.34391, 2.15195]),
    (4, [0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259]),
])  # fmt: skip
def test_levels_for_a_normal_distribution(bits, positive):
    levels = lloyd_max(bits).centroids
    np.testing.assert_allclose(levels[2 ** (bits - 1) :], positive, atol=5e-6)
    np.testing.assert_allclose(levels, [-level for level in reversed(levels)])


@pytest.mark.parametrize(("dim", "expected"), [
    (None, [0.36338, 0.11748, 0.03455, 0.00950]),
    (128, [0.3612, 0.1162, 0.0340, 0.0093]),
    (64, [0.3586, 0.1148, 0.0335, 0.0092]),
])  # fmt: skip
def test_distortions(dim, expected):
    tolerance = 1e-3 if dim is None else 0.02
    distortions = [lloyd_max(bits, dim).distortion for bits in (1, 2, 3, 4)]
    np.testing.assert_allclose(distortions, expected, rtol=tolerance)


def fixed_point(bits):
    """The appendix's iteration: levels become cell means, borders become midpoints."""
    levels = np.linspace(-2.5, 2.5, 2**bits)
    for _ in range(2_000):
        borders = np.concatenate(([-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]))
        density = np.exp(-(borders**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * math.erfc(-b / math.sqrt(2)) for b in borders])
        moved = -np.diff(density) / np.diff(below)
        done = np.abs(moved - levels).max() < 1e-13
        levels = moved
        if done:
            break
    return levels


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_newton_finds_what_the_fixed_point_iteration_finds(bits):
    np.testing.assert_allclose(lloyd_max(bits).centroids, fixed_point(bits), atol=1e-8)


@pytest.mark.parametrize("bits", [1, 5, 8])
def test_every_level_is_the_mean_of_its_cell(bits):
    levels = np.array(lloyd_max(bits).centroids)
    assert len(levels) == 2**bits
    assert (np.diff(levels) > 0).all()
    t = np.linspace(-9, 9, 400_001)
    weight = np.exp(-(t**2) / 2)
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, t)
    mass = np.bincount(cell, weight)
    np.testing.assert_allclose(np.bincount(cell, weight * t) / mass, levels, atol=1e-4)
    error = (weight * (t - levels[cell]) ** 2).sum() / weight.sum()
    assert lloyd_max(bits).distortion == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("dim", [4, 5, 80, 128, 1024])
def test_every_dimension_of_the_sphere_has_its_codebook(dim):
    t = np.linspace(-1, 1, 100_001) * math.sqrt(dim)
    weight = np.maximum(1 - t**2 / dim, 0) ** ((dim - 3) / 2)
    for bits in (1, 8):
        levels = np.array(lloyd_max(bits, dim).centroids)
        cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, t)
        means = np.bincount(cell, weight * t) / np.bincount(cell, weight)
        np.testing.assert_allclose(means, levels, atol=4e-3)
        error = (weight * (t - levels[cell]) ** 2).sum() / weight.sum()
        assert lloyd_max(bits, dim).distortion == pytest.approx(error, rel=2e-3)


def test_a_high_dimensional_sphere_is_nearly_normal_and_a_low_one_is_easier():
    assert lloyd_max(3, 1024).distortion == pytest.approx(lloyd_max(3).distortion, rel=3e-3)
    assert lloyd_max(3, 4).distortion < lloyd_max(3, 64).distortion < lloyd_max(3).distortion


def test_nearest_equals_a_search_over_all_levels():
    levels = lloyd_max(3).tensor(scale=0.5)
    x = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0)).transpose(0, 2)
    codes = nearest(x, levels)
    assert codes.dtype == torch.uint8
    assert torch.equal(codes.long(), (x[..., None] - levels).abs().argmin(-1))
    assert torch.equal(nearest(x.bfloat16(), levels), nearest(x.bfloat16().float(), levels))


def test_every_level_is_its_own_nearest_and_the_ends_take_what_lies_beyond():
    levels = lloyd_max(8).tensor()
    assert nearest(levels, levels).tolist() == list(range(256))
    assert nearest(torch.tensor([-99.0, 99.0]), levels).tolist() == [0, 255]


def test_scaled_levels_fit_unit_vectors():
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    x /= x.norm(dim=-1, keepdim=True)
    book = lloyd_max(2, 128)
    levels = book.tensor(scale=128**-0.5)
    error = (levels[nearest(x, levels).long()] - x).square().sum(-1).mean()
    assert float(error) == pytest.approx(book.distortion, rel=0.01)


def test_widths_and_dimensions_out_of_range_are_refused():
    with pytest.raises(ValueError, match="1 to 8 but got 9"):
        lloyd_max(9)
    with pytest.raises(ValueError, match="at least 4 but got 3"):
        lloyd_max(2, 3)
    with pytest.raises(ValueError, match="257 centroids"):
        nearest(torch.zeros(1), torch.linspace(0, 1, 257))
