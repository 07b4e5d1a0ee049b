from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.policies.eviction import (
    EvictorContext,
    Seen,
    Span,
    choose_tokens,
    span_members,
    span_owners,
    split_budget,
)
from kvtune.policies.method import LayerShape

torch.set_num_threads(1)

TWO_SPANS = (Span(0, 80, "directive"), Span(80, 100, "defense"))


@st.composite
def budgets(draw):
    """A budget that can be split: counts, floors below them, and a budget between their sums."""
    counts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    floors = [draw(st.integers(0, count)) for count in counts]
    return draw(st.integers(sum(floors), sum(counts))), counts, floors


def test_a_budget_is_shared_in_proportion_to_the_lengths():
    assert split_budget(50, (80, 20), (0, 0)) == [40, 10]


def test_what_rounding_leaves_over_goes_to_the_largest_remainders_and_the_earlier_of_equals():
    # 10 of (7, 7, 6): exactly 3.5, 3.5, 3.0.
    assert split_budget(10, (7, 7, 6), (0, 0, 0)) == [4, 3, 3]
    # 7 of (1, 2, 3, 4): exactly .7, 1.4, 2.1, 2.8.
    assert split_budget(7, (1, 2, 3, 4), (0, 0, 0, 0)) == [1, 1, 2, 3]


def test_a_floor_takes_from_the_part_furthest_above_its_share():
    assert split_budget(50, (80, 20), (0, 18)) == [32, 18]


@given(budgets())
def test_parts_sum_to_the_budget_between_floors_and_counts(case):
    budget, counts, floors = case
    parts = split_budget(budget, counts, floors)
    assert sum(parts) == budget
    assert all(f <= p <= c for f, p, c in zip(floors, parts, counts, strict=True))


@given(budgets())
def test_without_floors_no_part_is_a_token_away_from_its_exact_share(case):
    budget, counts, _ = case
    parts = split_budget(budget, counts, [0] * len(counts))
    for part, count in zip(parts, counts, strict=True):
        assert abs(part - budget * count / sum(counts)) < 1


@pytest.mark.parametrize(("budget", "floors"), [(9, (5, 5)), (31, (0, 0))])
def test_a_budget_that_cannot_be_split_is_refused(budget, floors):
    with pytest.raises(ValueError, match="cannot be split"):
        split_budget(budget, (20, 10), floors)


def test_the_best_scores_are_kept_and_ties_go_to_the_lower_index():
    scores = torch.tensor([[1.0, 3, 3, 2, 3], [0, 0, 0, 0, 0]])
    assert choose_tokens(scores, 2).tolist() == [[1, 2], [0, 1]]


def test_nan_is_worst_and_an_infinite_score_does_not_outrank_what_is_forced():
    scores = torch.tensor([[float("nan"), float("-inf"), float("inf"), 0.0]])
    assert choose_tokens(scores, 3).tolist() == [[1, 2, 3]]
    forced = torch.tensor([[True, False, False, False]])
    assert choose_tokens(scores, 1, forced=forced).tolist() == [[0]]


def test_an_infinite_score_does_not_count_as_forced_in_fair_shares():
    scores = torch.tensor([[float("inf")] * 3 + [0.0]])
    spans = (Span(0, 1), Span(1, 2), Span(2, 3))
    kept = choose_tokens(
        scores, 2, positions=torch.arange(4)[None], spans=spans, fairness="proportional"
    )
    assert kept.shape == (1, 2)


def test_forcing_more_than_the_budget_is_refused_with_both_numbers():
    with pytest.raises(BadInput, match=r"3 tokens must be kept .* budget is 2"):
        choose_tokens(torch.zeros(1, 5), 2, forced=torch.tensor([[True, True, True, False, False]]))


def test_fair_shares_need_positions():
    with pytest.raises(ValueError, match="positions"):
        choose_tokens(torch.zeros(1, 100), 50, spans=TWO_SPANS, fairness="proportional")


def test_fair_eviction_keeps_each_span_in_proportion_whatever_the_scores_say():
    scores = torch.arange(100.0)[None]  # The second span would take 20 of 50.
    kept = choose_tokens(
        scores,
        50,
        positions=torch.arange(100)[None],
        spans=TWO_SPANS,
        fairness="proportional",
    )
    assert kept.tolist() == [[*range(40, 80), *range(90, 100)]]


@given(st.data())
def test_kept_tokens_are_distinct_sorted_and_hold_what_is_forced(data):
    rows, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 24))
    budget = data.draw(st.integers(1, 30))
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    forced = torch.tensor(data.draw(st.lists(flags, min_size=rows, max_size=rows)))
    forced &= forced.cumsum(-1) <= budget
    values = st.lists(st.integers(0, 4), min_size=n, max_size=n)
    scores = torch.tensor(data.draw(st.lists(values, min_size=rows, max_size=rows))).float()
    starts = data.draw(st.lists(st.integers(0, n), max_size=3))
    spans = tuple(Span(start, start + 5) for start in starts)
    fairness = data.draw(st.sampled_from(["none", "proportional"]))
    kept = choose_tokens(
        scores,
        budget,
        forced=forced,
        positions=torch.arange(n)[None],
        spans=spans,
        fairness=fairness,
    )
    assert kept.shape == (rows, min(budget, n))
    assert (kept.diff(dim=-1) > 0).all()
    assert kept.min() >= 0
    assert kept.max() < n
    for row, must in zip(kept.tolist(), forced, strict=True):
        assert set(must.nonzero().flatten().tolist()) <= set(row)


def test_each_head_may_hold_other_positions_of_a_span():
    positions = torch.tensor([[0, 1, 2, 50], [0, 50, 51, 52]])
    spans = (Span(0, 10), Span(50, 60))
    kept = choose_tokens(
        torch.arange(4.0).expand(2, 4),
        2,
        positions=positions,
        spans=spans,
        fairness="proportional",
    )
    # Shares of 2: 1.5 and .5 in the first head (the tie goes to the first span), 2 and 0;
    # .5 and 1.5 in the second, where the tie goes to the first span as well: 1 and 1.
    assert kept.tolist() == [[1, 2], [0, 3]]


def test_a_position_belongs_to_the_first_span_that_covers_it():
    spans = (Span(2, 5), Span(4, 7), Span(90, 95))
    positions = torch.arange(8)
    assert span_owners(positions, spans).tolist() == [3, 3, 0, 0, 0, 1, 1, 3]
    members = [part.tolist() for part in span_members(positions, spans)]
    assert members == [[2, 3, 4], [5, 6], [0, 1, 7]]


def _seen(spans=(), count=6):
    generator = torch.Generator().manual_seed(0)
    shape = LayerShape(0, 1, 4, 2, 8, 8, 4)
    queries = torch.randn(4, count, 8, generator=generator)
    keys = torch.randn(2, count, 8, generator=generator)
    ctx = EvictorContext(shape, 8**-0.5, None, torch.float32, torch.device("cpu"), spans)
    at = torch.arange(count)
    return Seen(queries, at, keys, keys, at[None], ctx)


def test_attention_within_spans_is_that_of_each_span_alone():
    seen = _seen((Span(0, 4, "a"),))
    q, k = seen.queries.numpy().astype(float), seen.keys.numpy().astype(float)
    expected = np.zeros((2, 2, 6))
    for members in ([0, 1, 2, 3], [4, 5]):
        for head in range(4):
            for i in members:
                past = [j for j in members if j <= i]
                logits = k[head // 2][past] @ q[head, i] / np.sqrt(8)
                weights = np.exp(logits - logits.max())
                expected[head // 2, head % 2, past] += weights / weights.sum()
    found = seen.attention_received(within_spans=True).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_attention_received_does_not_depend_on_blocks(monkeypatch):
    whole = _seen().attention_received()
    monkeypatch.setattr("kvtune.policies.eviction.BLOCK_QUERIES", 4)
    torch.testing.assert_close(_seen().attention_received(), whole)
    torch.testing.assert_close(whole.sum(-1), torch.full((2, 2), 6.0))


def test_the_greatest_attention_is_that_of_any_query_and_any_head_of_a_group(monkeypatch):
    monkeypatch.setattr("kvtune.policies.eviction.BLOCK_QUERIES", 4)
    seen = _seen()
    q, k = seen.queries.numpy().astype(float), seen.keys.numpy().astype(float)
    expected = np.zeros((2, 6))
    for head in range(4):
        for i in range(6):
            weights = np.exp(k[head // 2, : i + 1] @ q[head, i] / np.sqrt(8))
            row = expected[head // 2, : i + 1]
            np.maximum(row, weights / weights.sum(), out=row)
    np.testing.assert_allclose(seen.greatest_attention().numpy(), expected, atol=1e-6)


def test_each_head_sees_what_it_holds_up_to_the_query():
    whole = _seen()
    held_at = torch.tensor([[0, 1, 5, 8, 9, 10], [2, 3, 4, 5, 6, 11]])
    seen = replace(whole, key_positions=held_at, query_positions=torch.arange(5, 11))
    found = seen.probabilities()
    for head, positions in enumerate(held_at.tolist()):
        for query in range(6):
            visible = [at <= 5 + query for at in positions]
            assert (found[head, :, query] > 0).tolist() == [visible] * 2


def test_protected_tokens_are_those_in_protected_spans():
    seen = _seen((Span(0, 2, "a"), Span(3, 5, "b", protected=True)))
    assert seen.protected().tolist() == [[False, False, False, True, True, False]]
