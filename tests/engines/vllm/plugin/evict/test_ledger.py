"""What the worker is told, from a request's arrival to its end."""

import pytest

from kvtune.engines.vllm.plugin.evict.ledger import Ledger, Scheduled
from kvtune.engines.vllm.plugin.evict.orders import Ask, Eviction, Orders, mask_of
from kvtune.policies.page_budget import PageBudget

# Of a prompt of 100 tokens, pages 0 and 8 to 12 must stay, and the window begins at token 68.
BUDGET = PageBudget(sink_tokens=4, window_tokens=32, block_tokens=8, budget_tokens=64)
GONE = mask_of([2, 3, 5, 6, 7])


@pytest.fixture
def ledger():
    ledger = Ledger(BUDGET)
    ledger.begin("a", 100)
    return ledger


def told(ledger, start, end, name="a", tail=7):
    return ledger.orders([Scheduled(name, start, end, tail)])


def test_a_prompt_within_the_budget_is_nobodys_concern(ledger):
    ledger.begin("short", 64)
    assert ledger.concerns("a")
    assert not ledger.concerns("short")


def test_chunks_that_hold_a_part_of_the_window_score(ledger):
    assert told(ledger, 0, 60) == Orders()
    assert told(ledger, 60, 90) == Orders({7: Ask(0, 100, begins=True, ends=False)})
    assert told(ledger, 90, 100, tail=9) == Orders({9: Ask(0, 100, begins=False, ends=True)})


def test_a_prompt_in_one_chunk_begins_and_ends_at_once(ledger):
    assert told(ledger, 0, 100) == Orders({7: Ask(0, 100, begins=True, ends=True)})


def test_tokens_behind_the_prompt_do_not_see_what_is_gone(ledger):
    told(ledger, 0, 100)
    ledger.decide("a", GONE, computed_tokens=100)
    assert told(ledger, 100, 101) == Orders(evictions={7: Eviction(100, GONE)})


def test_tokens_that_were_under_way_see_everything_also_when_computed_again(ledger):
    told(ledger, 0, 100)
    told(ledger, 100, 101)  # scheduled before the worker decided
    ledger.decide("a", GONE, computed_tokens=101)
    assert told(ledger, 101, 102) == Orders(evictions={7: Eviction(101, GONE)})
    # Preempted: the prompt, and token 100, are as they were; no scores are needed.
    assert told(ledger, 0, 101) == Orders()
    assert told(ledger, 60, 103) == Orders(evictions={7: Eviction(101, GONE)})


def test_a_decision_about_a_preempted_request_holds_from_its_prompts_end(ledger):
    told(ledger, 0, 100)
    ledger.decide("a", GONE, computed_tokens=0)
    assert ledger.evictions == {"a": Eviction(100, GONE)}


def test_a_request_is_decided_upon_once(ledger):
    ledger.decide("a", GONE, computed_tokens=100)
    ledger.decide("a", mask_of([4]), computed_tokens=103)
    assert ledger.evictions == {"a": Eviction(100, GONE)}


def test_a_session_that_goes_on_keeps_its_decision(ledger):
    ledger.decide("a", GONE, computed_tokens=100)
    ledger.begin("a", 180)
    assert told(ledger, 130, 180) == Orders(evictions={7: Eviction(100, GONE)})


def test_nothing_is_left_of_a_request_that_ended(ledger):
    told(ledger, 0, 90)
    ledger.end("a")
    assert not ledger.concerns("a")
    assert ledger.name_of(0) is None
    assert ledger.orders([]) == Orders(over=(0,))
    assert ledger.orders([]) == Orders()


def test_a_name_that_is_used_again_is_another_request(ledger):
    ledger.decide("a", GONE, computed_tokens=100)
    ledger.end("a")
    ledger.begin("a", 100)
    assert told(ledger, 0, 100) == Orders({7: Ask(1, 100, begins=True, ends=True)}, over=(0,))
