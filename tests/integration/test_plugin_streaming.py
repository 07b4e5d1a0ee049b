"""StreamingLLM on a real vLLM: what is kept is attended to as it should, and the rest is freed."""

import functools

import pytest
from contracts.answers import assert_same

pytestmark = pytest.mark.integration

PAGE = 32
# One page of sinks and two of window, so a token sees three pages and its own.
ASKED = {"streaming_llm": {"window_tokens": 64, "sink_tokens": 4}}
EXACT = 4 * PAGE
# Kept pages, those of 256 tokens in flight and one that they may begin inside.
BOUND = 3 + 256 // PAGE + 1


def story(sentences, first=0):
    names, things, places = ("Ivo", "Ida", "Max", "Ann"), ("lamp", "key", "book"), ("mill", "barn")
    return " ".join(
        f"On day {day}, {names[day % 4]} found a {things[day % 3]} at the {places[day % 2]}."
        for day in range(first, first + sentences)
    )


# About 16 tokens a sentence.
MIXED = [story(1), story(2, 40), story(12, 3), story(30, 7), story(50), story(70, 9)]
LONG = story(90)


@pytest.fixture
def run(ask, shallow):
    return functools.partial(ask, "streaming_engine", shallow)


def test_where_nothing_is_dropped_answers_are_those_of_stock_vllm(run):
    calls = [MIXED, [MIXED[4] + story(5, 80), MIXED[2], MIXED[5]]]
    stock = run(asked={}, calls=calls)
    ours = run(asked={"streaming_llm": {"window_tokens": 2048}}, calls=calls)
    assert_same(ours["calls"], stock["calls"])
    assert [call["cached"] for call in ours["calls"]] == [c["cached"] for c in stock["calls"]]
    assert min(ours["calls"][1]["cached"]) > 0
    assert ours["evicted"] == 0


def test_answers_are_those_of_the_model_under_a_mask(run):
    prompt = story(24)
    ours = run(asked=ASKED, calls=[[prompt]])
    masked = run(mask={"sinks": 1, "window": 2, "page": PAGE}, prompt=prompt)
    assert_same(ours["calls"], masked["calls"])
    assert ours["evicted"] > 0


def test_neither_chunks_nor_neighbours_nor_the_prefix_cache_decide_an_answer(run):
    whole = run(asked=ASKED, calls=[MIXED], max_num_batched_tokens=2048)
    # The last two calls find in the cache what those before them published.
    cut = run(asked=ASKED, calls=[[MIXED[5]], MIXED, [MIXED[5]]], max_num_batched_tokens=100)
    first, together, again = cut["calls"]
    assert_same([together], whole["calls"])
    alone = {name: told[5:] for name, told in whole["calls"][0].items()}
    assert_same([first, again], [alone, alone])
    # A page that was computed when others had left already is not for others to use.
    assert [first["cached"], again["cached"]] == [[0], [EXACT]]


def test_prompts_longer_than_the_pool_are_served_and_every_page_returns(run):
    # Memory for the bound and vLLM's null page: 8 layers, 3 KV heads, 64 floats, keys and values.
    page_bytes = PAGE * 8 * 3 * 64 * 2 * 4
    small = {"kv_cache_memory_bytes": (BOUND + 1) * page_bytes}
    calls = [[LONG], [LONG, MIXED[4], LONG]]
    roomy, tight = run(asked=ASKED, calls=calls), run(asked=ASKED, calls=calls, **small)
    assert tight["pool"] == BOUND < len(roomy["calls"][0]["prompts"][0]) // PAGE
    assert_same(tight["calls"], roomy["calls"])
    assert tight["free"] == tight["pool"]
    assert roomy["free"] == roomy["pool"]
    assert "failed" in run(asked={}, calls=[[LONG]], **small, may_fail=True)


def test_more_requests_run_at_once_in_the_same_pool_and_vllm_says_so(run):
    # With 64 tokens in flight a request holds 6 pages at most, and 4 requests 24.
    pool = {"num_gpu_blocks_override": 25, "max_model_len": 352, "max_num_batched_tokens": 64}
    calls = [[story(20, first) for first in (1, 30, 50, 70)]]
    stock, ours = run(asked={}, calls=calls, **pool), run(asked=ASKED, calls=calls, **pool)
    assert (stock["most_running"], ours["most_running"]) == (2, 4)
    assert stock["told_concurrency"] == pytest.approx(25 / 11)
    assert ours["told_concurrency"] == pytest.approx(25 / 6)
    assert ours["free"] == ours["pool"] == 24
    wider = run(asked={"streaming_llm": {"window_tokens": 128}}, **pool)
    assert wider["told_concurrency"] == pytest.approx(25 / 8)
