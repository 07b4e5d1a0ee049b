import cmath

import numpy as np
import pytest
import torch
from contracts.method import MethodContract
from contracts.synthetic_layers import decode, held, layer_cache, prompt, random_vectors
from contracts.tiny_models import follow, tiny_engine, tokens

from kvtune.errors import BadInput
from kvtune.policies.eviction import Span
from kvtune.policies.method_stack import MethodStack, parse_method, parse_stack

SMALL = "streaming-llm:sink_tokens=4,window_tokens=3"


class TestStreamingLLM(MethodContract):
    samples = (
        "streaming-llm:sink_tokens=2,window_tokens=20",
        "streaming-llm:sink_tokens=4,window_tokens=29,positions=keep",
        "streaming-llm:sink_tokens=0,window_tokens=15,fairness=proportional",
    )
    exact = "streaming-llm:window_tokens=100"
    ladder = tuple(f"streaming-llm:window_tokens={n},positions=keep" for n in (4, 16, 40, 56))


def one(vectors, number):
    return tuple(x[:, number : number + 1] for x in vectors)


@pytest.mark.parametrize("mode", ["compact", "keep"])
def test_sinks_and_the_latest_tokens_stay(mode):
    layer = layer_cache(f"{SMALL},positions={mode}")
    vectors = random_vectors(12)
    prompt(layer, one(vectors, 0))
    for position in range(1, 8):
        decode(layer, one(vectors, position), position)
    assert held(layer) == [[0, 1, 2, 3, 5, 6, 7]]
    decode(layer, one(vectors, 8), 8)
    assert held(layer) == [[0, 1, 2, 3, 6, 7, 8]]


def test_a_long_prompt_is_cut_in_the_middle_at_its_end():
    layer = layer_cache(SMALL)
    prompt(layer, random_vectors(30))
    assert held(layer) == [[0, 1, 2, 3, 27, 28, 29]]


def rotated(x, position):
    """RoPE by complex numbers: channel i and channel i + d/2 are one number of frequency i."""
    half = len(x) // 2
    turns = [cmath.exp(1j * position * 10_000.0 ** (-2 * i / len(x))) for i in range(half)]
    pairs = [complex(x[i], x[i + half]) * turns[i] for i in range(half)]
    return np.array([p.real for p in pairs] + [p.imag for p in pairs])


def test_compact_keys_are_those_of_a_fresh_rotation_at_their_rank():
    layer = layer_cache(SMALL)
    queries, keys, values = random_vectors(30)
    plain = keys[0].double().numpy()
    turned = np.stack([rotated(key, place) for place, key in enumerate(plain)])
    prompt(layer, (queries, torch.tensor(turned, dtype=torch.float32)[None], values))
    kept = [0, 1, 2, 3, 27, 28, 29]
    fresh = np.stack([rotated(plain[place], rank) for rank, place in enumerate(kept)])
    found = layer.groups[0].read(compact=True)[0][0].numpy()
    np.testing.assert_allclose(found, fresh, atol=1e-5)
    # In keep mode they are where they were.
    np.testing.assert_allclose(layer.groups[0].read()[0][0].numpy(), turned[kept], atol=1e-5)


def test_a_compact_query_attends_from_the_last_rank():
    layer = layer_cache(SMALL)
    queries, keys, values = random_vectors(31)
    plain_q, plain_k = queries[0].double().numpy(), keys[0].double().numpy()
    turned_q, turned_k = (
        torch.tensor(np.stack([rotated(x, n) for n, x in enumerate(plain)]), dtype=torch.float32)
        for plain in (plain_q, plain_k)
    )
    vectors = turned_q[None], turned_k[None], values
    prompt(layer, tuple(x[:, :30] for x in vectors))
    found = decode(layer, one(vectors, 30), 30)[0, 0].numpy()
    read = [0, 1, 2, 3, 27, 28, 29, 30]
    query = rotated(plain_q[30], 7)
    logits = [rotated(plain_k[place], rank) @ query for rank, place in enumerate(read)]
    weights = np.exp(np.array(logits) - max(logits))
    expected = (weights / weights.sum()) @ values[0, read].double().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_memory_never_grows():
    engine = tiny_engine()
    stack = parse_stack("streaming-llm:sink_tokens=4,window_tokens=16")
    _, short = follow(engine, stack, tokens(20), [])
    _, long = follow(engine, stack, tokens(300), tokens(20, 1))
    # 4 layers, 20 tokens of 2 heads of 32 numbers in float32, keys and values, and a position.
    assert short.resident_bytes == long.resident_bytes == 4 * 20 * (2 * 2 * 32 * 4 + 4)


def test_protected_tokens_take_their_room_from_the_window():
    layer = layer_cache(SMALL, spans=(Span(10, 12, protected=True),))
    vectors = random_vectors(31)
    prompt(layer, tuple(x[:, :30] for x in vectors))
    assert held(layer) == [[0, 1, 2, 3, 10, 11, 29]]
    decode(layer, one(vectors, 30), 30)
    assert held(layer) == [[0, 1, 2, 3, 10, 11, 30]]


def test_more_protected_tokens_than_the_window_holds_are_refused():
    layer = layer_cache(SMALL, spans=(Span(10, 13, protected=True),))
    with pytest.raises(BadInput, match=r"8 tokens must be kept .* budget is 7"):
        prompt(layer, random_vectors(30))


def test_a_fair_cut_keeps_the_tail_of_each_span():
    spans = (Span(0, 80, "a"), Span(80, 100, "b"))
    text = "streaming-llm:sink_tokens=4,window_tokens=46,fairness=proportional"
    layer = layer_cache(text, spans=spans)
    prompt(layer, random_vectors(100))
    assert held(layer) == [[*range(4), *range(44, 80), *range(90, 100)]]


def test_only_kept_positions_are_shared():
    assert parse_method("streaming-llm").publish == "never"
    kept = parse_method("streaming-llm:positions=keep")
    assert kept.publish == "fingerprint"
    assert (
        kept.fingerprint != parse_method("streaming-llm:positions=keep,sink_tokens=5").fingerprint
    )
    assert parse_method("streaming-llm:positions=keep,fairness=proportional").publish == "never"


def test_what_follows_does_not_change_what_a_prefix_holds():
    engine = tiny_engine()
    stack = parse_stack("streaming-llm:window_tokens=30,positions=keep")
    prefix = tokens(20)
    caches = []
    for seed in (1, 2):
        _, sequence = follow(engine, stack, prefix, tokens(5, seed))
        caches.append([layer.groups[0].read()[0][:, :20] for layer in sequence.layers])
    _, full = follow(engine, MethodStack(), prefix, [])
    for layer, first, second in zip(full.layers, *caches, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, layer.groups[0].read()[0])
