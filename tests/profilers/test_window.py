"""Readings of a window, by hand: 100 steps of 0.1 s, 4 sequences of 1,100 tokens."""

from dataclasses import replace

import pytest
from contracts.windows import prefill_only, stepping

from kvtune.profilers.window import CACHED, HITS, PROMPTS, QUERIES, RUNNING, WAITING, Window


def with_engines(seen, engines):
    return replace(seen, gauges={**seen.gauges, "kvtune:engines": [(0.0, float(engines))]})


def test_a_mean_step_is_read_from_counters():
    seen = stepping()
    assert seen.mean_step_s == pytest.approx(0.1)
    assert seen.sequences_per_step == pytest.approx(4)
    assert seen.prefill_tokens_per_step == pytest.approx(20)
    assert seen.kv_tokens_per_step == pytest.approx(4400)
    assert seen.kv_bytes_per_step == pytest.approx(4400 * 23_040)


def test_waiting_while_others_run_is_known_without_usage_and_unknown_without_its_gauge():
    running = {RUNNING: [(0.0, 1.0), (1.0, 1.0), (2.0, 0.0), (3.0, 2.0), (4.0, 1.0)]}
    waits = {WAITING: [(0.0, 3.0), (1.0, 0.0), (2.0, 3.0), (3.0, 0.0), (4.0, 1.0)]}
    assert Window(5.0, gauges={**running, **waits}).waiting_share_while_busy == 0.5
    assert Window(5.0, gauges=running).waiting_share_while_busy is None
    assert Window(5.0, gauges={RUNNING: [(0.0, 0.0)], **waits}).waiting_share_while_busy is None


# 10,000 prompt tokens, 8,000 of them from the cache, and 400 generated ones.
COMPUTED, WITH_CACHED = 2000 + 400, 10_000 + 400


@pytest.mark.parametrize(
    ("step_tokens", "counters", "computed"),
    [
        (COMPUTED, {PROMPTS: 10_000, CACHED: 8000}, 2000),
        (WITH_CACHED, {PROMPTS: 10_000, CACHED: 8000}, 2000),
        (WITH_CACHED, {PROMPTS: 10_000, QUERIES: 10_000, HITS: 8000}, 2000),
        (WITH_CACHED, {PROMPTS: 10_000, QUERIES: 20_000, HITS: 18_000}, None),
        (WITH_CACHED, {PROMPTS: 10_000, QUERIES: 20_000, HITS: 0}, 10_000),
        (WITH_CACHED, {PROMPTS: 10_000, QUERIES: 0, HITS: 0}, 10_000),
        (WITH_CACHED, {}, 10_000),
    ],
    ids=["new", "before 43346", "before 0.16", "repeated", "no hits", "caching off", "unknown"],
)
def test_cached_prompt_tokens_are_not_computed_though_old_versions_count_them(
    step_tokens, counters, computed
):
    seen = stepping(step_tokens=step_tokens, counters=counters)
    expected = (None, None) if computed is None else pytest.approx((computed, computed / 100))
    assert (seen.computed_prompt_tokens, seen.prefill_tokens_per_step) == expected


def test_idle_time_is_no_time_of_steps():
    seen = stepping(samples=[(0, 4, 0.3), (0, 0, 0.0)] * 10)
    assert seen.busy_share == pytest.approx(0.5)
    assert seen.mean_step_s == pytest.approx(0.05)


def test_steps_of_prefill_are_timed_though_the_gauges_read_zero():
    assert prefill_only().mean_step_s == pytest.approx(1.0)


def test_engines_work_at_the_same_time_and_each_has_its_limits():
    one, two = stepping(max_num_seqs=8), with_engines(stepping(max_num_seqs=8), 2)
    assert (one.engines, two.engines) == (1, 2)
    assert two.mean_step_s == pytest.approx(2 * one.mean_step_s)
    assert (one.sequence_limit, two.sequence_limit) == (8, 16)


def test_room_is_that_of_the_fullest_engine():
    seen = with_engines(stepping(samples=[(1, 4, 0.4)] * 4, kv_tokens=10_000), 2)
    assert seen.room_prompts == pytest.approx(6.0)
    fullest = [(at_s, 0.7) for at_s, _ in seen.gauges["vllm:kv_cache_usage_perc"]]
    gauges = {**seen.gauges, 'vllm:kv_cache_usage_perc{engines="fullest"}': fullest}
    seen = replace(seen, gauges=gauges)
    assert seen.room_prompts == pytest.approx(3.0)
    assert seen.peak_usage == 0.7


def test_what_an_empty_window_does_not_hold_is_unknown():
    seen = Window(window_s=10.0)
    for reading in ("mean_step_s", "busy_s", "sequences_per_step", "kv_tokens_per_step"):
        assert getattr(seen, reading) is None
