"""Thrash of the prefix cache, and what only looks like it."""

from dataclasses import replace

import pytest
from contracts.windows import (
    prefixes_in_turn,
    revisited_prefixes,
    row,
)

from kvtune.profilers.verdict import judge
from kvtune.types import Bottleneck


def test_thrash_is_named_with_what_a_larger_cache_would_spare():
    verdict = judge(prefixes_in_turn())
    # 32 of 40 prompts share 768 of 896 tokens with an earlier one, less a block of 128.
    missed = 0.8 * 768 / 896 - 128 / 896
    assert row(verdict, "reusable_prefix_missed").value == pytest.approx(missed)
    assert row(verdict, "kv_cache_turnover").value == pytest.approx(36_160 / 4224)
    # 199.1 prompt tokens a step of 195 ms, at 17.2 a read of the weights, which takes 4.64 ms.
    computed = 35_840 / 180 / (1.0e12 / 58e9) * (269e6 / 58e9) / (35.126 / 180)
    assert verdict.shares[Bottleneck.PREFIX_THRASH] == pytest.approx(computed * missed, abs=0.002)
    assert verdict.shares[Bottleneck.COMPUTE] == pytest.approx(computed * (1 - missed), abs=0.002)
    assert "more sequence slots will evict more" in verdict.summary


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_tokens": 182 * 1024},  # everything stored in the window still fits
        {"reusable_prefix_share": dict.fromkeys((16, 128), 0.0)},  # unique prompts
        # 60% of the prefill could be spared, and it is 14% of the time.
        {"prefill_s": 5.0, "weight_bytes": None, "decode_s": 31.0},
        {"effective": {"block_size_tokens": 128, "enable_prefix_caching": False}},
    ],
)
def test_few_hits_alone_are_no_thrash(changed):
    assert judge(revisited_prefixes(**changed)).bottleneck is not Bottleneck.PREFIX_THRASH


def counting_evictions(seen, blocks):
    key = "vllm:kv_block_idle_before_evict_seconds_count"
    return replace(seen, counters={**seen.counters, key: blocks})


@pytest.mark.parametrize(
    ("seen", "confidence"),
    [
        # Some blocks were evicted, but those may be of an earlier load.
        (counting_evictions(revisited_prefixes(kv_tokens=182 * 1024), 67), "medium"),
        (counting_evictions(revisited_prefixes(kv_tokens=None), 67), "medium"),
        # Neither the size of the cache nor its evictions are known.
        (revisited_prefixes(kv_tokens=None), "low"),
    ],
)
def test_thrash_is_less_sure_where_nothing_shows_that_this_load_was_evicted(seen, confidence):
    verdict = judge(seen)
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.PREFIX_THRASH, confidence)


def test_misses_with_no_evictions_are_no_thrash():
    seen = counting_evictions(revisited_prefixes(kv_tokens=None), 0)
    assert judge(seen).bottleneck is not Bottleneck.PREFIX_THRASH


def test_falling_hits_of_decoding_that_hardly_prefills_are_no_thrash():
    changed = {"prefill_s": 3.0, "decode_s": 33.0, "weight_bytes": None}
    verdict = judge(unknown_reuse(*[0.7] * 6 + [0.2] * 6, **changed))
    assert row(verdict, "prefix_hit_fall").holds is True
    assert verdict.bottleneck is not Bottleneck.PREFIX_THRASH


def test_blocks_larger_than_the_shared_prefix_are_no_thrash():
    # 240 tokens of a system prompt, blocks of 784: no hit is right, and no larger cache helps.
    seen = revisited_prefixes(
        effective={"block_size_tokens": 784, "enable_prefix_caching": True},
        reusable_prefix_share={16: 0.23, 64: 0.18, 128: 0.12, 256: 0.0, 512: 0.0},
    )
    verdict = judge(seen)
    assert verdict.bottleneck is not Bottleneck.PREFIX_THRASH
    assert row(verdict, "reusable_below_block_size").value == pytest.approx(0.23)
    assert row(verdict, "reusable_below_block_size").holds is True


@pytest.mark.parametrize("is_counted_once", [True, False])
def test_recomputed_tokens_are_not_taken_for_hits(is_counted_once):
    """vllm issue 25780: 32% of hits on unique prompts, because preempted ones found themselves."""
    seen = revisited_prefixes(
        preemptions=0,
        counters={
            "vllm:prompt_tokens_total": 48_000,
            "vllm:prefix_cache_queries_total": 70_600,
            "vllm:prefix_cache_hits_total": 22_600,
            **({"vllm:prompt_tokens_cached_total": 0} if is_counted_once else {}),
        },
        reusable_prefix_share=dict.fromkeys((16, 32, 64, 128), 0.7),
    )
    verdict = judge(seen)
    assert row(verdict, "prefix_lookups_per_prompt_token").holds is True
    missed = row(verdict, "reusable_prefix_missed")
    assert missed.value == (pytest.approx(0.575) if is_counted_once else None)


def test_hits_on_unique_prompts_are_called_no_reuse():
    seen = revisited_prefixes(
        counters={
            "vllm:prompt_tokens_total": 49_152,
            "vllm:prefix_cache_queries_total": 49_152,
            "vllm:prefix_cache_hits_total": 15_729,
        },
        reusable_prefix_share=dict.fromkeys((16, 128), 0.0),
    )
    verdict = judge(seen)
    beyond = row(verdict, "prefix_hits_beyond_reuse")
    assert beyond.value == pytest.approx(0.32, abs=1e-4)
    assert beyond.holds is True
    assert "recomputed after a preemption" in beyond.says


def unknown_reuse(*hit_shares, **changed):
    """An attached server: lookups of 1,000 tokens each half second, with these shares of hits."""
    seen = revisited_prefixes(reusable_prefix_share={}, **changed)
    asked, served = [], []
    for index, share in enumerate((0.0, *hit_shares)):
        asked.append((index / 2, 1000.0 * index))
        served.append((index / 2, (served[-1][1] if served else 0.0) + 1000 * share))
    samples = {
        "vllm:prefix_cache_queries_total": asked,
        "vllm:prefix_cache_hits_total": served,
    }
    return replace(seen, gauges={**seen.gauges, **samples})


def early(idle_s, gap_s):
    return {
        "vllm:kv_block_idle_before_evict_seconds_sum": idle_s * 90,
        "vllm:kv_block_idle_before_evict_seconds_count": 90,
        "vllm:kv_block_reuse_gap_seconds_sum": gap_s * 30,
        "vllm:kv_block_reuse_gap_seconds_count": 30,
    }


@pytest.mark.parametrize(
    ("hit_shares", "block_times", "bottleneck", "confidence"),
    [
        ([0.7] * 6 + [0.2] * 6, {}, Bottleneck.PREFIX_THRASH, "low"),
        ([0.2] * 12, early(3.0, 2.0), Bottleneck.PREFIX_THRASH, "low"),
        ([0.7] * 6 + [0.2] * 6, early(3.0, 2.0), Bottleneck.PREFIX_THRASH, "medium"),
        ([0.2] * 6 + [0.7] * 6, early(60.0, 2.0), None, None),
        ([0.5] * 12, {}, None, None),
    ],
)
def test_thrash_of_unknown_prompts_needs_falling_hits_or_short_lives(
    hit_shares, block_times, bottleneck, confidence
):
    verdict = judge(unknown_reuse(*hit_shares, counters=block_times))
    if bottleneck is None:
        assert verdict.bottleneck is not Bottleneck.PREFIX_THRASH
    else:
        assert (verdict.bottleneck, verdict.confidence) == (bottleneck, confidence)


def test_requests_without_room_for_themselves_are_capacity_first():
    seen = revisited_prefixes(queue_s=20.0, samples=[(3, 2, 0.8)] * 38)
    assert judge(seen).bottleneck is Bottleneck.KV_CAPACITY
