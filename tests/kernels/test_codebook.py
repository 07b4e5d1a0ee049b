"""Weighted k-means finds the optimum where it can be checked, and stays near it elsewhere."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvtune.kernels.codebook import weighted_kmeans  # noqa: E402
from kvtune.kernels.lloyd_max import lloyd_max  # noqa: E402

torch.set_num_threads(1)


def centroids(values, weights, k):
    rows = [torch.tensor(row, dtype=torch.float64) for row in (values, weights)]
    return weighted_kmeans(*rows, k).tolist()


def test_worked_examples():
    assert centroids([0, 1, 10], [1, 1, 1], 2) == pytest.approx([0.5, 10])
    # {1, 10} costs 1000/1001 * 81; {0, 1} would cost 2000 / 4.
    assert centroids([0, 1, 10], [1000, 1000, 1], 2) == pytest.approx([0, 1010 / 1001])


def cost(values, weights, levels):
    distance = (np.asarray(values)[:, None] - np.asarray(levels)) ** 2
    return float((np.asarray(weights) * distance.min(-1)).sum())


def least_cost(values, weights, k):
    """Try every way to cut the sorted values into k runs."""
    order = np.argsort(values)
    values, weights = np.asarray(values, float)[order], np.asarray(weights, float)[order]
    best = np.inf
    for cuts in combinations(range(1, len(values)), min(k, len(values)) - 1):
        runs = zip(np.split(values, cuts), np.split(weights, cuts), strict=True)
        best = min(best, cost(values, weights, [np.average(v, weights=w) for v, w in runs]))
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-20, 20), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_few_values_are_clustered_optimally(pairs, k):
    values, weights = zip(*pairs, strict=True)
    found = centroids(values, weights, k)
    assert len(found) == k
    assert found == sorted(found)
    assert cost(values, weights, found) == pytest.approx(least_cost(values, weights, k), abs=1e-9)


def test_many_normal_values_give_the_lloyd_max_levels():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(200_000)).float()
    found = weighted_kmeans(x, torch.ones_like(x), 8)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, lloyd_max(3).centroids, atol=0.03)
    error = cost(x.numpy(), np.ones(len(x)), found.numpy()) / len(x)
    assert error == pytest.approx(lloyd_max(3).distortion, rel=0.02)


def test_a_far_outlier_gets_its_own_level_when_it_pays():
    x = torch.cat((torch.linspace(-1, 1, 5000), torch.tensor([1e4])))
    assert weighted_kmeans(x, torch.ones_like(x), 4)[-1] == 1e4


def test_a_large_common_offset_moves_the_levels_and_nothing_else():
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.rand(3000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = weighted_kmeans(x + 1e6, weights, 8) - 1e6
    torch.testing.assert_close(moved, weighted_kmeans(x, weights, 8), atol=1e-6, rtol=0)


def test_values_of_weight_zero_have_no_say_and_a_weight_of_two_is_two_values():
    assert centroids([0, 5, 10], [1, 0, 1], 2) == [0, 10]
    assert centroids([0, 1, 3, 9], [2, 1, 1, 1], 2) == pytest.approx(
        centroids([0, 0, 1, 3, 9], [1, 1, 1, 1, 1], 2)
    )


def test_fewer_distinct_values_than_levels_repeat_the_largest():
    assert centroids([2, 2, 7], [1, 1, 1], 4) == [2, 7, 7, 7]


def test_input_that_cannot_be_clustered_is_refused():
    with pytest.raises(ValueError, match="two equal rows"):
        centroids([1, 2], [1], 1)
    with pytest.raises(ValueError, match="k must be at least 1"):
        centroids([1, 2], [1, 1], 0)
    with pytest.raises(ValueError, match="above 0"):
        centroids([1, 2], [0, 0], 1)
    with pytest.raises(ValueError, match="weights must be at least 0"):
        centroids([1, 2], [1, -1], 1)
    with pytest.raises(ValueError, match="finite"):
        centroids([1, float("nan")], [1, 1], 1)
