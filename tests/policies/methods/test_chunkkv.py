"""ChunkKV keeps whole chunks, never more than the budget, alike in the layers of a run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from contracts.method import MethodContract  # noqa: E402
from contracts.synthetic_layers import (  # noqa: E402
    attending,
    held,
    layer_cache,
    prompt,
    random_vectors,
)
from contracts.tiny_models import follow, tiny_engine, tokens  # noqa: E402
from pydantic import ValidationError  # noqa: E402

from kvtune.errors import BadInput  # noqa: E402
from kvtune.policies.eviction import Seen, Span  # noqa: E402
from kvtune.policies.method import History, LayerShape  # noqa: E402
from kvtune.policies.method_stack import parse_stack  # noqa: E402
from kvtune.policies.methods.chunkkv import ChunkKV  # noqa: E402

SHAPE = LayerShape(0, 1, 1, 1, 8, 8, 4)


class TestChunkKV(MethodContract):
    samples = (
        "chunkkv:budget_tokens=24,window_tokens=4,chunk_tokens=5",
        "chunkkv:budget_tokens=24,window_tokens=8,chunk_tokens=4,reuse_layers=3",
        "chunkkv:budget_tokens=28,window_tokens=4,chunk_tokens=3,reuse_layers=1,"
        "fairness=proportional",
    )
    block_tokens = 24
    exact = "chunkkv:budget_tokens=41,window_tokens=4"
    ladder = (
        "chunkkv:budget_tokens=12,window_tokens=4,chunk_tokens=4",
        "chunkkv:budget_tokens=32,window_tokens=4,chunk_tokens=4",
        "chunkkv:budget_tokens=56,window_tokens=4,chunk_tokens=4",
        "chunkkv:budget_tokens=64,window_tokens=4,chunk_tokens=4",
    )


def weights_of_last(row):
    """A prompt whose last query attends to the tokens with the weights of `row`."""
    count = len(row)
    rows = [[1.0 / (n + 1)] * (n + 1) for n in range(count - 1)]
    return attending([*rows, row], dim=count)


def test_the_chunks_with_most_attention_are_kept_whole():
    # Chunks of 10 with sums 0.05, 0.50, 0.10, 0.35: best are tokens 10..19 and 30..39.
    row = [0.005] * 10 + [0.05] * 10 + [0.01] * 10 + [0.035] * 10
    row = [x * 0.999 for x in row] + [0.001]
    layer = layer_cache(
        "chunkkv:budget_tokens=21,window_tokens=1,chunk_tokens=10,reuse_layers=1", dim=41 + 1
    )
    vectors = tuple(torch.nn.functional.pad(x, (0, 1)) for x in weights_of_last(row))
    prompt(layer, vectors)
    assert held(layer) == [[*range(10, 20), *range(30, 40), 40]]


def test_many_small_weights_beat_one_large_one_in_another_chunk():
    row = [0.3, 0.001, 0.001, 0.001, 0.1, 0.1, 0.1, 0.1, 0.07, 0.07, 0.07, 0.066]
    row = [x / sum(row) * 0.99 for x in row] + [0.01]
    layer = layer_cache("chunkkv:budget_tokens=5,window_tokens=1,chunk_tokens=4", dim=14)
    vectors = tuple(torch.nn.functional.pad(x, (0, 1)) for x in weights_of_last(row))
    prompt(layer, vectors)
    assert held(layer) == [[4, 5, 6, 7, 12]]


def test_single_tokens_are_those_with_most_attention_summed_over_all_heads_and_queries():
    queries, keys, values = random_vectors(50, query_heads=4, kv_heads=2, seed=5)
    layer = layer_cache(
        "chunkkv:budget_tokens=20,window_tokens=6,chunk_tokens=1", query_heads=4, kv_heads=2
    )
    prompt(layer, (queries, keys, values), chunk_tokens=13)
    total = torch.zeros(44)
    for head in range(4):
        for at in range(44, 50):
            scores = queries[head, at] @ keys[head // 2, : at + 1].T
            total += scores.softmax(-1)[:44]
    best = sorted(total.argsort(descending=True)[:14].tolist())
    assert held(layer) == [best + list(range(44, 50))]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(0, 60),
    st.integers(0, 9),
)
def test_what_is_kept_never_exceeds_the_budget_and_is_as_the_formula_says(
    count, window, chunk, room, seed
):
    budget = window + chunk + room
    method = ChunkKV(budget_tokens=budget, window_tokens=window, chunk_tokens=chunk)
    layer = layer_cache(str(method))
    prompt(layer, random_vectors(count, seed=seed))
    (kept,) = held(layer)
    assert len(kept) == method.history(History(count), SHAPE).tokens
    assert len(kept) <= budget
    assert len(kept) == count or len(kept) > budget - 2 * chunk
    assert kept[-min(window, count) :] == list(range(max(count - window, 0), count))
    if count > budget:
        whole = (count - window) // chunk * chunk
        old = [token for token in kept if token < whole]
        assert all(old[n] // chunk == old[n - n % chunk] // chunk for n in range(len(old)))
        assert kept[len(old) :] == list(range(whole, count))


def test_equal_attention_keeps_the_oldest_chunks():
    queries = torch.zeros(1, 30, 8)
    layer = layer_cache("chunkkv:budget_tokens=14,window_tokens=2,chunk_tokens=4")
    prompt(layer, (queries, queries, queries))
    assert held(layer) == [[*range(12), 28, 29]]


def test_layers_of_a_run_keep_the_same_and_only_its_first_one_scores(monkeypatch):
    scored = []
    original = Seen.attention_received

    def counting(self, **options):
        scored.append(self.ctx.shape.index)
        return original(self, **options)

    monkeypatch.setattr(Seen, "attention_received", counting)
    stack = parse_stack("chunkkv:budget_tokens=20,window_tokens=4,chunk_tokens=4,reuse_layers=2")
    _, sequence = follow(tiny_engine(), stack, tokens(60), tokens(2, 1))
    kept = [held(layer) for layer in sequence.layers]
    assert kept[0] == kept[1]
    assert kept[2] == kept[3]
    assert kept[0] != kept[2]
    assert scored == [0, 2]
    assert sum(len(layer.evictors[0].tensors()) for layer in sequence.layers) == 0
    assert all(
        evictor.run.chunks is None for layer in sequence.layers for evictor in layer.evictors
    )


def test_rows_of_a_batch_choose_for_themselves():
    engine = tiny_engine()
    stack = parse_stack("chunkkv:budget_tokens=20,window_tokens=4,chunk_tokens=4")
    prompts = [tokens(60), tokens(60, 1)]
    sequences = [engine.start(stack) for _ in prompts]
    engine.prefill(sequences, prompts)
    alone = [follow(engine, stack, one, [])[1] for one in prompts]
    found, expected = ([[held(layer) for layer in s.layers] for s in x] for x in (sequences, alone))
    assert found == expected
    assert found[0] != found[1]


def test_a_chunk_with_a_protected_token_is_kept_whole():
    vectors = weights_of_last([0.001] * 8 + [0.124] * 8)
    span = Span(6, 7, "system", protected=True)
    layer = layer_cache(
        "chunkkv:budget_tokens=10,window_tokens=2,chunk_tokens=4", dim=16, spans=(span,)
    )
    prompt(layer, vectors)
    assert held(layer) == [[4, 5, 6, 7, 12, 13, 14, 15]]


def test_more_protected_chunks_than_the_budget_holds_are_refused():
    span = Span(3, 5, "system", protected=True)
    layer = layer_cache("chunkkv:budget_tokens=7,window_tokens=2,chunk_tokens=4", spans=(span,))
    with pytest.raises(BadInput, match="2 chunks of 4 tokens"):
        prompt(layer, random_vectors(18))


def test_fair_chunks_are_shared_among_spans():
    row = [0.001] * 20 + [0.049] * 20
    spans = (Span(0, 20, "one"), Span(20, 40, "two"))
    options = "chunkkv:budget_tokens=18,window_tokens=2,chunk_tokens=2"
    plain = layer_cache(options, dim=40, spans=spans)
    fair = layer_cache(options + ",fairness=proportional", dim=40, spans=spans)
    for layer in (plain, fair):
        prompt(layer, weights_of_last(row))
    # 8 chunks of 19, 10 of which begin in the first span: shares 4.2 and 3.8.
    assert sum(token < 20 for token in held(plain)[0]) == 0
    assert sum(token < 20 for token in held(fair)[0]) == 8


def test_a_budget_without_room_for_a_chunk_is_refused():
    with pytest.raises(ValidationError, match="42 tokens"):
        ChunkKV(budget_tokens=41)
