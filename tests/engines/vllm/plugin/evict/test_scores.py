"""What queries attend to, against a loop over queries and keys."""

import math

import pytest

torch = pytest.importorskip("torch")

from kvtune.engines.vllm.plugin.evict import scores  # noqa: E402
from kvtune.engines.vllm.plugin.evict.keys import KeyReader  # noqa: E402
from kvtune.engines.vllm.plugin.evict.scores import Keys, Look, received  # noqa: E402

HEADS, KV_HEADS, WIDTH, PAGE, TOKENS = 4, 2, 8, 4, 30
SCALE = 0.3
TABLE = torch.tensor([[5, 2, 9, 0, 7, 3, 8, 1], [6, 4, 4, 4, 4, 4, 4, 4]])


@pytest.fixture
def queries():
    return torch.randn(TOKENS, HEADS, WIDTH, generator=torch.Generator().manual_seed(3))


def layer(softcap=None):
    """A cache of random pages [10, Hk, PAGE, 2 d], keys before values."""
    cache = torch.randn(10, KV_HEADS, PAGE, 2 * WIDTH, generator=torch.Generator().manual_seed(4))
    places = torch.arange(PAGE * 2 * WIDTH).view(PAGE, 2 * WIDTH)[:, :WIDTH].flatten()
    return Keys(cache, KeyReader(places, PAGE), SCALE, softcap)


def keys_of(keys, row):
    """[Hk, tokens, d]."""
    return keys.cache[TABLE[row], ..., :WIDTH].transpose(0, 1).flatten(1, 2)


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


def close(got, *expected):
    return got == pytest.approx([sum(each) for each in zip(*expected, strict=True)], abs=1e-5)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize(("numbers", "at_once"), [(1, 3), (600, 256), (1 << 22, 256)])
def test_each_key_receives_the_mean_over_heads_whatever_is_held_at_once(
    queries, softcap, numbers, at_once, monkeypatch
):
    monkeypatch.setattr(scores, "BLOCK_NUMBERS", numbers)
    monkeypatch.setattr(scores, "BLOCK_QUERIES", at_once)
    keys = layer(softcap)
    asking = queries[None, 20:].transpose(1, 2)
    (got,) = received(asking, TABLE[:1], torch.tensor([20]), keys).tolist()
    assert close(got, by_hand(queries[20:], keys_of(keys, 0), range(20, TOKENS), softcap))
    assert got[TOKENS:] == [0.0, 0.0]


def test_no_more_than_a_page_is_read_at_once_where_it_does_not_fit(queries, monkeypatch):
    monkeypatch.setattr(scores, "BLOCK_NUMBERS", 1)
    keys, read = layer(), []

    class Reader(KeyReader):
        def read(self, cache, pages):
            read.append(pages.tolist())
            return super().read(cache, pages)

    reader = Reader(keys.reader._places, PAGE)
    asking = queries[None, :1].transpose(1, 2)
    received(asking, TABLE[:1], torch.tensor([10]), Keys(keys.cache, reader, SCALE, None))
    # Up to the query's own page, and back again.
    assert read == [[[5]], [[2]], [[9]], [[2]], [[5]]]


def test_rows_of_several_lengths_score_together(queries):
    keys = layer()
    look = Look(
        tickets=[3, 8],
        tokens=torch.tensor([[12], [4]]),
        first_places=torch.tensor([29, 2]),
        pages=TABLE,
        places=torch.tensor([[0, 1, 2, 4, 5, 6, 7, 9], [0] * 8]),
        held=[8, 1],
        got=torch.zeros(2, 32),
    )
    look.add(queries, keys)
    look.add(queries, keys)  # another layer
    (ticket, places, got), (other, place, short) = look.results()
    assert (ticket, places.tolist()) == (3, [0, 1, 2, 4, 5, 6, 7, 9])
    one = by_hand(queries[12:13], keys_of(keys, 0), [29])
    assert close(got.flatten().tolist(), one, one)
    assert (other, place.tolist()) == (8, [0])
    one = by_hand(queries[4:5], keys_of(keys, 1)[:, :PAGE], [2])
    assert close(short.flatten().tolist(), one, one)
    # What is beyond a row's pages is seen by nobody.
    assert not look.got[1, PAGE:].any()
