import statistics
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.synthetic import SyntheticSpec, make_requests, parse_arrival, parse_lengths

lengths = st.one_of(
    st.integers(1, 5000).map(str),
    st.tuples(st.integers(1, 500), st.integers(0, 500)).map(lambda p: f"uniform:{p[0]}-{sum(p)}"),
    st.tuples(st.floats(1, 5000), st.floats(0, 3)).map(lambda p: f"lognormal:{p[0]},{p[1]}"),
    st.lists(st.integers(1, 5000), min_size=1, max_size=4).map(
        lambda p: "choice:" + ",".join(map(str, p))
    ),
)
rates = st.floats(0.1, 100)
arrivals = st.one_of(
    st.none(),
    rates.map("constant:{}".format),
    rates.map("poisson:{}".format),
    st.tuples(rates, st.floats(0.2, 5)).map(lambda p: f"gamma:{p[0]},{p[1]}"),
)
specs = st.builds(
    lambda groups, blocks, **rest: SyntheticSpec(
        shared_prefixes=groups, prefix_tokens=16 * blocks if groups else 0, **rest
    ),
    groups=st.integers(0, 3),
    blocks=st.integers(1, 8),
    requests=st.integers(1, 40),
    input_tokens=lengths,
    output_tokens=lengths,
    arrival=arrivals,
    prefix_skew=st.floats(0, 3),
    turns=st.integers(1, 4),
    turn_gap_s=st.floats(0, 20),
)


@settings(deadline=None)
@given(specs, st.integers(0, 3))
def test_every_spec_makes_well_formed_requests(spec, seed):
    requests = list(make_requests(spec, seed))
    assert requests == list(make_requests(spec, seed))
    assert len(requests) == spec.requests
    for request in requests:
        assert request.input_tokens > spec.prefix_tokens
        assert request.output_tokens >= 1
        assert request.prefix_block_tokens == 16
        assert len(request.prefix_blocks) * 16 <= request.input_tokens
        assert (request.conversation is None) == (spec.turns == 1)
    if spec.arrival is None:
        assert {request.arrival_s for request in requests} == {None}
    else:
        times_s = [request.arrival_s for request in requests]
        assert times_s[0] == 0
        assert times_s == sorted(times_s)


@settings(deadline=None)
@given(specs)
def test_turns_of_a_conversation_carry_its_history(spec):
    turns = {}
    for request in make_requests(spec, 0):
        turns.setdefault(request.conversation, []).append(request)
    turns.pop(None, None)
    own = Counter()
    for conversation in turns.values():
        assert len(conversation) <= spec.turns
        for earlier, later in pairwise(conversation):
            assert later.input_tokens > earlier.input_tokens + earlier.output_tokens
            assert later.prefix_blocks[: len(earlier.prefix_blocks)] == earlier.prefix_blocks
        own.update(set(conversation[-1].prefix_blocks[spec.prefix_tokens // 16 :]))
    assert not own or max(own.values()) == 1


def test_another_seed_makes_other_requests():
    spec = SyntheticSpec(requests=20, input_tokens="uniform:1-10000")
    assert list(make_requests(spec, 0)) != list(make_requests(spec, 1))


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [
        ("512", 512, 512, 512),
        ("uniform:100-800", 450, 100, 800),
        ("lognormal:512,0.6", 512 * 2.718281828 ** (0.6**2 / 2), 1, 10**6),
        ("choice:128,2048", 1088, 128, 2048),
        ("lognormal:1,9", None, 1, 100_000_000),
    ],
)
def test_lengths_follow_their_distribution(text, mean, low, high):
    random, draw = Random(0), parse_lengths("n", text)
    drawn = [draw(random) for _ in range(20_000)]
    assert all(type(length) is int and low <= length <= high for length in drawn)
    if mean is not None:
        assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.02)
    if text.startswith("lognormal:512"):
        assert statistics.median(drawn) == pytest.approx(512, rel=0.02)


@pytest.mark.parametrize(
    ("arrival", "rate_per_s", "burstiness"),
    [("constant:4", 4, 0), ("poisson:2.5", 2.5, 1), ("gamma:2.5,0.5", 2.5, 2**0.5)],
)
@pytest.mark.parametrize("turns", [1, 4])
def test_arrivals_have_the_rate_and_the_burstiness_that_was_asked_for(
    arrival, rate_per_s, burstiness, turns
):
    spec = SyntheticSpec(requests=20_000, arrival=arrival, input_tokens="1", turns=turns)
    result = fingerprint(make_requests(spec, 0))
    assert result.request_rate_per_s == pytest.approx(rate_per_s, rel=0.05)
    if turns == 1:
        assert result.burstiness == pytest.approx(burstiness, abs=0.06)


def test_a_shared_prefix_is_reused_by_all_but_its_first_request():
    spec = SyntheticSpec(requests=1000, input_tokens="100", shared_prefixes=4, prefix_tokens=256)
    result = fingerprint(make_requests(spec, 0))
    assert result.reusable_prefix_share[256] == pytest.approx(996 * 256 / (1000 * 356))


def test_without_sharing_the_reuse_is_known_to_be_none():
    result = fingerprint(make_requests(SyntheticSpec(requests=10), 0))
    assert set(result.reusable_prefix_share.values()) == {0.0}


def test_conversations_reuse_their_earlier_prompts():
    spec = SyntheticSpec(requests=100, input_tokens="100", output_tokens="60", turns=2)
    requests = list(make_requests(spec, 0))
    turns = Counter(request.input_tokens for request in requests)
    assert set(turns) == {100, 260}
    # A second turn shares the 6 full blocks of 16 of the first one's prompt.
    assert fingerprint(requests).reusable_prefix_share[16] == pytest.approx(
        96 * turns[260] / (100 * turns[100] + 260 * turns[260])
    )


def test_the_skew_makes_first_prefixes_more_frequent():
    def counts(skew):
        spec = SyntheticSpec(
            requests=6000, shared_prefixes=3, prefix_tokens=16, prefix_skew=skew, input_tokens="1"
        )
        found = Counter(request.prefix_blocks for request in make_requests(spec, 0))
        return [count for _, count in sorted(found.items())]

    assert counts(0) == pytest.approx([2000] * 3, rel=0.1)
    assert counts(1) == pytest.approx([6000 * 6 / 11 / k for k in (1, 2, 3)], rel=0.1)


def test_turns_are_spaced_and_conversations_interleaved():
    spec = SyntheticSpec(requests=40, turns=2, arrival="constant:2", turn_gap_s=2.5)
    requests = list(make_requests(spec, 0))
    first, second = [r.arrival_s for r in requests if r.conversation == "c0"]
    assert second - first == 2.5
    untimed = list(make_requests(SyntheticSpec(requests=40, turns=2), 0))
    assert untimed[0].conversation == "c0"
    assert untimed[1].conversation == "c1"


@pytest.mark.parametrize(
    ("text", "example"),
    [
        *((text, "uniform:100-800") for text in ("", "0", "-5", "1.5", "many", "uniform:9-3")),
        *((text, "uniform:100-800") for text in ("uniform:9", "uniform:0-3", "lognormal:512")),
        *((text, "lognormal:512,0.6") for text in ("lognormal:0,1", "lognormal:5,nan")),
        *((text, "choice:128,2048") for text in ("choice:", "choice:1,x", "zipf:1", "1,2")),
    ],
)
def test_bad_lengths_are_refused_with_an_example(text, example):
    with pytest.raises(BadInput) as caught:
        SyntheticSpec(requests=1, output_tokens=text)
    assert caught.value.message == f"output_tokens cannot be {text!r}"
    assert example in caught.value.fix


@pytest.mark.parametrize(
    "text",
    ["", "5", "poisson", "poisson:0", "poisson:-1", "poisson:inf", "gamma:1", "constant:1,2"],
)
def test_a_bad_arrival_process_is_refused_with_an_example(text):
    with pytest.raises(BadInput, match="arrival process cannot be") as caught:
        SyntheticSpec(requests=1, arrival=text)
    assert "poisson:2.5" in caught.value.fix


def test_no_arrivals_can_be_written_as_none():
    assert parse_arrival("none") is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"turns": 0}, "turns must be at least 1"),
        ({"prefix_skew": -1.0}, "prefix_skew must be a number from 0"),
        ({"turn_gap_s": float("nan")}, "turn_gap_s must be a number from 0"),
        ({"shared_prefixes": 2}, "go together"),
        ({"prefix_tokens": 32}, "go together"),
        ({"shared_prefixes": 2, "prefix_tokens": 1000}, "multiple of 16 from 0, got 1000"),
    ],
)
def test_bad_values_are_refused_by_name(fields, reason):
    with pytest.raises(BadInput, match=reason):
        SyntheticSpec(**{"requests": 1, **fields})
