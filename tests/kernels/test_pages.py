"""Page summaries bound every score from above, whatever the page holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvtune.kernels.pages import page_bounds, page_scores  # noqa: E402


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_bounds_by_hand_with_a_page_partly_filled():
    keys = torch.tensor([[[1.0, -1.0], [3.0, -5.0], [2.0, 0.0]]])
    low, high = page_bounds(keys, 2)
    assert low.tolist() == [[[1.0, -5.0], [2.0, 0.0]]]
    assert high.tolist() == [[[3.0, -1.0], [2.0, 0.0]]]
    # max(2*1, 2*3) + max(-1*-5, -1*-1) = 6 + 5; 2*2 + max(-0, -0) = 4.
    assert page_scores(torch.tensor([[2.0, -1.0]]), low, high).tolist() == [[11.0, 4.0]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(1, 17), st.integers(1, 3), st.integers(0, 10_000))
def test_no_key_scores_above_the_bound_of_its_page(tokens, page_tokens, group, seed):
    keys = random(2, tokens, 8, seed=seed)
    queries = random(2 * group, 8, seed=seed + 1)
    bound = page_scores(queries, *page_bounds(keys, page_tokens))
    scores = torch.einsum("hgd,hnd->hgn", queries.reshape(2, group, 8), keys).amax(1)
    owner = torch.arange(tokens) // page_tokens
    assert bound.shape == (2, -(-tokens // page_tokens))
    assert (scores <= bound[:, owner] + 1e-4).all()


def test_bounds_hold_for_many_random_pages_of_real_size():
    keys, queries = random(1, 160, 64), random(1000, 64, seed=1)
    low, high = page_bounds(keys, 16)
    best = (queries @ keys[0].T).reshape(1000, 10, 16).amax(-1)
    bounds = torch.stack([page_scores(query[None], low, high)[0] for query in queries])
    assert (best <= bounds + 1e-3).all()


def test_a_group_is_reduced_by_its_best_or_mean_head():
    low = high = torch.tensor([[[1.0], [2.0]]])
    queries = torch.tensor([[1.0], [-3.0]])
    assert page_scores(queries, low, high).tolist() == [[1.0, 2.0]]
    assert page_scores(queries, low, high, "mean").tolist() == [[-1.0, -2.0]]


def test_half_precision_keys_keep_their_exact_bounds():
    keys = random(2, 5, 4).to(torch.bfloat16)
    low, high = page_bounds(keys, 4)
    assert low.dtype == high.dtype == torch.bfloat16
    assert torch.equal(high[:, 1], keys[:, 4])
    assert page_scores(keys[:, 0], low, high).dtype == torch.float32
