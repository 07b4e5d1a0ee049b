"""StreamingLLM on a real vLLM: what is kept is attended to as it should, and the rest is freed."""

from pathlib import Path

import pytest
from contracts.forks import forks

pytestmark = pytest.mark.integration

ENGINE = Path(__file__).with_name("streaming_engine.py")
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


@pytest.fixture(scope="module")
def run(model):
    with forks(ENGINE, model) as ask:

        def run(asked=None, *, may_fail=False, **wanted):
            if "mask" not in wanted:
                wanted = {"asked": asked, "arguments": {}, **wanted}
            return ask(wanted, may_fail=may_fail)

        yield run


def test_where_nothing_is_dropped_answers_are_those_of_stock_vllm(run):
    calls = [MIXED, [MIXED[4] + story(5, 80), MIXED[2], MIXED[5]]]
    stock = run(None, calls=calls)
    ours = run({"streaming_llm": {"window_tokens": 2048}}, calls=calls)
    assert ours["ids"] == stock["ids"]
    assert ours["cached"] == stock["cached"]
    assert min(ours["cached"][1]) > 0
    assert ours["evicted"] == 0


def test_answers_are_those_of_the_model_under_a_mask(run):
    prompt = story(24)
    ours = run(ASKED, calls=[[prompt]])
    masked = run(mask={"sinks": 1, "window": 2, "page": PAGE}, prompt=prompt)
    assert ours["ids"][0][0] == masked["ids"]
    assert ours["evicted"] > 0


def test_neither_chunks_nor_neighbours_nor_the_prefix_cache_decide_an_answer(run):
    whole = run(ASKED, calls=[MIXED], arguments={"max_num_batched_tokens": 2048})
    # The last two calls find in the cache what those before them published.
    cut = run(
        ASKED, calls=[[MIXED[5]], MIXED, [MIXED[5]]], arguments={"max_num_batched_tokens": 100}
    )
    assert cut["ids"][1] == whole["ids"][0]
    assert cut["ids"][0][0] == cut["ids"][2][0] == whole["ids"][0][5]
    # A page that was computed when others had left already is not for others to use.
    assert [cut["cached"][0], cut["cached"][2]] == [[0], [EXACT]]


def test_prompts_longer_than_the_pool_are_served_and_every_page_returns(run):
    # Memory for the bound and vLLM's null page: 30 layers, 3 KV heads, 64 floats, keys and values.
    page_bytes = PAGE * 30 * 3 * 64 * 2 * 4
    small = {"kv_cache_memory_bytes": (BOUND + 1) * page_bytes}
    roomy = run(ASKED, calls=[[LONG], [LONG, MIXED[4], LONG]])
    tight = run(ASKED, calls=[[LONG], [LONG, MIXED[4], LONG]], arguments=small)
    assert tight["pool"] == BOUND < len(roomy["prompt"]) // PAGE
    assert tight["ids"] == roomy["ids"]
    assert tight["free"] == tight["pool"]
    assert roomy["free"] == roomy["pool"]
    assert "failed" in run(None, calls=[[LONG]], arguments=small, may_fail=True)


def test_an_answer_under_quest_is_computed_anew_when_a_conversation_goes_on(run):
    quest = {"quest": {"pages": 1, "dense_layers": 0}}
    conversation = {"calls": [[MIXED[4]], [None]], "tokens": 100}
    after = run(quest, **conversation)
    fresh = run(quest, **conversation, forget=True)
    assert after["ids"] == fresh["ids"]
    assert after["sure"][1] == pytest.approx(fresh["sure"][1], abs=1e-3)
    answered = len(after["prompt"]) - 50 - 100
    assert after["cached"] == [[0], [answered // PAGE * PAGE]]
