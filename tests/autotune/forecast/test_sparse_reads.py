"""What a step reads of a cache is what kvtune's plugin reads of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.forecast_baseline import CONFIG
from contracts.policy_samples import on_cpu
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.forecast.sparse_reads import SparseReads, sparse_reads
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.engines.simulated.scheduler import Sequence, Step
from kvtune.policies.model_shape import shape_of
from kvtune.policies.page_budget import PageBudget
from kvtune.policies.plugin_arguments import (
    EVICTION_SHARE,
    HOST_BYTES,
    QUEST_TOKENS,
    STORE_FORMAT,
    WINDOW_TOKENS,
)
from kvtune.policies.plugin_config import QuestConfig
from kvtune.policies.settings import settings_of
from kvtune.policies.sink_window import SinkWindow

WINDOW = SinkWindow(sink_tokens=4, window_tokens=8, block_tokens=4)
QUEST = QuestConfig(budget_tokens=12, dense_layers=0)
PROMPT = 40
BUDGET = PageBudget(sink_tokens=4, window_tokens=4, block_tokens=4, share=0.5)


@pytest.mark.parametrize(
    ("cached", "read"),
    [
        (0, 1),
        (11, 12),  # three pages are the budget
        (12, 9 + 4),  # the latest page has one token, two others are full; four summaries
        (15, 12 + 4),
        (99, 12 + 25),
    ],
)
def test_quest_reads_the_latest_page_others_up_to_the_budget_and_all_summaries(cached, read):
    assert SparseReads(4, quest=QUEST).decoded(cached, PROMPT) == read


def test_the_first_layers_read_everything():
    # Half of the layers: 100 tokens in one half, 12 and 25 summaries in the other.
    assert SparseReads(4, quest=QUEST, dense_share=0.5).decoded(99, PROMPT) == 50 + 18.5


@pytest.mark.parametrize(
    ("quest", "read"),
    [
        (QuestConfig(pages=2, dense_layers=0), 8 + 25),
        (QuestConfig(share=0.2, dense_layers=0), 20 + 25),
        (QuestConfig(budget_tokens=13, dense_layers=0), 16 + 25),
    ],
)
def test_a_budget_in_any_form_is_whole_pages(quest, read):
    assert SparseReads(4, quest=quest).decoded(99, PROMPT) == read


def test_a_share_is_one_of_pages_as_the_plugin_counts_them():
    # Nine tokens are three pages, of which 0.34 is more than one: 5 of 9 tokens, three summaries.
    assert SparseReads(4, quest=QuestConfig(share=0.34, dense_layers=0)).decoded(8, PROMPT) == 5 + 3


def test_protected_pages_are_read_beyond_the_budget():
    # Five pages are protected, and one is written.
    reads = SparseReads(4, quest=QUEST, protected_tokens=17)
    assert reads.decoded(99, PROMPT) == 24 + 25


def test_what_is_protected_is_taken_from_the_settings():
    asked = {QUEST_TOKENS: 12, "additional-config.kvtune.protect.prefix_tokens": 17}
    reads = sparse_reads(settings_of(asked, on_cpu()), None)
    assert reads is not None
    assert reads.protected_tokens == 17


@pytest.mark.parametrize(
    ("cached", "read"),
    [(0, 1), (15, 16), (16, 13), (19, 16), (20, 13), (99, 16)],
)
def test_a_window_reads_the_sinks_its_pages_and_the_latest(cached, read):
    # A page of sinks, two of the window, and one that is written.
    assert SparseReads(4, WINDOW).decoded(cached, PROMPT) == read


def test_quest_chooses_among_what_the_window_keeps():
    # 16 tokens in four pages are kept; three are read, and four summaries.
    assert SparseReads(4, WINDOW, QUEST).decoded(99, PROMPT) == 12 + 4


@pytest.mark.parametrize(
    ("cached", "read"),
    # Ten pages, of which five are gone once the prompt is computed.
    [(0, 1), (39, 40), (40, 21), (43, 24), (99, 80)],
)
def test_page_eviction_reads_what_is_left_of_a_prompt_and_all_that_follows(cached, read):
    assert SparseReads(4, page_budget=BUDGET).decoded(cached, PROMPT) == read


def test_quest_chooses_among_what_page_eviction_left():
    # 20 of 40 tokens are left and one is written: six pages, of which three are read.
    reads = SparseReads(4, quest=QUEST, page_budget=BUDGET)
    assert reads.decoded(40, PROMPT) == 4 + 4 + 1 + 6


@given(cached=st.integers(0, 500), budget=st.integers(1, 300), dense=st.floats(0, 1))
def test_no_more_pages_are_read_than_without(cached, budget, dense):
    quest = QuestConfig(budget_tokens=budget, dense_layers=0)
    read = SparseReads(16, quest=quest, dense_share=dense).decoded(cached, PROMPT)
    summaries = -(-(cached + 1) // 16)
    assert min(budget, cached + 1) * 0.99 - 16 <= read <= cached + 1 + summaries


def test_settings_say_what_is_read():
    model = shape_of(CONFIG, "config.json")
    for whole in ({}, {STORE_FORMAT: "int8"}, {HOST_BYTES: 1 << 30}):
        assert sparse_reads(settings_of(whole, on_cpu()), model) is None
    kept = sparse_reads(settings_of({EVICTION_SHARE: 0.5, "block-size": 32}, on_cpu()), model)
    assert (kept.page_budget.share, kept.page_budget.block_tokens) == (0.5, 32)
    asked = {QUEST_TOKENS: 512, WINDOW_TOKENS: 1024, "block-size": 32}
    reads = sparse_reads(settings_of(asked, on_cpu()), model)
    assert reads.dense_share == 2 / 30
    assert reads.quest.budget_tokens == 512
    assert reads.sink_window == SinkWindow(4, 1024, 32)


def test_a_step_takes_less_time_by_what_it_does_not_read():
    cost = StepCost(fixed_s=1.0, per_kv_token_s=0.01, per_prefill_token_s=0.1)
    decoding = Sequence(0, 90, 10, [], computed_tokens=99)
    decoding.known_tokens = 100
    step = Step([(decoding, 1)])
    reads = SparseReads(4, WINDOW)
    assert cost.duration_s(step) == pytest.approx(2.0)
    assert cost.duration_s(step, reads) == pytest.approx(1.16)
    assert cost.duration_s(step, reads, saved_ratio=0.5) == pytest.approx(1.58)
    # A prompt of 90 tokens has 23 pages, of which 11 are gone when it is answered.
    evicting = SparseReads(4, page_budget=BUDGET)
    assert cost.duration_s(step, evicting) == pytest.approx(2.0 - 0.44)
    prompt = Sequence(0, 90, 10, [], computed_tokens=32)
    assert cost.duration_s(Step([(prompt, 10)]), evicting) == pytest.approx(1 + 0.42 + 1.0)
    # Eight pages are cached, of which the first and the last two stay, and ten tokens are computed.
    assert cost.duration_s(Step([(prompt, 10)]), reads) == pytest.approx(1 + 0.22 + 1.0)


def test_what_reads_back_takes_its_time_in_prompts_too_where_that_is_said():
    cost = StepCost(fixed_s=1.0, per_kv_token_s=0.01, per_prefill_token_s=0.1, read_ratio=3.0)
    step = Step([(Sequence(0, 90, 10, [], computed_tokens=32), 10)])
    assert cost.duration_s(step) == pytest.approx(1 + 0.42 + 1.0)
    assert replace(cost, prompt_read_ratio=3.0).duration_s(step) == pytest.approx(1 + 1.26 + 1.0)
