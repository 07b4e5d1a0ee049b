"""Pages leave while a real vLLM decodes: the right ones, and marked spans never."""

import pytest
from contracts.answers import assert_same

pytestmark = pytest.mark.integration

SIZE, TOKENS, BUDGET_PAGES = 32, 150, 8
H2O = {"page_eviction": {"method": "h2o", "budget_tokens": BUDGET_PAGES * SIZE}}
CHUNKKV = {"page_eviction": {"budget_tokens": BUDGET_PAGES * SIZE}}
PLACES = ("mill", "chapel", "barn", "tower", "quay")


def log(days, seed):
    """A text of numbers that nothing foretells."""
    return " ".join(
        f"On day {n}, the {PLACES[n * n % 5]} had {n * seed % 101} visitors." for n in range(days)
    )


LONG, SHORT = log(40, 37), log(13, 59)
BOTH = [{"prompt": LONG}, {"prompt": SHORT}]


@pytest.fixture(scope="module")
def run(ask, shallow):
    def run(asked, requests=BOTH, tokens=TOKENS, preempted_at=None, **engine):
        told = {"asked": asked, "requests": requests, "tokens": tokens}
        told |= {"engine": engine, "preempted_at": preempted_at}
        return ask("evict_decode_engine", shallow, **told)

    return run


@pytest.fixture(scope="module")
def decoded(run):
    """A prompt that outgrows the budget, and one whose answer does, with room for both."""
    return run(H2O)


def gone_at_each(evictions):
    """The place of each eviction, the pages that left before, and those that leave."""
    before = 0
    for first_token, mask in evictions:
        yield first_token, before, pages_of(mask & ~before)
        before = mask


def pages_of(mask):
    return [page for page in range(mask.bit_length()) if mask >> page & 1]


def test_each_time_the_pages_go_that_the_models_attention_summed_up_is_least_on(
    decoded, ask, shallow
):
    for prompt, answer, best, evictions in zip(
        *(decoded[key] for key in ("prompts", "ids", "best", "evictions")), strict=True
    ):
        ids = [*prompt, *answer[:-1]]
        apart = ask("evict_attention", shallow, ids=ids, page_tokens=SIZE, evictions=evictions)
        # What is answered is what the model says where these pages are hidden from these tokens.
        mine = [{"ids": [answer], "best": [best]}]
        expected = apart["best"][len(prompt) - 1 :]
        assert_same(mine, [{"ids": [[pair[0][0] for pair in expected]], "best": [expected]}])
        assert len(evictions) >= 2
        for (place, before, gone), got in zip(gone_at_each(evictions), apart["pages"], strict=True):
            # The first page stays, and the last 32 tokens.
            may_go = range(1, (place - 32) // SIZE)
            stays = [page for page in may_go if page not in gone and not before >> page & 1]
            assert set(gone) <= set(may_go)
            assert max(got[page] for page in gone) <= min(got[page] for page in stays) + 1e-3


def test_a_request_holds_its_budget_and_the_page_that_it_begins(decoded):
    assert decoded["most_held"] == [BUDGET_PAGES + 1] * 2
    assert decoded["lost_pages"] == 0
    for prompt, evictions in zip(decoded["prompts"], decoded["evictions"], strict=True):
        last = len(prompt) + TOKENS - 1
        assert evictions[-1][1].bit_count() == -(-last // SIZE) - BUDGET_PAGES


def test_neither_chunks_nor_other_requests_change_what_stays(decoded, run):
    chunked = run(H2O, requests=BOTH[:1], max_num_batched_tokens=40, max_num_seqs=2)
    assert chunked["evictions"] == decoded["evictions"][:1]
    assert chunked["ids"] == decoded["ids"][:1]


def test_a_preempted_request_is_answered_as_if_it_had_not_been(decoded, run):
    preempted = run(H2O, preempted_at=TOKENS - 20)
    assert len(preempted["preempted"]) == 2
    for prompt, evictions in zip(decoded["prompts"], decoded["evictions"], strict=True):
        assert evictions[0][0] < len(prompt) + TOKENS - 20, "it had all its pages yet"
    assert preempted["evictions"] == decoded["evictions"]
    assert_same([preempted], [decoded])
    assert preempted["lost_pages"] == 0


@pytest.mark.parametrize("asked", [H2O, CHUNKKV], ids=["h2o", "chunkkv"])
def test_marked_spans_stay_and_answers_tell_what_did(run, asked):
    marks = [[100, 130], [330, 340]]
    told = run(
        asked | {"protect": {"prefix_tokens": 40}},
        requests=[{"prompt": LONG, "marks": marks}, {"prompt": LONG}],
        tokens=4,
    )
    tokens = len(told["prompts"][0])
    (marked,), (plain,) = told["evictions"]
    # Pages 0 and 1 hold the prefix, and 3, 4 and 10 what is marked.
    assert not set(pages_of(marked[1])) & {0, 1, 3, 4, 10}
    assert set(pages_of(plain[1])) & {3, 4, 10}
    lost = marked[1].bit_count() * SIZE
    report, nothing = told["told"]
    assert nothing is None
    assert report == {
        "kvtune": {
            "span_tokens": {
                "prefix": {"seen": 40, "kept": 40},
                "marked": {"seen": 40, "kept": 40},
                "rest": {"seen": tokens - 80, "kept": tokens - 80 - lost},
            }
        }
    }
    counted = told["span_tokens"]
    assert counted["prefix"] == [80, 0]
    assert counted["marked"] == [40, 0]
    assert sum(counted["rest"]) == 2 * tokens - 120


def test_spans_beyond_the_prompt_are_refused_for_their_request_alone(run):
    refused = run(CHUNKKV, requests=[{"prompt": SHORT, "marks": [[0, 4000]]}], tokens=4)["refused"]
    assert "kvtune: protected span [0, 4000) is not within the prompt" in refused
