import statistics
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.profilers.fingerprint import fingerprint
from kvtune.types import Request


def lengths(*values):
    return [Request(input_tokens=value) for value in values]


@settings(deadline=None)
@given(st.lists(st.integers(1, 16_383), min_size=1, max_size=50))
def test_statistics_of_lengths_are_exact(values):
    histogram = fingerprint(lengths(*values)).input_tokens
    assert histogram.mean == pytest.approx(statistics.fmean(values))
    assert (histogram.p50, histogram.p95, histogram.p99) == pytest.approx(
        tuple(np.percentile(values, [50, 95, 99]))
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 100_000_000), min_size=1, max_size=50))
def test_every_length_is_in_its_bin(values):
    histogram = fingerprint(lengths(*values)).input_tokens
    edges, counts = histogram.edges, histogram.counts
    assert len(edges) == len(counts) + 1
    assert edges[0] <= min(values) <= max(values) < edges[-1]
    expected = [sum(low <= value < high for value in values) for low, high in pairwise(edges)]
    assert list(counts) == expected
    assert histogram.p50 == pytest.approx(float(np.median(values)), rel=0.0002)


def test_bins_are_at_powers_of_two():
    histogram = fingerprint(lengths(1, 2, 3, 8)).input_tokens
    assert histogram.edges == (1.0, 2.0, 4.0, 8.0, 16.0)
    assert histogram.counts == (1, 2, 0, 1)


def test_many_different_lengths_are_counted_in_bounded_memory():
    tracemalloc.start()
    try:
        fingerprint(Request(input_tokens=1 + 370 * i) for i in range(50_000))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_arrivals_give_duration_rate_and_burstiness():
    times_s = [0.0, 1.0, 1.5, 4.0, 8.0]
    result = fingerprint(Request(arrival_s=t, input_tokens=1) for t in times_s)
    gaps_s = np.diff(times_s)
    assert result.duration_s == 8.0
    assert result.request_rate_per_s == pytest.approx(0.5)
    assert result.burstiness == pytest.approx(gaps_s.std() / gaps_s.mean())


def test_one_request_without_an_arrival_makes_the_rate_unknown():
    result = fingerprint([Request(arrival_s=0.0, input_tokens=1), Request(input_tokens=1)])
    assert (result.duration_s, result.request_rate_per_s, result.burstiness) == (None, None, None)


def test_requests_that_arrive_at_once_have_no_rate():
    result = fingerprint([Request(arrival_s=3.0, input_tokens=1)] * 3)
    assert (result.duration_s, result.request_rate_per_s, result.burstiness) == (0.0, None, None)


def test_requests_out_of_order_are_refused():
    with pytest.raises(BadInput, match=r"arrives 0\.5 s before"):
        fingerprint([Request(arrival_s=t, input_tokens=1) for t in (1.0, 0.5)])


def test_an_empty_workload_is_all_unknown():
    result = fingerprint([])
    assert result.requests == 0
    assert (result.input_tokens, result.output_tokens) == (None, None)
    assert result.reusable_prefix_share == {}


def test_text_is_unknown_without_a_tokenizer_and_exact_with_one():
    prompts = ["a" * 40 + "b" * 10, "a" * 40 + "c" * 20]
    requests = [Request(prompt=prompt, output_tokens=5) for prompt in prompts]
    unknown = fingerprint(requests)
    assert unknown.input_tokens is None
    assert unknown.reusable_prefix_share == {}
    assert unknown.output_tokens.mean == 5
    known = fingerprint(requests, (16, 32), count_tokens=lambda text: list(text.encode()))
    assert known.input_tokens.mean == 55
    assert known.reusable_prefix_share == pytest.approx({16: 32 / 110, 32: 32 / 110})


def test_a_chat_shares_its_first_messages():
    def chat(*contents):
        return Request(messages=tuple({"role": "user", "content": c} for c in contents))

    result = fingerprint(
        [chat("x" * 95, "a"), chat("x" * 95, "b")], (16,), count_tokens=lambda t: list(t.encode())
    )
    # "user\n" + 95 + "\n" + "user\n" are the same, which is 6 blocks of 16; each chat is 108 long.
    assert result.reusable_prefix_share[16] == pytest.approx(96 / 216)


def test_token_ids_are_known():
    result = fingerprint([Request(token_ids=tuple(range(40)))] * 2, (16,))
    assert result.input_tokens.mean == 40
    assert result.reusable_prefix_share[16] == pytest.approx(32 / 80)


def test_lengths_alone_say_nothing_about_reuse_but_an_empty_prefix_does():
    assert fingerprint(lengths(100, 100)).reusable_prefix_share == {}
    unshared = [Request(input_tokens=100, prefix_block_tokens=16)] * 2
    assert fingerprint(unshared, (16,)).reusable_prefix_share == {16: 0.0}


def test_reuse_is_a_sample_above_the_limit():
    requests = [
        Request(input_tokens=160, prefix_blocks=tuple(range(i, i + 10)), prefix_block_tokens=16)
        for i in range(0, 1000, 10)
    ]
    assert not fingerprint(requests, tracked_blocks=1000).sampled
    assert fingerprint(requests, tracked_blocks=999).sampled


@pytest.mark.parametrize("block_sizes", [(), (16, 0)])
def test_impossible_block_sizes_are_refused(block_sizes):
    with pytest.raises(BadInput, match="block sizes must be at least 1 token"):
        fingerprint([], block_sizes)


BASE = Request(arrival_s=1.0, input_tokens=5, output_tokens=2, prefix_blocks=(1,))


@pytest.mark.parametrize(
    "other",
    [
        Request(arrival_s=1.5, input_tokens=5, output_tokens=2, prefix_blocks=(1,)),
        Request(arrival_s=1.0, input_tokens=6, output_tokens=2, prefix_blocks=(1,)),
        Request(arrival_s=1.0, input_tokens=5, output_tokens=3, prefix_blocks=(1,)),
        Request(arrival_s=1.0, input_tokens=5, output_tokens=2, prefix_blocks=(2,)),
        Request(arrival_s=1.0, prompt="5", output_tokens=2),
        Request(arrival_s=1.0, input_tokens=5, output_tokens=2, conversation="1"),
    ],
)
def test_the_digest_tells_requests_apart(other):
    assert fingerprint([BASE]).digest == fingerprint(iter([BASE])).digest
    assert fingerprint([BASE]).digest != fingerprint([other]).digest


def test_the_digest_depends_on_the_order():
    a, b = Request(prompt="a"), Request(prompt="b")
    assert fingerprint([a, b]).digest != fingerprint([b, a]).digest
    assert len(fingerprint([a]).digest) == 16
