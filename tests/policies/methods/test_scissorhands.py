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
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.policies.eviction import Seen, Span
from kvtune.policies.footprint import footprint
from kvtune.policies.method import History, LayerShape
from kvtune.policies.method_stack import parse_method, parse_stack


class TestScissorhands(MethodContract):
    samples = (
        "scissorhands:budget_tokens=32,window_tokens=20,recent_tokens=4",
        "scissorhands:budget_tokens=16,recent_tokens=3,drop_tokens=2,group_reduce=max",
        "scissorhands:budget_tokens=30,window_tokens=9,recent_tokens=5,drop_tokens=1,layer_skew=0.4",
        "scissorhands:budget_tokens=15,window_tokens=8,recent_tokens=2,fairness=proportional",
    )
    exact = "scissorhands:budget_tokens=50"
    ladder = tuple(
        f"scissorhands:budget_tokens={n},drop_tokens=1,recent_tokens=2" for n in (8, 24, 40, 63)
    )


def marks(layer):
    """Marks of each token, counted from the bits that are held: [Hk, n]."""
    return np.unpackbits(layer.evictors[0].bits.numpy(), axis=-1).sum(-1, dtype=int)


def watch(layer, rows):
    """Show a layer queries that come after all tokens and look at them as the rows say."""
    count = len(rows[0])
    queries, _, _ = attending(rows)
    keys = torch.eye(8)[None, :count]
    at = torch.arange(count)
    asking = at[-1] + torch.arange(len(rows))
    seen = Seen(queries, asking, keys, keys, at[None], layer.ctx)
    layer.evictors[0].observe(seen, "decode")
    return seen


def test_a_token_with_less_than_an_even_share_is_marked():
    layer = layer_cache(
        "scissorhands:budget_tokens=3,window_tokens=8,recent_tokens=1,drop_tokens=1"
    )
    seen = watch(layer, [[0.7, 0.1, 0.1, 0.1]] * 8)
    assert marks(layer).tolist() == [[0, 8, 8, 8]]
    # 2 are left: the one without marks, and the last one in spite of them.
    assert layer.evictors[0].select(seen, "decode").tolist() == [[0, 3]]


def test_of_equally_marked_tokens_the_older_goes():
    layer = layer_cache(
        "scissorhands:budget_tokens=4,window_tokens=8,recent_tokens=1,drop_tokens=1"
    )
    seen = watch(layer, [[0.6, 0.1, 0.1, 0.1, 0.1]] * 8)
    assert layer.evictors[0].select(seen, "decode").tolist() == [[0, 3, 4]]


def test_only_the_latest_queries_count():
    layer = layer_cache("scissorhands:budget_tokens=3,window_tokens=5,recent_tokens=1")
    watch(layer, [[0.9, 0.05, 0.05]] * 7 + [[0.05, 0.9, 0.05]] * 3)
    assert marks(layer).tolist() == [[3, 2, 5]]


@pytest.mark.parametrize("chunk_tokens", [None, 6, 1])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_marks_are_those_of_attention_computed_apart(chunk_tokens, reduce):
    window = 11
    text = f"scissorhands:window_tokens={window},group_reduce={reduce}"
    layer = layer_cache(text, query_heads=4, kv_heads=2)
    vectors = random_vectors(43, query_heads=4, kv_heads=2)
    prompt(layer, tuple(x[:, :40] for x in vectors), chunk_tokens)
    for position in (40, 41, 42):
        decode(layer, tuple(x[:, position : position + 1] for x in vectors), position)
    queries, keys = (x.double().numpy() for x in vectors[:2])
    expected = np.zeros((2, 43), dtype=int)
    for i in range(43 - window, 43):
        for head in range(2):
            logits = queries[2 * head : 2 * head + 2, i] @ keys[head, : i + 1].T
            weights = np.exp(logits - logits.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            joined = weights.mean(0) if reduce == "mean" else weights.max(0)
            expected[head, : i + 1] += joined < 1 / (i + 1)
    assert marks(layer).tolist() == expected.tolist()


def test_a_prompt_over_the_budget_is_cut_by_the_first_generated_token():
    layer = layer_cache("scissorhands:budget_tokens=12,recent_tokens=3,drop_tokens=5")
    vectors = random_vectors(50)
    prompt(layer, tuple(x[:, :40] for x in vectors))
    assert layer.tokens == 40
    sizes = []
    for position in range(40, 50):
        decode(layer, tuple(x[:, position : position + 1] for x in vectors), position)
        sizes.append(layer.tokens)
        assert held(layer)[0][-3:] == [position - 2, position - 1, position]
    assert sizes == [7, 8, 9, 10, 11, 12, 7, 8, 9, 10]


@given(st.integers(1, 40), st.integers(0, 60), st.integers(2, 30), st.data())
def test_history_is_what_a_count_token_by_token_gives(at_once, appended, budget, data):
    drop = data.draw(st.integers(1, budget - 1))
    method = parse_method(f"scissorhands:budget_tokens={budget},drop_tokens={drop},recent_tokens=1")
    expected, since = at_once, 0
    for _ in range(appended):
        since += 1
        if expected + since > budget:
            expected, since = budget - drop, 0
    layer = LayerShape(0, 1, 1, 1, 8, 8, 4)
    assert method.history(History(at_once, appended), layer) == History(expected, since)


@given(st.integers(1, 90), st.integers(40, 5000), st.floats(0, 0.9))
def test_layers_share_the_same_total_and_later_ones_get_no_less(layers, budget, skew):
    method = parse_method("scissorhands:recent_tokens=1").model_copy(
        update={"budget_tokens": budget, "layer_skew": skew}
    )
    found = [method.budget_of(LayerShape(n, layers, 1, 1, 8, 8, 4)) for n in range(layers)]
    assert sum(found) == budget * layers
    assert found == sorted(found)


def test_a_skew_of_a_half_gives_the_last_layer_three_times_the_first():
    method = parse_method("scissorhands:budget_tokens=100,layer_skew=0.5")
    found = [method.budget_of(LayerShape(n, 5, 1, 1, 8, 8, 4)) for n in range(5)]
    assert found == [50, 75, 100, 125, 150]


def test_a_mark_takes_a_bit():
    stack = parse_stack("scissorhands:budget_tokens=20,window_tokens=30,recent_tokens=2")
    _, sequence = follow(tiny_engine(), stack, tokens(41), tokens(1, 1))
    # 4 layers of 2 KV heads: 10 tokens are left, of 2 * 32 float32 numbers, 4 B of position and
    # 30 bits in 4 B.
    assert sequence.resident_bytes == 4 * 2 * 10 * (2 * 32 * 4 + 4 + 4)


def test_marks_follow_what_another_method_keeps_of_the_prompt():
    stack = parse_stack(
        "snapkv:budget_tokens=24,window_tokens=4 + "
        "scissorhands:budget_tokens=26,window_tokens=16,recent_tokens=2,drop_tokens=3"
    )
    engine = tiny_engine()
    for decoded in (0, 2, 3, 9):
        _, sequence = follow(engine, stack, tokens(60), tokens(decoded, 1))
        assert sequence.measured() == footprint(stack, engine.layers, 60, decoded)


def test_protected_tokens_stay_however_often_they_are_ignored():
    text = "scissorhands:budget_tokens=3,window_tokens=8,recent_tokens=1,drop_tokens=1"
    layer = layer_cache(text, spans=(Span(2, 3, protected=True),))
    seen = watch(layer, [[0.7, 0.1, 0.1, 0.1]] * 8)
    assert layer.evictors[0].select(seen, "decode").tolist() == [[2, 3]]


def test_a_fair_drop_leaves_each_span_its_share():
    text = (
        "scissorhands:budget_tokens=6,window_tokens=8,recent_tokens=1,drop_tokens=2,"
        "fairness=proportional"
    )
    layer = layer_cache(text, spans=(Span(0, 4, "a"), Span(4, 8, "b")))
    seen = watch(layer, [[0.01, 0.01, 0.01, 0.01, 0.24, 0.24, 0.24, 0.24]] * 8)
    # Unfairly, all of the second span would stay and nothing of the first.
    assert layer.evictors[0].select(seen, "decode").tolist() == [[2, 3, 6, 7]]


def test_a_drop_that_would_reach_the_recent_tokens_is_refused():
    with pytest.raises(BadInput, match=r"9 tokens are left .* recent_tokens, which is 10"):
        parse_method("scissorhands:budget_tokens=30,drop_tokens=21")
    with pytest.raises(BadInput, match="5 tokens are left"):
        parse_method("scissorhands:budget_tokens=20,layer_skew=0.5")
