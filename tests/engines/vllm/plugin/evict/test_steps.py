"""A worker over the steps of a request: whose rows score, what is decided, what is remembered."""

import pytest

torch = pytest.importorskip("torch")

from kvtune.engines.vllm.plugin.evict.orders import Ask, Eviction, Orders, mask_of  # noqa: E402
from kvtune.engines.vllm.plugin.evict.steps import Rows, Worker  # noqa: E402
from kvtune.errors import EngineError  # noqa: E402
from kvtune.policies.page_budget import PageBudget  # noqa: E402
from kvtune.policies.plugin_config import PageEvictionConfig  # noqa: E402

# Of a prompt of 30 tokens, page 7 must stay with 6 (the window begins at token 24), and two more.
ASKED = PageEvictionConfig(budget_tokens=16, window_tokens=6, sink_tokens=0)
BUDGET = PageBudget(0, 6, 4, budget_tokens=16)
TABLE = torch.arange(30).view(3, 10) + 50


@pytest.fixture
def worker():
    return Worker(BUDGET, ASKED)


def rows(worker, *parts):
    """A step of rows (computed, queries) over `TABLE`."""
    starts = torch.tensor([0, *[queries for _, queries in parts]]).cumsum(0)
    lengths = torch.tensor([computed + queries for computed, queries in parts])
    return Rows(starts, lengths, TABLE[: len(parts)], worker)


def test_a_row_is_found_by_the_page_of_its_last_token(worker):
    # Of the second row, tokens 20 to 27 come, of which 24 to 27 are in the window, on page 66.
    worker.begin_step(Orders({66: Ask(5, 30, begins=True, ends=False)}))
    (look,) = rows(worker, (3, 1), (20, 8), (0, 5)).looks()
    assert (look.tokens, look.first_place) == (slice(5, 9), 24)
    assert look.pages.tolist() == [60, 61, 62, 63, 64, 65, 66]
    assert look.total.tolist() == [0.0] * 30


def test_tokens_behind_the_prompt_score_nothing(worker):
    # Computed again after a preemption, with what was answered.
    worker.begin_step(Orders({58: Ask(5, 30, begins=True, ends=True)}))
    (look,) = rows(worker, (10, 24)).looks()
    assert (look.tokens, look.first_place) == (slice(14, 20), 24)


def test_what_the_chunks_of_a_window_give_decides_at_its_end(worker):
    worker.begin_step(Orders({56: Ask(5, 30, begins=True, ends=False)}))
    (look,) = rows(worker, (20, 8)).looks()
    look.total[4:8] = 1.0
    assert worker.end_step() == {}
    worker.begin_step(Orders({57: Ask(5, 30, begins=False, ends=True)}))
    (look,) = rows(worker, (28, 2)).looks()
    look.total[12:16] += 2.0
    # Pages 6 and 7 hold the window; the best others are 1 and 3.
    assert worker.end_step() == {5: mask_of([0, 2, 4, 5])}
    assert worker.totals == {}


def test_a_window_that_begins_again_forgets_what_it_had(worker):
    for total in (1.0, 0.0):
        worker.begin_step(Orders({56: Ask(5, 30, begins=True, ends=False)}))
        (look,) = rows(worker, (20, 8)).looks()
        assert not look.total.any()
        look.total.add_(total)
        worker.end_step()


def test_nothing_is_remembered_of_requests_that_are_over(worker):
    worker.begin_step(Orders({56: Ask(5, 30, begins=True, ends=False)}))
    rows(worker, (20, 8)).looks()
    worker.end_step()
    worker.begin_step(Orders(over=(5, 6)))
    assert worker.totals == {}


def test_rows_lose_what_the_orders_say(worker):
    worker.begin_step(Orders(evictions={68: Eviction(30, mask_of([1, 2]))}))
    kept = rows(worker, (33, 1), (33, 1)).kept()
    assert kept.lengths.tolist() == [34, 26]
    assert kept.masks == {1: mask_of([1, 2])}


def test_orders_for_rows_that_are_not_there_end_the_server(worker):
    worker.begin_step(Orders(evictions={68: Eviction(30, 2)}))
    with pytest.raises(EngineError, match="does not find 1 requests among the 1"):
        rows(worker, (33, 1))


def test_between_steps_there_are_no_orders(worker):
    worker.begin_step(Orders(evictions={58: Eviction(30, 2)}))
    worker.end_step()
    assert worker.orders == Orders()
