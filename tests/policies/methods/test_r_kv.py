"""R-KV bounds a decoded text, keeps what is read or said anew, and leaves the prompt alone."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from contracts.method import MethodContract  # noqa: E402
from contracts.synthetic_layers import decode, held, layer_cache, prompt, random_vectors  # noqa: E402
from contracts.tiny_models import follow, tiny_engine, tokens  # noqa: E402
from pydantic import ValidationError  # noqa: E402

from kvtune.policies.eviction import Span  # noqa: E402
from kvtune.policies.footprint import footprint  # noqa: E402
from kvtune.policies.method import History, LayerShape  # noqa: E402
from kvtune.policies.method_stack import parse_stack  # noqa: E402
from kvtune.policies.methods.r_kv import RKV  # noqa: E402

SHAPE = LayerShape(0, 1, 1, 1, 8, 8, 4)


class TestRKV(MethodContract):
    samples = (
        "r-kv:budget_tokens=20,buffer_tokens=2,window_tokens=4,pin_prompt=false",
        "r-kv:budget_tokens=3,buffer_tokens=1,window_tokens=2,centre_keys=true",
        "r-kv:budget_tokens=20,buffer_tokens=1,window_tokens=4,pin_prompt=false,"
        "fairness=proportional",
        "r-kv:budget_tokens=3,buffer_tokens=2,window_tokens=2 + paging:block_tokens=8",
        "chunkkv:budget_tokens=24,window_tokens=4,chunk_tokens=5 + "
        "r-kv:budget_tokens=3,buffer_tokens=2,window_tokens=2",
    )
    exact = "r-kv"
    ladder = (
        "r-kv:budget_tokens=9,buffer_tokens=1,window_tokens=4,importance_weight=0.9,"
        "pin_prompt=false",
        "r-kv:budget_tokens=36,buffer_tokens=1,window_tokens=4,importance_weight=0.9,"
        "pin_prompt=false",
        "r-kv:budget_tokens=64,buffer_tokens=1,window_tokens=4,importance_weight=0.9,"
        "pin_prompt=false",
        "r-kv:budget_tokens=80,buffer_tokens=1,window_tokens=4,importance_weight=0.9,"
        "pin_prompt=false",
    )


def generated(layer, keys, queries=None, first=0):
    """Decode one token for each key of one head; queries look at nothing in particular."""
    for number, key in enumerate(keys):
        query = torch.zeros(1, 1, 8) if queries is None else queries[number].reshape(1, 1, 8)
        vector = key.reshape(1, 1, 8)
        decode(layer, (query, vector, vector), first + number)


def start(options, first_key=None, **setup):
    """A layer with a prompt of one token."""
    layer = layer_cache("r-kv:" + options, **setup)
    key = (torch.ones(8) if first_key is None else first_key).reshape(1, 1, 8)
    prompt(layer, (torch.zeros(1, 1, 8), key, key))
    return layer


def test_length_swings_between_budget_and_budget_plus_buffer():
    layer = start("budget_tokens=6,buffer_tokens=4,window_tokens=2")
    vectors = random_vectors(30, seed=1)
    lengths = []
    for step in range(30):
        decode(layer, tuple(x[:, step : step + 1] for x in vectors), 1 + step)
        lengths.append(layer.tokens - 1)
    assert lengths[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 6, 7, 8]
    assert lengths[9::4] == [6] * 6
    assert max(lengths) == 9


def test_of_repeated_keys_the_newest_is_kept_when_only_redundancy_counts():
    layer = start(
        "budget_tokens=5,buffer_tokens=2,window_tokens=1,importance_weight=0", torch.eye(8)[7]
    )
    # Positions 1.. hold e0 e1 e0 e2 e0 e3 e4; the two older e0 are the most redundant.
    generated(layer, torch.eye(8)[[0, 1, 0, 2, 0, 3, 4]], first=1)
    assert held(layer) == [[0, 2, 4, 5, 6, 7]]


def test_distinct_keys_are_equally_redundant_and_the_oldest_stay():
    layer = start(
        "budget_tokens=4,buffer_tokens=3,window_tokens=1,importance_weight=0", torch.eye(8)[7]
    )
    generated(layer, torch.eye(8)[:7], first=1)
    assert held(layer) == [[0, 1, 2, 3, 7]]


def test_with_importance_alone_the_order_is_that_of_pooled_attention():
    count, window = 40, 4
    queries, keys, values = random_vectors(count, seed=3)
    layer = layer_cache(
        "r-kv:budget_tokens=16,buffer_tokens=23,window_tokens=4,importance_weight=1,"
        "pool_tokens=3,pin_prompt=false"
    )
    prompt(layer, tuple(x[:, :30] for x in (queries, keys, values)))
    for at in range(30, count):
        decode(layer, tuple(x[:, at : at + 1] for x in (queries, keys, values)), at)
        if at < 38:
            assert layer.tokens == at + 1
    # Compressed when 39 were held, after the token at position 38.
    q, k = queries[0, 35:39].double().numpy(), keys[0, :39].double().numpy()
    logits = q @ k.T
    for row in range(window):
        logits[row, 36 + row :] = -np.inf
    weights = np.exp(logits - logits.max(1, keepdims=True))
    mean = (weights / weights.sum(1, keepdims=True)).mean(0)[: 39 - window]
    pooled = np.array([mean[max(i - 1, 0) : i + 2].max() for i in range(len(mean))])
    best = sorted(np.argsort(-pooled, kind="stable")[: 16 - window].tolist())
    assert held(layer) == [[*best, 35, 36, 37, 38, 39]]


def test_a_group_is_as_interested_as_its_most_interested_head():
    layer = layer_cache(
        "r-kv:budget_tokens=2,buffer_tokens=4,window_tokens=1,importance_weight=1,pool_tokens=1,"
        "pin_prompt=false",
        query_heads=2,
    )
    keys = torch.eye(8)[None, :6]
    prompt(layer, (torch.zeros(2, 5, 8), keys[:, :5], keys[:, :5]))
    # One head asks most for token 1 (logit 4), the other for token 3 (3), both for token 2 (2.5).
    unit = torch.eye(8)
    query = torch.stack((4 * unit[1] + 2.5 * unit[2], 3 * unit[3] + 2.5 * unit[2]))[:, None]
    decode(layer, (query, keys[:, 5:], keys[:, 5:]), 5)
    assert held(layer) == [[1, 5]]


def test_heads_choose_for_themselves():
    layer = layer_cache(
        "r-kv:budget_tokens=12,buffer_tokens=4,window_tokens=2,pin_prompt=false",
        query_heads=4,
        kv_heads=2,
    )
    vectors = random_vectors(40, query_heads=4, kv_heads=2, seed=2)
    prompt(layer, vectors)
    decode(layer, tuple(x[:, :1] for x in vectors), 40)
    one, two = held(layer)
    assert len(one) == len(two) == 12
    assert one != two


def test_the_prompt_stays_unless_it_may_go():
    vectors = random_vectors(60, seed=4)
    for pinned in (True, False):
        layer = layer_cache(
            f"r-kv:budget_tokens=8,buffer_tokens=2,window_tokens=2,pin_prompt={pinned}"
        )
        prompt(layer, tuple(x[:, :20] for x in vectors), chunk_tokens=6)
        for at in range(20, 60):
            decode(layer, tuple(x[:, at : at + 1] for x in vectors), at)
        (kept,) = held(layer)
        assert (set(range(20)) <= set(kept)) == pinned
        assert len(kept) == (20 if pinned else 0) + (8 if pinned else 9)


def test_protected_tokens_of_a_prompt_that_may_go_stay():
    span = Span(3, 6, "system", protected=True)
    layer = layer_cache(
        "r-kv:budget_tokens=8,buffer_tokens=2,window_tokens=2,pin_prompt=false", spans=(span,)
    )
    vectors = random_vectors(60, seed=4)
    prompt(layer, tuple(x[:, :20] for x in vectors))
    for at in range(20, 60):
        decode(layer, tuple(x[:, at : at + 1] for x in vectors), at)
    assert {3, 4, 5} <= set(held(layer)[0])


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("count", [1, 5, 11, 12, 13, 40])
def test_the_formula_follows_every_step(pinned, count):
    method = RKV(budget_tokens=8, buffer_tokens=4, window_tokens=3, pin_prompt=pinned)
    layer = layer_cache(str(method))
    vectors = random_vectors(count + 30, seed=5)
    prompt(layer, tuple(x[:, :count] for x in vectors))
    for step in range(30):
        at = count + step
        decode(layer, tuple(x[:, at : at + 1] for x in vectors), at)
        assert layer.tokens == method.history(History(count, step + 1), SHAPE).tokens


def test_bytes_by_formula_are_those_of_the_tensors_through_compressions():
    engine = tiny_engine()
    stack = parse_stack("r-kv:budget_tokens=5,buffer_tokens=3,window_tokens=2")
    for decoded in (7, 8, 9, 11, 12):
        _, sequence = follow(engine, stack, tokens(9), tokens(decoded, 1))
        assert sequence.measured() == footprint(stack, engine.layers, 9, decoded)


def test_no_more_queries_are_held_than_another_eviction_left_tokens():
    engine = tiny_engine()
    stack = parse_stack(
        "kvzip:mode=pair-uniform,kept_ratio=0.1 + "
        "r-kv:budget_tokens=9,buffer_tokens=2,window_tokens=8"
    )
    for decoded in (0, 1, 4, 12):
        _, sequence = follow(engine, stack, tokens(50), tokens(decoded, 1))
        assert sequence.measured() == footprint(stack, engine.layers, 50, decoded)


def test_parameters_that_cannot_work_are_refused():
    with pytest.raises(ValidationError, match="exceed window_tokens"):
        RKV(budget_tokens=8, window_tokens=8)
    with pytest.raises(ValidationError, match="odd"):
        RKV(pool_tokens=4)
