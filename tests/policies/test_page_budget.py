"""How many pages of a prompt stay, against counting them one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.policies.page_budget import PageBudget

budgets = st.one_of(
    st.builds(
        PageBudget,
        st.integers(0, 70),
        st.integers(1, 100),
        st.sampled_from([8, 32]),
        budget_tokens=st.integers(1, 600),
    ),
    st.builds(
        PageBudget,
        st.integers(0, 70),
        st.integers(1, 100),
        st.sampled_from([8, 32]),
        share=st.floats(0.01, 1),
    ),
)


def test_all_is_rounded_up_to_whole_pages():
    budget = PageBudget(sink_tokens=4, window_tokens=40, block_tokens=32, budget_tokens=130)
    # 330 tokens lie on 11 pages, the last 40 of them on pages 9 and 10; 130 tokens fill 5.
    assert budget.pages(330) == 11
    assert budget.stays(330) == 0b11000000001
    assert budget.kept(330) == 5


@pytest.mark.parametrize(("share", "pages", "kept"), [(0.07, 100, 7), (0.071, 100, 8), (1, 9, 9)])
def test_a_share_is_of_the_prompts_pages(share, pages, kept):
    assert PageBudget(0, 1, 32, share=share).kept(32 * pages) == kept


def test_what_must_stay_stays_beyond_the_budget():
    budget = PageBudget(sink_tokens=65, window_tokens=33, block_tokens=32, budget_tokens=32)
    # Three pages of sinks, and the last two.
    assert budget.kept(320) == 5


def test_a_prompt_within_the_budget_is_left_alone():
    budget = PageBudget(4, 32, 32, budget_tokens=320)
    assert not budget.evicts(320)
    assert budget.evicts(321)


def test_the_windows_queries_are_never_reused_where_pages_are_to_be_ranked():
    budget = PageBudget(4, 40, 32, budget_tokens=96, scored_tokens=40)
    assert budget.reusable_tokens(500) == 460
    # Nothing is ranked: as in stock vLLM, all but the last token.
    assert budget.reusable_tokens(96) == 95


@given(budgets, st.integers(1, 2000))
def test_what_must_stay_is_among_what_is_kept(budget, tokens):
    size = budget.block_tokens
    must = {place // size for place in range(tokens) if place < budget.sink_tokens}
    must |= {place // size for place in range(tokens) if place >= tokens - budget.window_tokens}
    pages = {place // size for place in range(tokens)}
    assert len(must) <= budget.kept(tokens) <= len(pages)
    assert {page for page in pages if budget.stays(tokens) >> page & 1} == must


@given(budgets, st.integers(1, 2000))
def test_a_longer_prompt_never_keeps_fewer_pages(budget, tokens):
    assert budget.kept(tokens) <= budget.kept(tokens + budget.block_tokens)


def test_where_all_queries_rank_pages_nothing_is_reused():
    budget = PageBudget(4, 40, 32, budget_tokens=96, while_decoding=True)
    # Also of a short prompt, as what follows it may outgrow the budget.
    assert (budget.reusable_tokens(500), budget.reusable_tokens(20)) == (0, 0)


def test_marked_spans_stay_with_each_page_that_they_touch():
    budget = PageBudget(sink_tokens=4, window_tokens=32, block_tokens=32, budget_tokens=32)
    marked = budget.pages_of([(70, 130), (192, 193)])
    assert marked == 0b1011100
    # 320 tokens: the first page, the last one, and four that are marked.
    assert budget.kept(320, marked) == 6


def test_what_is_generated_counts_while_decoding():
    budget = PageBudget(4, 8, 8, budget_tokens=32, while_decoding=True)
    # A prompt of 20 tokens; 33 tokens lie on five pages, of which one too many.
    assert budget.excess(20, 32) == 0
    assert budget.excess(20, 33) == 1
    assert budget.excess(20, 41, gone=0b10) == 1


@given(budgets, st.integers(1, 2000), st.integers(0, 500), st.data())
def test_an_excess_can_always_be_taken_from_pages_that_may_go(budget, prompt, more, data):
    tokens = prompt + more
    spans = data.draw(
        st.lists(st.tuples(st.integers(0, prompt - 1), st.integers(1, 40)), max_size=3)
    )
    marked = budget.pages_of((start, min(start + length, prompt)) for start, length in spans)
    stays = budget.stays(tokens, marked)
    may_go = [page for page in range(budget.pages(tokens)) if not stays >> page & 1]
    gone = sum(1 << page for page in data.draw(st.sets(st.sampled_from(may_go)))) if may_go else 0
    left = [page for page in may_go if not gone >> page & 1]
    assert 0 <= budget.excess(prompt, tokens, gone, marked) <= len(left)
