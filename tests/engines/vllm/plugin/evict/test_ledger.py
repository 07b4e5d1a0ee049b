"""What the worker is told, from a request's arrival to its end."""

from dataclasses import replace

import pytest

from kvtune.engines.vllm.plugin.evict.ledger import Ledger, Scheduled
from kvtune.engines.vllm.plugin.evict.orders import Ask, Choice, Eviction, Orders, mask_of
from kvtune.policies.page_budget import PageBudget

# Of a prompt of 100 tokens, pages 0 and 8 to 12 must stay, and two more.
BUDGET = PageBudget(
    sink_tokens=4, window_tokens=32, block_tokens=8, budget_tokens=64, scored_tokens=32
)
CHOICE = Choice(mask_of(range(1, 8)), 5)
GONE = mask_of([2, 3, 5, 6, 7])
HIDDEN = (Eviction(100, GONE),)


@pytest.fixture
def ledger():
    ledger = Ledger(BUDGET)
    ledger.begin("a", 100, 400)
    return ledger


def told(ledger, start, end, name="a", tail=7):
    return ledger.orders([Scheduled(name, start, end, tail)])


def test_a_prompt_within_the_budget_is_nobodys_concern(ledger):
    ledger.begin("short", 64, 400)
    assert ledger.concerns("a")
    assert not ledger.concerns("short")


def test_chunks_that_hold_a_part_of_the_window_score(ledger):
    assert told(ledger, 0, 60) == Orders()
    assert told(ledger, 60, 90) == Orders({7: Ask(0, 68, 90)})
    assert told(ledger, 90, 100, tail=9) == Orders({9: Ask(0, 90, 100, CHOICE)})


def test_a_prompt_in_one_chunk_is_scored_and_decided_upon_at_once(ledger):
    assert told(ledger, 0, 100) == Orders({7: Ask(0, 68, 100, CHOICE)})


def test_a_query_scores_once(ledger):
    told(ledger, 0, 80)
    # Preempted, and computed again.
    assert told(ledger, 0, 70) == Orders()
    assert told(ledger, 70, 100) == Orders({7: Ask(0, 80, 100, CHOICE)})


def test_tokens_behind_the_prompt_do_not_see_what_is_gone(ledger):
    told(ledger, 0, 100)
    ledger.decide("a", GONE, computed_tokens=100)
    assert told(ledger, 100, 101) == Orders(evictions={7: HIDDEN})


def test_tokens_that_were_under_way_see_everything_also_when_computed_again(ledger):
    told(ledger, 0, 100)
    told(ledger, 100, 101)  # scheduled before the worker decided
    ledger.decide("a", GONE, computed_tokens=101)
    hidden = (Eviction(101, GONE),)
    assert told(ledger, 101, 102) == Orders(evictions={7: hidden})
    # Preempted: the prompt, and token 100, are as they were; no scores are needed.
    assert told(ledger, 0, 101) == Orders()
    assert told(ledger, 60, 103) == Orders(evictions={7: hidden})


def test_a_decision_about_a_preempted_request_holds_from_its_prompts_end(ledger):
    told(ledger, 0, 100)
    ledger.decide("a", GONE, computed_tokens=0)
    assert ledger.evictions == {"a": HIDDEN}


def test_a_session_that_goes_on_keeps_its_decision(ledger):
    told(ledger, 0, 100)
    ledger.decide("a", GONE, computed_tokens=100)
    ledger.begin("a", 180, 400)
    assert told(ledger, 130, 180) == Orders(evictions={7: HIDDEN})


def test_marked_pages_are_not_among_those_that_may_go():
    ledger = Ledger(BUDGET)
    ledger.begin("a", 100, 400, [(20, 30)])
    # Tokens 20 to 29 are on pages 2 and 3, for which the budget has room.
    among = mask_of([1, 4, 5, 6, 7])
    assert told(ledger, 0, 100) == Orders({7: Ask(0, 68, 100, Choice(among, 5))})


def test_a_request_whose_marks_fill_the_budget_and_more_loses_the_rest():
    ledger = Ledger(BUDGET)
    ledger.begin("a", 100, 400, [(0, 56)])
    assert told(ledger, 0, 100) == Orders({7: Ask(0, 68, 100, Choice(mask_of([7]), 1))})


def test_nothing_is_left_of_a_request_that_ended(ledger):
    told(ledger, 0, 90)
    ledger.end("a")
    assert not ledger.concerns("a")
    assert ledger.name_of(0) is None
    assert ledger.orders([]) == Orders(over=(0,))
    assert ledger.orders([]) == Orders()


def test_a_name_that_is_used_again_is_another_request(ledger):
    told(ledger, 0, 100)
    ledger.decide("a", GONE, computed_tokens=100)
    ledger.end("a")
    ledger.begin("a", 100, 400)
    assert told(ledger, 0, 100) == Orders({7: Ask(1, 68, 100, CHOICE)}, over=(0,))


class TestWhileDecoding:
    """The budget of 8 pages holds for what is generated too; the window is the last page or two."""

    BUDGET = replace(BUDGET, window_tokens=8, scored_tokens=None, while_decoding=True)

    @pytest.fixture
    def ledger(self):
        ledger = Ledger(self.BUDGET)
        ledger.begin("a", 20, 400)
        return ledger

    def test_a_request_that_cannot_outgrow_the_budget_is_nobodys_concern(self, ledger):
        ledger.begin("b", 20, 64)
        ledger.begin("c", 20, 65)
        assert [ledger.concerns(name) for name in "abc"] == [True, False, True]

    def test_every_query_scores(self, ledger):
        assert told(ledger, 0, 12) == Orders({7: Ask(0, 0, 12)})
        assert told(ledger, 12, 20) == Orders({7: Ask(0, 12, 20)})
        assert told(ledger, 20, 21) == Orders({7: Ask(0, 20, 21)})

    def test_a_page_goes_when_one_too_many_is_begun(self, ledger):
        told(ledger, 0, 64)
        # Token 64 is on the ninth page; the window of 8 tokens reaches back to the eighth.
        assert told(ledger, 64, 65) == Orders({7: Ask(0, 64, 65, Choice(mask_of(range(1, 7)), 1))})
        ledger.decide("a", mask_of([3]), computed_tokens=65)
        hidden = (Eviction(65, mask_of([3])),)
        assert told(ledger, 65, 72) == Orders({7: Ask(0, 65, 72)}, {7: hidden})
        among = mask_of([1, 2, 4, 5, 6, 7])
        assert told(ledger, 72, 73) == Orders({7: Ask(0, 72, 73, Choice(among, 1))}, {7: hidden})

    def test_the_worker_is_asked_for_one_choice_at_a_time(self, ledger):
        told(ledger, 0, 64)
        told(ledger, 64, 65)
        assert told(ledger, 65, 66) == Orders({7: Ask(0, 65, 66)})
        ledger.decide("a", mask_of([3]), computed_tokens=66)
        assert ledger.evictions == {"a": (Eviction(66, mask_of([3])),)}

    def test_what_is_computed_again_sees_at_each_place_what_it_saw_before(self, ledger):
        told(ledger, 0, 64)
        masks = [mask_of(pages) for pages in ([3], [3, 1], [3, 1, 4])]
        for place, page in ((64, 3), (72, 1), (80, 4)):
            told(ledger, place, place + 1)
            ledger.decide("a", mask_of([page]), computed_tokens=place + 1)
            told(ledger, place + 1, place + 8)
        each = tuple(Eviction(place, mask) for place, mask in zip((65, 73, 81), masks, strict=True))
        assert told(ledger, 0, 70) == Orders(evictions={7: each[:1]})
        assert told(ledger, 70, 88) == Orders(evictions={7: each})
        assert told(ledger, 73, 81) == Orders(evictions={7: each[1:2]})
        assert ledger.lost("a") == masks[-1]

    def test_a_choice_about_a_preempted_request_holds_for_what_was_not_computed_yet(self, ledger):
        told(ledger, 0, 64)
        told(ledger, 64, 65)
        ledger.decide("a", mask_of([3]), computed_tokens=0)
        assert ledger.evictions == {"a": (Eviction(65, mask_of([3])),)}
