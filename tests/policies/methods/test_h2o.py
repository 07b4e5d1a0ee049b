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

ROWS = [[1.0], [0.9, 0.1], [0.8, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]]


class TestH2O(MethodContract):
    samples = (
        "h2o:heavy_tokens=8,recent_tokens=8",
        "h2o:heavy_tokens=16,recent_tokens=15,normalise=true,group_reduce=max",
        "h2o:heavy_tokens=10,recent_tokens=5,fairness=proportional",
        "h2o",
    )
    exact = "h2o:heavy_tokens=50,recent_tokens=50"
    ladder = tuple(f"h2o:heavy_tokens={n},recent_tokens={n}" for n in (4, 12, 24, 31))


def sums(layer):
    return layer.evictors[0].sums


def test_scores_are_column_sums_and_the_heaviest_and_latest_stay():
    layer = layer_cache("h2o:heavy_tokens=1,recent_tokens=1")
    vectors = attending(ROWS)
    _, seen = layer.prefill(*vectors, torch.arange(4))
    expected = [[[2.8, 0.3, 0.2, 0.7]]]
    np.testing.assert_allclose(sums(layer).numpy(), expected, atol=1e-6)
    layer.finish_prefill(layer.choose(seen))
    assert held(layer) == [[0, 3]]
    np.testing.assert_allclose(sums(layer).numpy(), [[[2.8, 0.7]]], atol=1e-6)


def test_survivors_keep_their_scores_and_a_new_token_starts_at_none():
    layer = layer_cache("h2o:heavy_tokens=1,recent_tokens=1")
    prompt(layer, attending(ROWS))
    key = torch.eye(8)[None, 4:5]
    weights = torch.tensor([0.25, 1, 1, 0.5, 0.25, 1, 1, 1]).log()
    decode(layer, (weights[None, None], key, key), 4)
    # Tokens 0, 3 and 4 got .25, .5 and .25: sums are 3.05, 1.2 and .25, and 4 is the latest.
    assert held(layer) == [[0, 4]]
    np.testing.assert_allclose(sums(layer).numpy(), [[[3.05, 0.25]]], atol=1e-5)


def test_old_tokens_do_not_win_by_age_when_scores_are_normalised():
    # Sums: 2.0, .7, 1.1, .2. By queries seen (4, 3, 2, 1): .5, .233, .55, .2.
    rows = [[1.0], [0.5, 0.5], [0.4, 0.1, 0.5], [0.1, 0.1, 0.6, 0.2]]
    for normalise, kept in (("false", [0, 3]), ("true", [2, 3])):
        layer = layer_cache(f"h2o:heavy_tokens=1,recent_tokens=1,normalise={normalise}")
        prompt(layer, attending(rows))
        assert held(layer) == [kept]


@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_before_any_eviction_attention_is_conserved(chunk_tokens):
    layer = layer_cache("h2o:heavy_tokens=30,recent_tokens=30", query_heads=4, kv_heads=2)
    vectors = random_vectors(42, query_heads=4, kv_heads=2)
    prompt(layer, tuple(x[:, :40] for x in vectors), chunk_tokens)
    for position in (40, 41):
        decode(layer, tuple(x[:, position : position + 1] for x in vectors), position)
    torch.testing.assert_close(sums(layer).sum(-1), torch.full((2, 1), 42.0), atol=1e-4, rtol=0)


def test_a_group_is_joined_by_the_mean_or_the_maximum_of_its_heads_sums():
    # Head 0 looks at token 0 and head 1 at token 2, more sharply than any at token 1.
    one, two = ([[1.0], [0.6, 0.4], [w, 0.3, 0.7 - w]] for w in (0.69, 0.01))
    first, second = attending(one), attending(two)
    vectors = torch.cat((first[0], second[0])), first[1], first[2]
    # Sums: 2.29, .7, .01 and 1.61, .7, .69.
    for reduce, expected in (("mean", [1.95, 0.7, 0.35]), ("max", [2.29, 0.7, 0.69])):
        text = f"h2o:heavy_tokens=1,recent_tokens=1,group_reduce={reduce}"
        layer = layer_cache(text, query_heads=2)
        _, seen = layer.prefill(*vectors, torch.arange(3))
        evictor = layer.evictors[0]
        evictor.select(seen, "prefill")
        np.testing.assert_allclose(evictor.scratch()["scores"].numpy(), [expected], atol=1e-5)
        assert evictor.scratch() == {}


def test_heads_choose_for_themselves():
    text = "h2o:heavy_tokens=6,recent_tokens=2"
    vectors = random_vectors(40, query_heads=4, kv_heads=2)
    flipped = tuple(x.unflatten(0, (2, -1)).flip(0).flatten(0, 1) for x in vectors)
    found = []
    for some in (vectors, flipped):
        layer = layer_cache(text, query_heads=4, kv_heads=2)
        prompt(layer, some)
        found.append(held(layer))
    assert found[0] == found[1][::-1]
    assert found[0][0] != found[0][1]


def test_a_number_that_is_not_set_is_a_tenth_of_the_prompt():
    method = parse_method("h2o:recent_tokens=7")
    shape = tiny_engine().layers[0]
    assert method.history(History(1000, 0), shape) == History(107)
    assert method.history(History(90, 400), shape) == History(16)
    assert parse_method("h2o").history(History(1, 1), shape) == History(1, 1)
    _, sequence = follow(tiny_engine(), parse_stack("h2o"), tokens(60), tokens(9, 1))
    assert [layer.tokens for layer in sequence.layers] == [12] * 4


def test_numbers_that_are_not_set_grow_with_a_second_prompt():
    engine = tiny_engine()
    sequence = engine.start(parse_stack("h2o"))
    engine.prefill([sequence], [tokens(100)], chunk_tokens=30)
    assert [layer.tokens for layer in sequence.layers] == [20] * 4
    engine.prefill([sequence], [tokens(20, 1)])
    assert [layer.tokens for layer in sequence.layers] == [24] * 4


def test_bytes_are_those_of_slots_positions_and_sums():
    # 2 KV heads, each 20 tokens of 2 * 32 float32 numbers, 4 B of position and 4 B of score; the
    # maximum needs the sums of 4 query heads.
    for reduce, own in (("mean", 2 * 20 * 4), ("max", 4 * 20 * 4)):
        text = f"h2o:heavy_tokens=10,recent_tokens=10,group_reduce={reduce}"
        _, sequence = follow(tiny_engine(), parse_stack(text), tokens(50), tokens(3, 1))
        assert sequence.resident_bytes == 4 * (2 * 20 * (2 * 32 * 4 + 4) + own)


def test_protected_tokens_are_kept_in_the_place_of_heavy_ones():
    layer = layer_cache("h2o:heavy_tokens=1,recent_tokens=1", spans=(Span(2, 3, protected=True),))
    prompt(layer, attending(ROWS))
    assert held(layer) == [[2, 3]]


def test_more_protected_tokens_than_heavy_ones_are_refused():
    layer = layer_cache("h2o:heavy_tokens=1,recent_tokens=1", spans=(Span(0, 2, protected=True),))
    with pytest.raises(BadInput, match=r"3 tokens must be kept .* budget is 2"):
        prompt(layer, attending(ROWS))


def test_fair_scores_count_attention_within_a_span_only():
    spans = (Span(0, 4, "a"), Span(4, 10, "b"))
    text = "h2o:heavy_tokens=4,recent_tokens=1,fairness=proportional"
    layer = layer_cache(text, spans=spans)
    vectors = random_vectors(10)
    _, seen = layer.prefill(*vectors, torch.arange(10))
    fair = sums(layer)[0, 0]
    for part in (slice(0, 4), slice(4, 10)):
        alone = layer_cache("h2o")
        alone.prefill(*(x[:, part] for x in vectors), torch.arange(part.start, part.stop))
        torch.testing.assert_close(fair[part], sums(alone)[0, 0])
    layer.finish_prefill(layer.choose(seen))
    # 5 of (4, 6): 2 and 3.
    assert [
        sum(position in part for position in held(layer)[0]) for part in (range(4), range(4, 10))
    ] == [2, 3]


def test_equal_scores_keep_the_lower_positions():
    layer = layer_cache("h2o:heavy_tokens=2,recent_tokens=1")
    _, seen = layer.prefill(*attending(ROWS), torch.arange(4))
    layer.evictors[0].sums = torch.ones(1, 1, 4)
    layer.finish_prefill(layer.choose(seen))
    assert held(layer) == [[0, 1, 3]]
