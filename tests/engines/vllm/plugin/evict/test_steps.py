"""A worker over the steps of a request: whose rows score, what is chosen, what is remembered."""

import pytest

torch = pytest.importorskip("torch")

from kvtune.engines.vllm.plugin.evict import steps  # noqa: E402
from kvtune.engines.vllm.plugin.evict.orders import (  # noqa: E402
    Ask,
    Choice,
    Eviction,
    Orders,
    mask_of,
)
from kvtune.engines.vllm.plugin.evict.steps import Rows, Worker  # noqa: E402
from kvtune.errors import EngineError  # noqa: E402
from kvtune.policies.plugin_config import PageEvictionConfig  # noqa: E402

PAGE = 4
CHUNKKV = PageEvictionConfig(budget_tokens=16, window_tokens=6, sink_tokens=0)
H2O = PageEvictionConfig(budget_tokens=16, method="h2o")
TABLE = torch.arange(30).view(3, 10) + 50


def rows(orders, *parts):
    """A step of rows (computed, queries) over `TABLE`."""
    starts = torch.tensor([0, *[queries for _, queries in parts]]).cumsum(0)
    lengths = torch.tensor([computed + queries for computed, queries in parts])
    return Rows(starts, lengths, TABLE[: len(parts)], orders, PAGE)


def step(worker, orders, *parts):
    """What the step's rows have to score."""
    worker.begin_step(orders)
    worker.looks = rows(orders, *parts).looks()
    return worker.looks


def test_a_row_is_found_by_the_page_of_its_last_token():
    # Of the second row, tokens 20 to 27 come, of which 24 to 27 are in the window, on page 66.
    (look,) = rows(Orders({66: Ask(5, 24, 28)}), (3, 1), (20, 8), (0, 5)).looks()
    assert (look.tickets, look.tokens.tolist()) == ([5], [[5, 6, 7, 8]])
    assert look.first_places.tolist() == [24]
    assert look.pages.tolist() == [[60, 61, 62, 63, 64, 65, 66]]
    assert look.places.tolist() == [[0, 1, 2, 3, 4, 5, 6]]


def test_tokens_behind_the_prompt_need_not_score():
    # Computed again after a preemption, with what was answered.
    (look,) = rows(Orders({58: Ask(5, 24, 30)}), (10, 24)).looks()
    assert look.tokens.tolist() == [[14, 15, 16, 17, 18, 19]]
    assert look.pages.shape == (1, 8)


def test_rows_of_one_query_score_together_over_what_they_have_left():
    asks = {58: Ask(5, 33, 34), 63: Ask(6, 12, 13), 74: Ask(7, 10, 20)}
    evictions = {58: (Eviction(30, mask_of([1, 2])),)}
    together, other = rows(Orders(asks, evictions), (33, 1), (12, 1), (10, 10)).looks()
    assert (together.tickets, other.tickets) == ([5, 6], [7])
    assert together.tokens.tolist() == [[0], [1]]
    # Token 33 is number 25 of those that are left.
    assert together.first_places.tolist() == [25, 12]
    assert together.held == [7, 4]
    assert together.pages[0].tolist() == [50, 53, 54, 55, 56, 57, 58]
    assert together.places[0].tolist() == [0, 3, 4, 5, 6, 7, 8]
    assert together.pages[1, :4].tolist() == [60, 61, 62, 63]
    assert other.tokens.tolist() == [list(range(2, 12))]


def test_no_more_rows_score_together_than_memory_is_there_for(monkeypatch):
    monkeypatch.setattr(steps, "ROWS_AT_ONCE", 2)
    asks = {52: Ask(1, 9, 10), 62: Ask(2, 9, 10), 72: Ask(3, 9, 10)}
    looks = rows(Orders(asks), (9, 1), (9, 1), (9, 1)).looks()
    assert [look.tickets for look in looks] == [[1, 2], [3]]


def test_a_row_that_is_computed_in_parts_scores_by_the_last_of_them():
    evictions = {58: (Eviction(30, mask_of([1])), Eviction(32, mask_of([1, 3])))}
    (look,) = rows(Orders({58: Ask(5, 33, 35)}, evictions), (28, 7)).looks()
    assert look.tokens.tolist() == [[5, 6]]
    assert look.places.tolist() == [[0, 2, 4, 5, 6, 7, 8]]
    assert look.first_places.tolist() == [25]


def test_what_the_chunks_of_a_window_give_decides_at_its_end():
    worker = Worker(PAGE, CHUNKKV)
    (look,) = step(worker, Orders({56: Ask(5, 24, 28)}), (20, 8))
    look.got[0, 4:8] = 1.0
    assert worker.end_step() == {}
    choice = Choice(mask_of(range(6)), 4)
    (look,) = step(worker, Orders({57: Ask(5, 28, 30, choice)}), (28, 2))
    look.got[0, 12:16] += 2.0
    # Of the first six pages, 1 and 3 are the best.
    assert worker.end_step() == {5: mask_of([0, 2, 4, 5])}
    assert worker.totals == {}


def test_what_pages_got_adds_up_while_a_request_decodes_and_pages_leave():
    worker = Worker(PAGE, H2O)
    (look,) = step(worker, Orders({54: Ask(5, 16, 17)}), (16, 1))
    look.got[0] = torch.tensor([0.1, 0.4, 0.2, 0.3, 0.9]).repeat_interleave(PAGE)
    assert worker.end_step() == {}
    gone = {54: (Eviction(17, mask_of([0])),)}
    choice = Choice(mask_of([1, 2, 3]), 1)
    (look,) = step(worker, Orders({54: Ask(5, 17, 18, choice)}, gone), (17, 1))
    look.got[0] = torch.tensor([0.0, 0.3, 0.0, 0.5]).repeat_interleave(PAGE)
    # Pages 1 to 3 have 0.4, 0.5 and 0.3 now.
    assert worker.end_step() == {5: mask_of([3])}
    assert worker.totals[5][:, 0].tolist() == pytest.approx([0.1, 0.4, 0.5, 0.3, 1.4])


def test_nothing_is_remembered_of_requests_that_are_over():
    worker = Worker(PAGE, H2O)
    step(worker, Orders({56: Ask(5, 24, 28)}), (20, 8))
    worker.end_step()
    assert list(worker.totals) == [5]
    worker.begin_step(Orders(over=(5, 6)))
    assert worker.totals == {}


def test_rows_lose_what_the_orders_say():
    found = rows(Orders(evictions={68: (Eviction(30, mask_of([1, 2])),)}), (33, 1), (33, 1))
    assert found.kept.lengths.tolist() == [34, 26]
    assert found.table[1, :7].tolist() == [60, 63, 64, 65, 66, 67, 68]


def test_orders_for_rows_that_are_not_there_end_the_server():
    orders = Orders(evictions={68: (Eviction(30, 2),)})
    with pytest.raises(EngineError, match="does not find 1 requests among the 1"):
        rows(orders, (33, 1))


def test_between_steps_there_are_no_orders():
    worker = Worker(PAGE, CHUNKKV)
    worker.begin_step(Orders(evictions={58: (Eviction(30, 2),)}))
    worker.end_step()
    assert worker.orders == Orders()
