"""Page eviction on a real vLLM: what is left answers, what is gone is free, nothing is lost."""

import random

import pytest
from contracts.answers import assert_same

pytestmark = pytest.mark.integration

SIZE, TOKENS = 32, 96
BUDGET = {"page_eviction": {"budget_tokens": 256}}


def diary(days, secret, day, seed):
    """A long text that ends in a question about one line of it."""
    drawn = random.Random(seed)
    who, what = ["Ivo", "Ida", "Ann", "Bo"], ["red lamp", "brass key", "blue cup", "old map"]
    where = ["mill", "chapel", "barn", "tower"]
    one = drawn.choice
    lines = [
        f"On day {n}, {one(who)} found a {one(what)} at the {one(where)}." for n in range(days)
    ]
    lines.insert(day, f"The secret number of the vault is {secret}.")
    question = "Question: what is the secret number of the vault?"
    return " ".join([*lines, question, "Answer: The secret number of the vault is"])


LONG, MIDDLE, SHORT = diary(80, 7194, 40, 1), diary(40, 5821, 12, 2), diary(3, 3311, 1, 3)
CALLS = [[LONG], [LONG, MIDDLE, SHORT], [diary(18 + n, 1000 + n, 5, n) for n in range(4)]]


@pytest.fixture(scope="module")
def run(ask, shallow):
    def run(asked, calls=CALLS, tokens=TOKENS, aborted=(), model=shallow, **engine):
        told = {"asked": asked, "calls": calls, "tokens": tokens, "aborted": aborted}
        return ask("evict_engine", model, **told, engine=engine)

    return run


@pytest.fixture(scope="module")
def evicting(run):
    """Served with a budget of 8 pages and room for all requests."""
    return run(BUDGET)


def test_with_a_budget_of_the_whole_prompt_answers_are_those_of_stock_vllm(run):
    stock, ours = run({}), run({"page_eviction": {"budget_tokens": 4096}})
    assert_same(ours["calls"], stock["calls"])
    assert cached(ours) == cached(stock)
    assert max(cached(ours)[1]) > 0
    assert ours["evicted"] == 0


def cached(told):
    return [call["cached"] for call in told["calls"]]


def test_what_the_question_looks_for_is_kept(run, model):
    (call,) = run(BUDGET, calls=[[LONG, MIDDLE, SHORT]], tokens=8, model=model)["calls"]
    assert [text[:5] for text in call["texts"]] == [" 7194", " 5821", " 3311"]


def test_all_pages_beyond_the_budget_are_evicted_and_not_read(evicting):
    lengths = [len(ids) for call in evicting["calls"] for ids in call["prompts"]]
    pages = [-(-length // SIZE) for length in lengths]
    assert evicting["evicted"] == sum(max(held - 8, 0) for held in pages) * SIZE
    seen, read = evicting["pages"]
    assert read < 0.6 * seen
    assert set(evicting["free"]) == {evicting["pool"]}


def test_a_prompt_that_is_found_in_the_cache_is_answered_alike(evicting):
    first, again = evicting["calls"][:2]
    assert again["cached"][0] > 0
    assert_same([first], [of_first(again)])


def of_first(call):
    """What a call tells of its first prompt."""
    return {name: told[:1] for name, told in call.items()}


def test_chunks_of_the_prompt_do_not_matter(run, evicting):
    # The window of 32 tokens comes in several chunks.
    chunked = run(BUDGET, calls=CALLS[:1], max_num_batched_tokens=24, max_num_seqs=4)
    assert_same(chunked["calls"], evicting["calls"][:1])


def test_when_pages_run_out_answers_stay_and_no_page_is_lost(run, evicting):
    tight = run(
        BUDGET,
        calls=CALLS[2:],
        aborted=[MIDDLE, *CALLS[2][:2]],
        # Four requests hold 8 pages each, and 11 when they end.
        num_gpu_blocks_override=40,
        max_model_len=1200,
    )
    assert max(tight["preempted"]) > 0, "nobody was preempted after its first token"
    assert_same(tight["calls"], evicting["calls"][2:])
    assert set(tight["free"]) == {tight["pool"]}


def test_more_requests_run_at_once_in_the_same_pool(run):
    asked = {
        "calls": [[LONG[n:] for n in range(3)]],
        "tokens": 24,
        "num_gpu_blocks_override": 64,
        "max_model_len": 1500,
    }
    assert run({}, **asked)["most_running"] == 1
    assert run(BUDGET, **asked)["most_running"] == 3


def test_a_protected_prefix_stays_whatever_the_budget(run, model):
    text = diary(40, 5821, 3, 4)
    asked = {"page_eviction": {"budget_tokens": 64}, "protect": {"prefix_tokens": 96}}
    told = run(asked, calls=[[text]], tokens=8, model=model)
    (call,) = told["calls"]
    # The secret is on the three protected pages; all that goes lies between them and the window.
    first_of_window = (len(call["prompts"][0]) - 32) // SIZE
    assert told["evicted"] == (first_of_window - 3) * SIZE
    assert "5821" in call["texts"][0]
