"""A key's redundancy is how much the others resemble it, the newest copy never counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvtune.kernels.redundancy import key_redundancy  # noqa: E402


def by_hand(keys, threshold):
    """Row by row in numpy, for one head [n, d]."""
    count = len(keys)
    unit = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12)
    total = np.zeros(count)
    for i in range(count):
        row = unit @ unit[i]
        row[i] = 0.0
        copies = [j for j in range(count) if row[j] > threshold]
        if copies:
            row[copies[-1]] = 0.0
        total += row
    return total / count


def test_the_oldest_copy_is_the_most_redundant_and_the_newest_is_not():
    keys = torch.eye(4)[[0, 1, 0, 2, 0, 3]][None]
    found = key_redundancy(keys, 0.5)
    torch.testing.assert_close(found, torch.tensor([[1 / 3, 0, 1 / 6, 0, 0, 0]]))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.floats(-1, 1), st.integers(0, 10_000))
def test_blocks_of_any_size_give_what_one_row_at_a_time_gives(count, block, threshold, seed):
    keys = np.random.default_rng(seed).standard_normal((2, count, 3))
    found = key_redundancy(torch.from_numpy(keys), threshold, block=block)
    expected = np.stack([by_hand(head, threshold) for head in keys])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_zero_keys_resemble_nothing():
    keys = torch.zeros(1, 4, 8)
    assert key_redundancy(keys, 0.5).tolist() == [[0.0] * 4]
    assert key_redundancy(keys[:, :1], 0.5).tolist() == [[0.0]]


def test_what_all_keys_share_hides_copies_until_it_is_taken_off():
    keys = torch.eye(4)[[0, 1, 0, 2, 0]][None] + 50.0
    plain = key_redundancy(keys, 0.5)
    centred = key_redundancy(keys, 0.5, centre=True)
    assert (plain[0, 0] - plain[0, 1]).abs() < 0.01
    assert centred[0, 0] > centred[0, 1] + 0.5


def test_half_precision_keys_are_compared_in_float32():
    keys = torch.eye(4, dtype=torch.bfloat16)[[0, 1, 0]][None]
    found = key_redundancy(keys, 0.5)
    assert found.dtype == torch.float32
    assert found.tolist() == [[0.0, 0.0, 0.0]]
