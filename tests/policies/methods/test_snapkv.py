import numpy as np
import pytest
import torch
from contracts.method import MethodContract
from contracts.synthetic_layers import (
    attending,
    decode,
    held,
    layer_cache,
    prompt,
    random_vectors,
)
from contracts.tiny_models import follow, tiny_engine, tokens

from kvtune.errors import BadInput
from kvtune.policies.eviction import Span
from kvtune.policies.method import History
from kvtune.policies.method_stack import parse_method, parse_stack

NONE = 1e-9
LOOKED_AT = [NONE, NONE, 0.9, NONE, NONE, 0.1, NONE, NONE]
"""What the last of 8 tokens attends to."""


class TestSnapKV(MethodContract):
    samples = (
        "snapkv:budget_tokens=16,window_tokens=4",
        "snapkv:budget_tokens=31,window_tokens=8,kernel_tokens=7,pooling=max,group_reduce=max",
        "snapkv:budget_tokens=15,window_tokens=5,fairness=proportional",
    )
    exact = "snapkv:budget_tokens=41"
    ladder = tuple(f"snapkv:budget_tokens={n},window_tokens=4" for n in (8, 24, 48, 63))


def looking(row):
    """8 tokens of which the last looks as `row` says, and the others evenly."""
    return attending([[1 / (i + 1)] * (i + 1) for i in range(len(row) - 1)] + [row])


def scores_of(text, vectors, spans=(), **sizes):
    layer = layer_cache(text, spans=spans, **sizes)
    count = vectors[0].shape[1]
    _, seen = layer.prefill(*vectors, torch.arange(count))
    layer.evictors[0].select(seen, "prefill")
    return layer.evictors[0].scratch()["scores"].numpy()


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("avg", [0, 3, 3, 3, 1 / 3, 1 / 3, 1 / 3, 0]), ("max", [0, 9, 9, 9, 1, 1, 1, 0])],
)
def test_scores_are_pooled_and_the_window_is_not_scored(pooling, expected):
    text = f"snapkv:budget_tokens=4,window_tokens=1,kernel_tokens=3,pooling={pooling}"
    vectors = looking(LOOKED_AT)
    np.testing.assert_allclose(10 * scores_of(text, vectors), [expected], atol=1e-5)
    layer = layer_cache(text)
    prompt(layer, vectors)
    assert held(layer) == [[1, 2, 3, 7]]


def test_without_pooling_only_what_was_looked_at_stays():
    layer = layer_cache("snapkv:budget_tokens=3,window_tokens=1,kernel_tokens=1")
    prompt(layer, looking(LOOKED_AT))
    assert held(layer) == [[2, 5, 7]]


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_scores_are_the_windows_causal_attention_joined_over_a_group(reduce):
    vectors = random_vectors(20, query_heads=4, kv_heads=2)
    text = f"snapkv:budget_tokens=8,window_tokens=3,kernel_tokens=1,group_reduce={reduce}"
    found = scores_of(text, vectors, query_heads=4, kv_heads=2)
    queries, keys = (x.double().numpy() for x in vectors[:2])
    received = np.zeros((4, 20))
    for head in range(4):
        for i in (17, 18, 19):
            weights = np.exp(keys[head // 2, : i + 1] @ queries[head, i])
            received[head, : i + 1] += weights / weights.sum()
    pairs = received.reshape(2, 2, 20)
    expected = pairs.mean(1) if reduce == "mean" else pairs.max(1)
    np.testing.assert_allclose(found[:, :17], expected[:, :17], atol=1e-5)
    assert not found[:, 17:].any()


def test_exactly_the_budget_stays_with_the_window_in_it():
    text = "snapkv:budget_tokens=12,window_tokens=5"
    layer = layer_cache(text, query_heads=4, kv_heads=2)
    vectors = random_vectors(43, query_heads=4, kv_heads=2)
    prompt(layer, tuple(x[:, :40] for x in vectors))
    for row in held(layer):
        assert len(row) == 12
        assert row[-5:] == [35, 36, 37, 38, 39]
    for position in (40, 41, 42):
        decode(layer, tuple(x[:, position : position + 1] for x in vectors), position)
    assert [len(row) for row in held(layer)] == [15, 15]


def test_heads_choose_for_themselves():
    vectors = random_vectors(40, query_heads=4, kv_heads=2)
    flipped = tuple(x.unflatten(0, (2, -1)).flip(0).flatten(0, 1) for x in vectors)
    found = []
    for some in (vectors, flipped):
        layer = layer_cache("snapkv:budget_tokens=9,window_tokens=2", query_heads=4, kv_heads=2)
        prompt(layer, some)
        found.append(held(layer))
    assert found[0] == found[1][::-1]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("count", [3, 11, 12])
def test_a_prompt_within_the_budget_is_left_alone(count):
    layer = layer_cache("snapkv:budget_tokens=12,window_tokens=5")
    prompt(layer, random_vectors(count))
    assert held(layer) == [list(range(count))]
    assert layer.evictors[0].tensors() == {}


@pytest.mark.parametrize("fairness", ["none", "proportional"])
def test_a_window_that_lies_in_several_chunks_is_the_same_window(fairness):
    text = f"snapkv:budget_tokens=12,window_tokens=6,fairness={fairness}"
    vectors = random_vectors(40)
    spans = (Span(0, 10, "a"), Span(10, 25, "b"))
    found = []
    for chunk_tokens in (None, 4, 1):
        layer = layer_cache(text, spans=spans)
        prompt(layer, vectors, chunk_tokens)
        found.append(held(layer))
    assert found[0] == found[1] == found[2]


def test_fair_spans_are_scored_alone_by_their_own_end():
    spans = (Span(0, 12, "a"), Span(12, 20, "b"))
    vectors = random_vectors(20)
    # A window of 5 over (12, 8): 3 and 2. A budget of 10: 6 and 4.
    text = "snapkv:budget_tokens=10,window_tokens=5,kernel_tokens=3,fairness=proportional"
    fair = scores_of(text, vectors, spans)
    kept = []
    for part, window, budget in ((slice(0, 12), 3, 6), (slice(12, 20), 2, 4)):
        alone = f"snapkv:budget_tokens={budget},window_tokens={window},kernel_tokens=3"
        some = tuple(x[:, part] for x in vectors)
        np.testing.assert_allclose(fair[:, part], scores_of(alone, some), atol=1e-6)
        layer = layer_cache(alone)
        prompt(layer, some)
        kept += [part.start + position for position in held(layer)[0]]
    layer = layer_cache(text, spans=spans)
    prompt(layer, vectors)
    assert held(layer) == [kept]


def test_protected_tokens_stay_though_nothing_looks_at_them():
    text = "snapkv:budget_tokens=3,window_tokens=1,kernel_tokens=1"
    layer = layer_cache(text, spans=(Span(0, 1, protected=True),))
    prompt(layer, looking(LOOKED_AT))
    assert held(layer) == [[0, 2, 7]]


def test_more_protected_tokens_than_there_is_room_for_are_refused():
    text = "snapkv:budget_tokens=3,window_tokens=1,kernel_tokens=1"
    layer = layer_cache(text, spans=(Span(0, 3, protected=True),))
    with pytest.raises(BadInput, match=r"4 tokens must be kept .* budget is 3"):
        prompt(layer, looking(LOOKED_AT))


def test_equal_scores_keep_the_lower_positions():
    queries, keys, values = looking(LOOKED_AT)
    layer = layer_cache("snapkv:budget_tokens=4,window_tokens=1,kernel_tokens=1")
    prompt(layer, (queries, torch.zeros_like(keys), values))
    assert held(layer) == [[0, 1, 2, 7]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("kernel_tokens=4", "must be odd"), ("budget_tokens=8,window_tokens=9", "window of 9 tokens")],
)
def test_parameters_that_contradict_each_other_are_refused(text, reason):
    with pytest.raises(BadInput, match=reason):
        parse_method(f"snapkv:{text}")


def test_bytes_after_the_prompt_and_at_its_peak():
    stack = parse_stack("snapkv:budget_tokens=20,window_tokens=8")
    engine = tiny_engine()
    _, sequence = follow(engine, stack, tokens(50), tokens(3, 1))
    slot = 2 * 32 * 4
    # 4 layers of 2 KV heads: 20 tokens of the prompt and 3 more, each with 4 B of position.
    assert sequence.resident_bytes == 4 * 2 * 23 * (slot + 4)
    # The last layer: its prompt in full, 8 queries of 4 heads, a score a token of 2 heads.
    scratch = 4 * 8 * 32 * 4 + 2 * 50 * 4
    assert sequence.peak_bytes == 4 * 2 * 20 * (slot + 4) + 2 * 50 * slot + scratch
    held_after = stack.held(History(50, 3), engine.layers[0])
    assert held_after == History(20, 3)


def test_a_span_too_short_for_a_share_of_the_window_still_has_its_last_token_in_it():
    text = "snapkv:budget_tokens=12,window_tokens=4,fairness=proportional"
    layer = layer_cache(text, spans=(Span(0, 2, "a"),))
    prompt(layer, random_vectors(40))
    # Of 12 tokens one is due to the span. Without a query of its own the first would be kept.
    assert held(layer)[0][:1] == [1]
