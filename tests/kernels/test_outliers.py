"""Outliers are counted from both ends, chosen without luck, and stored in as few bytes as fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvtune.kernels.outliers import (  # noqa: E402
    extremes,
    index_bytes,
    outlier_counts,
    stored_index,
)


@pytest.mark.parametrize(
    ("ratio", "size", "expected"),
    [
        (0.0, 128, (0, 0)),
        (0.02, 256, (2, 2)),
        (0.02, 64, (1, 1)),
        (0.03, 200, (3, 3)),
        (0.5, 3, (1, 1)),
        (0.5, 1, (0, 0)),
        (1.0, 5, (2, 3)),
        (1.0, 1, (0, 1)),
    ],
)
def test_half_of_the_outliers_is_at_each_end(ratio, size, expected):
    assert outlier_counts(ratio, size) == expected


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1), st.integers(1, 300))
def test_outliers_never_overlap_and_everything_is_all(ratio, size):
    low, high = outlier_counts(ratio, size)
    assert low + high <= size
    assert outlier_counts(1, size) == (size // 2, size - size // 2)


def test_both_ends_are_found_and_ties_go_by_index():
    x = torch.tensor([[5.0, -1.0, 9.0, 0.0, 9.0, -1.0]])
    assert extremes(x, -1, 1, 2).tolist() == [[1, 2, 4]]
    assert extremes(x.T, 0, 2, 1).flatten().tolist() == [1, 5, 4]
    assert extremes(torch.zeros(1, 4), -1, 1, 1).tolist() == [[0, 3]]


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 4)]
)
def test_an_index_takes_as_few_bytes_as_fit_and_comes_back(size, expected):
    index = torch.tensor([0, size // 2, size - 1])
    stored = stored_index(index, size)
    assert stored.element_size() == index_bytes(size) == expected
    assert torch.equal(torch.cat((stored, stored)).long(), torch.cat((index, index)))
