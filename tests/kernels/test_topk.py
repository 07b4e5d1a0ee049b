"""The chosen indices are the largest, the earliest of equals, and sorted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvtune.kernels.topk import top_indices  # noqa: E402

torch.set_num_threads(1)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=0, max_size=40), st.integers(0, 45))
def test_ties_go_to_the_lower_index(values, k):
    expected = sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])
    chosen = top_indices(torch.tensor(values, dtype=torch.float32), k)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == expected


def test_rows_are_chosen_apart_in_any_float_width():
    scores = torch.tensor([[[1.0, 3.0, 2.0, 3.0]], [[0.0, 0.0, 0.0, 0.0]]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert top_indices(scores.to(dtype), 2).tolist() == [[[1, 3]], [[0, 1]]]


def test_nan_ranks_below_every_number():
    nan = float("nan")
    assert top_indices(torch.tensor([nan, -5.0, nan, -6.0]), 2).tolist() == [1, 3]
    assert top_indices(torch.tensor([nan, -5.0, nan]), 2).tolist() == [0, 1]


def test_scores_are_left_as_they_were():
    scores = torch.tensor([float("nan"), 1.0])
    top_indices(scores, 1)
    assert scores.isnan().tolist() == [True, False]


def test_asking_for_too_many_returns_all_and_for_none_returns_none():
    scores = torch.tensor([[2.0, 1.0, 3.0]])
    assert top_indices(scores, 7).tolist() == [[0, 1, 2]]
    assert top_indices(scores, 0).shape == (1, 0)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        top_indices(torch.zeros(3), -1)
