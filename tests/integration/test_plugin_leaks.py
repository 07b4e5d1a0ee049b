"""On a real vLLM no page that a policy approximated reaches another request.

Each policy answers a prompt; a second request then goes on with prompt and answer, so that all of
it could be found in the prefix cache. It is served by the rule of what may be published, and
without it: what the rule is there for must show without it, or these tests would show nothing.
"""

import random

import pytest

pytestmark = pytest.mark.integration

PAGE = 32
RANDOM = random.Random(11)
PROMPT = [RANDOM.randrange(1000, 40000) for _ in range(300)]
ROUNDING = 1e-3
"""Far above what another order of sums changes in float32, and far below what a page less does."""

POLICIES = {
    "quest": {"quest": {"pages": 1, "dense_layers": 0}},
    "page-eviction": {"page_eviction": {"budget_tokens": 64}},
    "streaming-llm": {"streaming_llm": {"window_tokens": 64, "sink_tokens": 32}},
}
EXACT = {"quest": 288, "page-eviction": 288, "streaming-llm": 128}
"""The prompt's whole pages; of StreamingLLM sinks, window and a page, which see all before them."""


@pytest.fixture(scope="module", params=POLICIES)
def policy(request):
    return request.param


@pytest.fixture(scope="module")
def told(ask, shallow, policy):
    return ask("leaks_engine", shallow, asked=POLICIES[policy], prompts=[PROMPT])


@pytest.fixture(scope="module")
def stock(ask, shallow, told):
    """What stock vLLM computes of the same tokens."""
    prompt = [*told["longer"], *told["ruled"]["ids"]]
    return ask("leaks_engine", shallow, asked={}, prompts=[prompt], goes_on=False)["pages"]


def furthest(pages, stock):
    """How far a number of any page is from what stock vLLM has under the same hash."""
    return max(
        abs(one - other)
        for name in pages.keys() & stock.keys()
        for one, other in zip(pages[name], stock[name], strict=True)
    )


def test_only_what_stock_vllm_would_have_computed_is_published(told, stock, policy):
    ruled, leaking = told["ruled"], told["leaking"]
    assert ruled["cached"] == EXACT[policy]
    assert len(ruled["pages"]) >= EXACT[policy] // PAGE
    assert ruled["pages"].keys() <= stock.keys()
    assert furthest(ruled["pages"], stock) < ROUNDING
    assert leaking["cached"] > EXACT[policy]
    assert furthest(leaking["pages"], stock) > 10 * ROUNDING


def test_who_goes_on_with_an_answer_is_answered_as_if_nothing_were_cached(told, policy):
    assert told["fresh"]["cached"] == 0
    assert told["first"][0]["ids"] == told["first"][1]["ids"]
    assert told["ruled"]["ids"] == told["fresh"]["ids"]
    sure = pytest.approx(told["fresh"]["sure"], abs=ROUNDING)
    assert told["ruled"]["sure"] == sure
    # Under StreamingLLM a token's place decides what it sees, so that a hit answers as a miss does.
    assert (told["leaking"]["sure"] != sure) is (policy != "streaming-llm")
