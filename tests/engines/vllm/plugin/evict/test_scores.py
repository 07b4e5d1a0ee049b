"""Attention of a prompt's end, against a loop over queries and keys."""

import math

import pytest

torch = pytest.importorskip("torch")

from kvtune.engines.vllm.plugin.evict import scores  # noqa: E402
from kvtune.engines.vllm.plugin.evict.scores import Look, received  # noqa: E402

HEADS, KV_HEADS, WIDTH, TOKENS = 4, 2, 8, 30
SCALE = 0.3


@pytest.fixture
def vectors():
    random = torch.Generator().manual_seed(3)
    queries = torch.randn(TOKENS, HEADS, WIDTH, generator=random)
    return queries, torch.randn(KV_HEADS, TOKENS, WIDTH, generator=random)


def by_hand(queries, keys, places, softcap=None):
    """One query, one head, one key after the other."""
    total = [0.0] * keys.shape[1]
    for query, place in zip(queries, places, strict=True):
        for head in range(HEADS):
            logits = []
            for key in keys[head // (HEADS // KV_HEADS), : place + 1]:
                logit = SCALE * sum(
                    float(q) * float(k) for q, k in zip(query[head], key, strict=True)
                )
                logits.append(softcap * math.tanh(logit / softcap) if softcap else logit)
            weights = [math.exp(logit - max(logits)) for logit in logits]
            for place_of_key, weight in enumerate(weights):
                total[place_of_key] += weight / sum(weights) / HEADS
    return total


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("at_once", [1, 7, 1 << 24])
def test_each_key_receives_the_mean_over_heads(vectors, softcap, at_once, monkeypatch):
    monkeypatch.setattr(scores, "BLOCK_WEIGHTS", at_once * HEADS * TOKENS)
    queries, keys = vectors
    got = received(queries[20:], keys, 20, SCALE, softcap)
    expected = by_hand(queries[20:], keys, range(20, TOKENS), softcap)
    assert got.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_window_adds_up_over_chunks_layers_and_other_rows_tokens(vectors):
    queries, keys = vectors
    total = torch.zeros(TOKENS + 6)
    # Of a step of 40 tokens, the row has those from 12 on; its first query stands in place 16.
    step = torch.full((40, HEADS, WIDTH), float("nan"))
    step[12:18] = queries[16:22]
    pages = torch.arange(3)
    Look(slice(12, 18), 16, pages, total).add(step, keys[:, :24], SCALE, None)
    step[:8] = queries[22:30]
    Look(slice(0, 8), 22, pages, total).add(step, keys, SCALE, None)
    Look(slice(0, 8), 22, pages, total).add(step, keys, SCALE, None)
    first = by_hand(queries[16:22], keys, range(16, 22))
    last = by_hand(queries[22:], keys, range(22, 30))
    expected = [a + 2 * b for a, b in zip(first, last, strict=True)]
    assert total[:TOKENS].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert not total[TOKENS:].any()
