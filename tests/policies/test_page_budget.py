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
    assert (budget.sink_pages(330), budget.first_window_page(330)) == (1, 9)
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
    budget = PageBudget(4, 40, 32, budget_tokens=96)
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
    free = set(range(budget.sink_pages(tokens), budget.first_window_page(tokens)))
    assert pages - free == must


@given(budgets, st.integers(1, 2000))
def test_a_longer_prompt_never_keeps_fewer_pages(budget, tokens):
    assert budget.kept(tokens) <= budget.kept(tokens + budget.block_tokens)
