import time
import tracemalloc
from dataclasses import replace
from itertools import combinations, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.profilers import materialize as module
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.materialize import fits, materialize
from kvtune.profilers.synthetic import SyntheticSpec, make_requests
from kvtune.types import Request


def made(requests, **changes):
    arguments = {
        "vocab_size": 32_000,
        "max_model_len_tokens": None,
        "salt": 1,
        "default_output_tokens": 16,
    }
    return materialize(requests, **{**arguments, **changes})


def tokens(requests, **changes):
    return [request.token_ids for request in made(requests, **changes).requests]


def blocks(*ids, input_tokens=None, size=16):
    return Request(
        input_tokens=input_tokens or len(ids) * size, prefix_blocks=ids, prefix_block_tokens=size
    )


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 40)).filter(any),
    min_size=2,
    max_size=6,
)


@settings(deadline=None)
@given(prompts)
def test_prompts_share_exactly_the_tokens_of_their_common_blocks(parts):
    made_tokens = tokens([blocks(*ids, input_tokens=16 * len(ids) + tail) for ids, tail in parts])
    assert [len(mine) for mine in made_tokens] == [16 * len(ids) + tail for ids, tail in parts]
    for (ids, mine), (other_ids, other) in combinations(
        [(ids, mine) for (ids, _), mine in zip(parts, made_tokens, strict=True)], 2
    ):
        pairs = zip(ids, other_ids, strict=False)
        common = 16 * len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        assert mine[:common] == other[:common]
        if min(len(mine), len(other)) >= common + 4:
            assert mine[common : common + 4] != other[common : common + 4]


def test_a_block_is_the_same_wherever_it_stands():
    first, second = tokens([blocks(1, 2), blocks(2, 1)])
    assert first[:16] == second[16:]
    assert first[16:] == second[:16]
    assert first[:16] != first[16:]


def test_a_partial_last_block_is_the_beginning_of_the_full_one():
    full, partial = tokens([blocks(1, 2, size=512), blocks(1, 2, size=512, input_tokens=700)])
    assert len(partial) == 700
    assert partial == full[:700]


def test_the_same_salt_makes_the_same_tokens_and_another_salt_shares_none():
    requests = [blocks(1, 2, input_tokens=100), Request(input_tokens=100)]
    assert tokens(requests) == tokens(requests)
    for mine, other in zip(tokens(requests), tokens(requests, salt=2), strict=True):
        assert mine[:4] != other[:4]
        assert sum(a == b for a, b in zip(mine, other, strict=True)) < 5


def test_equal_requests_without_blocks_share_nothing():
    first, second = tokens([Request(input_tokens=100)] * 2)
    assert first[:4] != second[:4]


@settings(deadline=None)
@given(st.integers(16, 200_000), st.integers(0, 5))
def test_token_ids_keep_away_from_both_ends_of_the_vocabulary(vocab_size, salt):
    (ids,) = tokens([blocks(7, input_tokens=200)], vocab_size=vocab_size, salt=salt)
    assert vocab_size // 8 <= min(ids) <= max(ids) < vocab_size - vocab_size // 8


def test_tokens_are_spread_over_the_vocabulary():
    (ids,) = tokens([Request(input_tokens=100_000)], vocab_size=1000)
    assert set(ids) == set(range(125, 875))


def test_everything_else_passes_through_and_lengths_keep_their_fields():
    others = [
        Request(prompt="a"),
        Request(messages=({"role": "user", "content": "a"},), arrival_s=1.0),
        Request(token_ids=(1, 2, 3), output_tokens=10**6),
    ]
    length = replace(blocks(1, input_tokens=20), arrival_s=2.0, conversation="c", output_tokens=9)
    *passed, last = made([*others, length], max_model_len_tokens=64).requests
    assert passed == others
    assert last == Request(
        arrival_s=2.0, token_ids=last.token_ids, output_tokens=9, conversation="c"
    )
    assert len(last.token_ids) == 20


def test_long_prompts_are_clipped_to_the_context_and_counted():
    requests = [
        replace(blocks(1, 2, 3, input_tokens=60), output_tokens=30),
        replace(blocks(1, 2, 3, input_tokens=60), output_tokens=40),
        blocks(1, 2, 3, input_tokens=60),
        replace(blocks(1), output_tokens=64),
    ]
    result = made(requests, max_model_len_tokens=64, default_output_tokens=4)
    lengths = [(len(r.token_ids), r.output_tokens) for r in result.requests]
    assert lengths == [(34, 30), (24, 40), (60, 4)]
    assert (result.clipped, result.dropped) == (2, 1)
    assert result.requests[0].token_ids[:24] == result.requests[1].token_ids


def test_a_full_cache_of_expansions_changes_nothing(monkeypatch):
    requests = list(make_requests(SyntheticSpec(requests=50, turns=5), 0))
    expected = tokens(requests)
    monkeypatch.setattr(module, "CACHED_TOKENS", 100)
    assert tokens(requests) == expected


def test_expansions_are_kept_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(module, "CACHED_TOKENS", 10_000)
    expand = module._Tokens(vocab_size=1000, salt=0)
    tracemalloc.start()
    try:
        for i in range(0, 10_000, 10):
            expand.prompt(blocks(*range(i, i + 10)), 0, 160)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_fingerprint_is_the_same_before_and_after():
    spec = SyntheticSpec(
        requests=200,
        input_tokens="uniform:1-300",
        shared_prefixes=3,
        prefix_tokens=64,
        turns=3,
        arrival="poisson:5",
    )
    before = fingerprint(make_requests(spec, 0))
    after = fingerprint(made(make_requests(spec, 0)).requests)
    assert after.reusable_prefix_share == pytest.approx(before.reusable_prefix_share)
    assert after.input_tokens == before.input_tokens


@pytest.mark.parametrize(
    "bad", [{"vocab_size": 15}, {"default_output_tokens": 0}, {"max_model_len_tokens": 0}]
)
def test_impossible_numbers_are_refused_by_name(bad):
    with pytest.raises(BadInput, match=next(iter(bad))):
        made([Request(input_tokens=5)], **bad)


def test_a_thousand_long_prompts_take_seconds():
    spec = SyntheticSpec(requests=1000, input_tokens="4096", shared_prefixes=50, prefix_tokens=4096)
    requests = list(make_requests(spec, 0))
    start_s = time.process_time()
    result = made(requests)
    assert time.process_time() - start_s < 5
    assert sum(len(r.token_ids) for r in result.requests) == 8_192_000


@given(
    st.lists(
        st.builds(
            Request,
            input_tokens=st.one_of(st.none(), st.integers(0, 60)),
            output_tokens=st.one_of(st.none(), st.integers(1, 60)),
        ),
        max_size=8,
    ),
    st.one_of(st.none(), st.integers(1, 60)),
)
def test_requests_that_fit_are_those_that_are_kept(requests, longest):
    numbered = [replace(request, arrival_s=float(at)) for at, request in enumerate(requests)]
    kept = made(numbered, max_model_len_tokens=longest).requests
    assert [request.arrival_s for request in kept] == [
        request.arrival_s
        for request in numbered
        if fits(request, max_model_len_tokens=longest, default_output_tokens=16)
    ]
