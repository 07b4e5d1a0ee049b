from dataclasses import replace

import pytest
from contracts.windows import (
    KV_BYTES_PER_TOKEN,
    WEIGHT_BYTES,
    capacity,
    gauges,
    idle,
    long_decode,
    long_prompts,
    one_prefix,
    prefill_only,
    prefixes_in_turn,
    revisited_prefixes,
    shared_prefix,
    short_decode,
    step_time,
    stepping,
)
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.scrape import counters_delta, parse_metrics
from kvtune.profilers.verdict import judge
from kvtune.profilers.window import KV_USAGE, WAITING, WAITING_CAPACITY, Window
from kvtune.types import Bottleneck, EffectiveConfig


def row(verdict, metric):
    return next(item for item in verdict.evidence if item.metric == metric)


# --- windows recorded on a real server ---


@pytest.mark.parametrize(
    ("seen", "bottleneck", "confidence"),
    [
        (capacity(), Bottleneck.KV_CAPACITY, "high"),
        # Most of the traffic peak, but two thirds of what is read are weights.
        (shared_prefix(), Bottleneck.WEIGHT_BANDWIDTH, "medium"),
        (prefill_only(), Bottleneck.COMPUTE, "high"),
        (short_decode(), Bottleneck.WEIGHT_BANDWIDTH, "high"),
        (long_decode(), Bottleneck.KV_BANDWIDTH, "high"),
        (prefixes_in_turn(), Bottleneck.PREFIX_THRASH, "high"),
        (one_prefix(), Bottleneck.COMPUTE, "medium"),
        (idle(), Bottleneck.IDLE, "high"),
    ],
)
def test_recorded_window_is_recognised(seen, bottleneck, confidence):
    verdict = judge(seen)
    assert verdict.bottleneck is bottleneck
    assert verdict.confidence == confidence


def test_waiting_below_full_usage_is_capacity_when_the_next_prompt_has_no_room():
    verdict = judge(
        long_prompts(prompt=9000, samples=[(2, 1, 0.39), (1, 2, 0.62), (1, 2, 0.62), (0, 2, 0.6)])
    )
    assert row(verdict, "peak_kv_usage").holds is False
    assert row(verdict, "free_kv_mean_prompts_while_waiting").holds is True
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.KV_CAPACITY, "high")


def test_waiting_for_the_token_budget_is_not_called_capacity():
    # Measured: four times the KV memory changed neither the duration nor the queue time.
    verdict = judge(long_prompts())
    assert row(verdict, "queue_time_share").holds is True
    assert row(verdict, "free_kv_mean_prompts_while_waiting").value > 2
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert "No single resource dominates" in verdict.summary
    assert "prefill and decoding apart" in verdict.next_experiment


def test_waiting_with_free_slots_and_unknown_cache_size_is_capacity_with_little_confidence():
    verdict = judge(long_prompts(kv_tokens=None))
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.KV_CAPACITY, "low")
    assert any("kv_cache_size_tokens" in item for item in verdict.missing)


# --- traps ---


def test_single_preemption_among_many_requests_is_no_bottleneck():
    seen = short_decode(preemptions=1, requests=200, steps=2400, step_tokens=200 * 128)
    assert judge(seen).bottleneck is not Bottleneck.KV_CAPACITY


def test_full_batch_with_room_in_the_cache_is_batch_width():
    seen = short_decode(
        max_num_seqs=8, queue_s=30.0, samples=[(6, 8, 0.1)] * 9 + [(0, 4, 0.05)] * 2
    )
    verdict = judge(seen)
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.BATCH_WIDTH, "high")
    assert "raising max_num_seqs will help" in verdict.summary
    assert "KV levers will not help" in verdict.summary


def test_full_batch_in_a_full_cache_is_capacity():
    seen = short_decode(max_num_seqs=8, queue_s=30.0, samples=[(6, 8, 0.97)] * 9)
    assert judge(seen).bottleneck is Bottleneck.KV_CAPACITY


def test_lower_limit_of_active_sequences_counts():
    seen = short_decode(queue_s=30.0, samples=[(6, 4, 0.1)] * 9)
    seen = replace(
        seen,
        effective=EffectiveConfig(
            max_num_seqs=256, max_num_active_seqs=4, kv_cache_size_tokens=23296
        ),
    )
    assert judge(seen).bottleneck is Bottleneck.BATCH_WIDTH


@pytest.mark.parametrize("labelled", [True, False])
def test_waiting_on_an_attached_server_without_its_limits_is_not_judged(labelled):
    samples = gauges(*[(6, 8, 0.3)] * 10)
    if not labelled:
        samples[WAITING] = samples.pop(WAITING_CAPACITY)
    verdict = judge(replace(short_decode(queue_s=30.0), gauges=samples, effective=None))
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert any("max_num_seqs" in item for item in verdict.missing)
    assert "max_num_seqs" in verdict.next_experiment


def test_preemptions_are_capacity_even_if_nothing_else_is_known():
    seen = replace(capacity(), effective=None, gauges={}, weight_bytes=None)
    assert (judge(seen).bottleneck, judge(seen).confidence) == (Bottleneck.KV_CAPACITY, "high")


def test_prefill_only_load_is_not_idle_although_its_gauges_read_zero():
    for seen in (prefill_only(), replace(prefill_only(), effective=None, weight_bytes=None)):
        verdict = judge(seen)
        assert verdict.bottleneck is Bottleneck.COMPUTE
        assert row(verdict, "peak_kv_usage").value is None


def test_estimates_of_zero_with_work_done_mean_that_they_are_off():
    seen = short_decode(tflops_per_s=0.0, gbytes_per_s=0.0)
    verdict = judge(seen)
    assert row(verdict, "flops_of_peak").value is None
    assert any("--enable-mfu-metrics" in item for item in verdict.missing)
    assert verdict.bottleneck is Bottleneck.WEIGHT_BANDWIDTH
    # Weights alone explain the traffic, so its estimate stands in for the engine's.
    assert row(verdict, "memory_traffic_of_peak").value == pytest.approx(0.632, abs=0.001)


def test_without_peaks_confidence_is_lower():
    bare = {"peak_flops_per_s": None, "peak_bytes_per_s": None}
    assert judge(long_decode(**bare)).bottleneck is Bottleneck.KV_BANDWIDTH
    assert judge(long_decode(**bare)).confidence == "low"
    assert judge(prefill_only(**bare)).confidence == "medium"


def test_without_ceilings_weights_and_overhead_are_not_told_apart():
    verdict = judge(short_decode(peak_flops_per_s=None, peak_bytes_per_s=None))
    assert row(verdict, "modelled_weight_reads_share").holds is True
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert "Either way KV levers will not help" in verdict.summary
    assert "kvtune doctor --measure" in verdict.next_experiment
    assert any("kvtune doctor --measure" in item for item in verdict.missing)
    assert Bottleneck.WEIGHT_BANDWIDTH not in verdict.shares


def test_without_ceilings_prompts_may_be_what_takes_the_time():
    # Recorded on two cores of 17 flop/byte: with ceilings, 91% of the modelled step is prefill.
    seen = stepping(
        window_s=20.3, requests=24, prompt=896, answer=8, steps=108, step_tokens=24 * 904
    )
    verdict = judge(seen)
    assert row(verdict, "modelled_weight_reads_share").holds is True
    assert row(verdict, "modelled_arithmetic_share_if_slow").holds is True
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert "compute prompts" in verdict.summary
    assert verdict.shares == {}
    known = judge(replace(seen, peak_bytes_per_s=58e9, peak_flops_per_s=1e12))
    assert row(known, "modelled_arithmetic_share").value == pytest.approx(0.91, abs=0.005)
    assert known.bottleneck is Bottleneck.COMPUTE


def test_weights_read_far_below_the_ceiling_are_overhead():
    # Ten times the time of the recorded steps: 6% of the peak.
    slow = {"tflops_per_s": 0, "gbytes_per_s": 0}
    seen = short_decode(window_s=65.0, samples=[(0, 8, 0.044)] * 120, **slow)
    verdict = judge(seen)
    assert row(verdict, "weight_reads_of_ceiling").value == pytest.approx(0.0599, abs=0.0001)
    assert verdict.bottleneck is Bottleneck.OVERHEAD


def test_idle_moments_do_not_dilute_the_use_of_the_device():
    half = short_decode(
        window_s=13.0, samples=[(0, 8, 0.044), (0, 0, 0)] * 13, tflops_per_s=0, gbytes_per_s=0
    )
    assert row(judge(half), "weight_reads_of_ceiling").value == pytest.approx(0.599, abs=0.001)
    assert judge(half).bottleneck is Bottleneck.WEIGHT_BANDWIDTH


def test_kv_reads_of_a_hardly_used_memory_are_no_bandwidth_limit():
    seen = long_decode(tflops_per_s=0.01, gbytes_per_s=0.5)
    assert judge(seen).bottleneck is Bottleneck.OVERHEAD


def test_more_than_a_peak_discredits_the_peak():
    verdict = judge(short_decode(gbytes_per_s=14.8))
    traffic = row(verdict, "memory_traffic_of_peak")
    assert traffic.value > 2
    assert traffic.holds is None
    assert any("peak does not fit" in item for item in verdict.missing)
    assert row(verdict, "weight_reads_of_ceiling").value is None
    assert verdict.bottleneck is Bottleneck.ABSTAIN


def test_unknown_model_is_named_as_missing():
    verdict = judge(short_decode(weight_bytes=None, peak_flops_per_s=None))
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert any("--model" in item for item in verdict.missing)
    assert "--model" in verdict.next_experiment


def test_what_is_asked_for_can_be_done():
    unknown = short_decode(
        weight_bytes=None, peak_flops_per_s=None, peak_bytes_per_s=None, queue_s=30.0
    )
    samples = gauges(*[(6, 8, 0.3)] * 10)
    for seen in (unknown, replace(unknown, effective=None, gauges=samples)):
        verdict = judge(seen)
        asked = " ".join([*verdict.missing, verdict.next_experiment])
        assert "flops_of_peak: measure the device that the server runs on: kvtune doctor" in asked
        assert "give" not in asked.lower()
        assert row(verdict, "flops_of_peak").holds is None, "the row is there, and unknown"
    assert "VLLM_SERVER_DEV_MODE=1" in verdict.next_experiment


def test_evicted_prefix_blocks_are_shown():
    seen = short_decode()
    key = "vllm:kv_block_idle_before_evict_seconds_count"
    seen = replace(seen, counters={**seen.counters, key: 67})
    assert row(judge(seen), "evicted_cached_blocks").holds is True
    assert any("--kv-cache-metrics" in item for item in judge(short_decode()).missing)


# --- by the step-time model ---


def model_of(*, fixed_s=0.0, per_sequence_s=0.0, per_kv_token_s=0.0, **more):
    return step_time(fixed_s, per_sequence_s, per_kv_token_s, **more)


@pytest.mark.parametrize(
    ("spread", "confidence"), [(0.1, "high"), (0.3, "medium"), (0.99, "medium"), (1.2, "low")]
)
def test_confidence_in_kv_bandwidth_follows_the_interval(spread, confidence):
    # 4,400 tokens x 15 us are 66% of a step of 0.1 s.
    model = model_of(fixed_s=0.03, per_kv_token_s=15e-6, spread=spread)
    verdict = judge(stepping(step_time=model))
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.KV_BANDWIDTH, confidence)
    assert row(verdict, "fitted_kv_share").value == pytest.approx(0.66)
    assert "66% of a step, between" in verdict.summary


def test_a_fit_outweighs_what_bytes_alone_suggest():
    # By bytes, half the traffic of this window is KV; fitted, KV costs next to nothing.
    by_bytes = judge(long_decode())
    assert (by_bytes.bottleneck, by_bytes.confidence) == (Bottleneck.KV_BANDWIDTH, "high")
    model = model_of(fixed_s=0.07, per_kv_token_s=1e-8, weight_read_s=0.008)
    fitted = judge(long_decode(step_time=model))
    assert (fitted.bottleneck, fitted.confidence) == (Bottleneck.OVERHEAD, "high")


def test_fit_with_large_errors_is_believed_less():
    model = model_of(fixed_s=0.03, per_kv_token_s=15e-6, error_share=0.4)
    verdict = judge(stepping(step_time=model))
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.KV_BANDWIDTH, "medium")


@pytest.mark.parametrize(
    ("weight_read_s", "bottleneck", "confidence"),
    [
        (0.06, Bottleneck.WEIGHT_BANDWIDTH, "high"),
        (0.045, Bottleneck.WEIGHT_BANDWIDTH, "medium"),
        (0.02, Bottleneck.OVERHEAD, "high"),
        (None, Bottleneck.ABSTAIN, "low"),
    ],
)
def test_fixed_price_is_divided_at_the_ceiling(weight_read_s, bottleneck, confidence):
    model = model_of(fixed_s=0.08, per_kv_token_s=1e-6, weight_read_s=weight_read_s)
    verdict = judge(stepping(step_time=model))
    assert (verdict.bottleneck, verdict.confidence) == (bottleneck, confidence)
    assert row(verdict, "fitted_fixed_share").value == pytest.approx(0.8)
    if weight_read_s is None:
        assert "kvtune doctor --measure" in verdict.next_experiment


def test_mixed_steps_get_shares_and_not_one_word():
    model = model_of(fixed_s=0.02, per_sequence_s=0.0025, per_kv_token_s=10e-6, weight_read_s=0.015)
    verdict = judge(stepping(step_time=model))
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert "No single resource dominates" in verdict.summary
    assert verdict.shares == pytest.approx(
        {
            Bottleneck.KV_BANDWIDTH: 0.44,
            Bottleneck.COMPUTE: 0.36,
            Bottleneck.WEIGHT_BANDWIDTH: 0.15,
            Bottleneck.OVERHEAD: 0.05,
        },
        abs=0.0011,
    )
    assert next(iter(verdict.shares)) is Bottleneck.KV_BANDWIDTH


def test_prefill_is_what_the_decode_model_leaves_over():
    verdict = judge(stepping(step_time=model_of(fixed_s=0.02, per_kv_token_s=1e-6)))
    assert verdict.bottleneck is Bottleneck.COMPUTE
    assert "Prefill arithmetic" in verdict.summary
    assert verdict.confidence == "medium", "nothing else says so"


def test_wide_batches_are_compute_of_decoding():
    verdict = judge(stepping(step_time=model_of(fixed_s=0.02, per_sequence_s=0.019)))
    assert verdict.bottleneck is Bottleneck.COMPUTE
    assert "a wider batch and KV levers will not help" in verdict.summary


def test_kv_read_far_below_the_ceiling_is_not_promised_to_gain_from_fewer_bytes():
    rate = {"estimate": 0.5e9, "low": 0.4e9, "high": 0.6e9, "unit": "B/s"}
    model = model_of(fixed_s=0.03, per_kv_token_s=15e-6, kv_bytes_per_s=rate)
    verdict = judge(stepping(step_time=model, peak_bytes_per_s=6.7e9))
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.KV_BANDWIDTH, "medium")
    assert "fewer bytes a token may not" in verdict.summary


def test_model_of_other_steps_is_left_aside():
    model = model_of(fixed_s=0.2, weight_read_s=0.0)
    verdict = judge(stepping(step_time=model))
    assert row(verdict, "step_time_predicted_over_observed").value == pytest.approx(2.0)
    assert row(verdict, "fitted_fixed_share").value is None
    assert verdict.bottleneck is not Bottleneck.OVERHEAD


# --- prefix cache ---


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


# --- versions and engines ---

OLD_PAGE = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 8.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 5.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{{engine="0",model_name="m"}} 0.2
# TYPE vllm:gpu_prefix_cache_queries_total counter
vllm:gpu_prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
# TYPE vllm:gpu_prefix_cache_hits_total counter
vllm:gpu_prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {queries}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} {finished}
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_sum{{engine="0",model_name="m"}} {computed}
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {steps}
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_sum{{engine="0",model_name="m"}} {queries}
vllm:request_prompt_tokens_count{{engine="0",model_name="m"}} {finished}
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="m"}} {prefill_s}
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_sum{{engine="0",model_name="m"}} {decode_s}
"""


def test_names_of_an_old_version_are_understood():
    """Names of vLLM 0.10 and before: no reasons of waiting, gpu_ before cache metrics."""
    none = dict.fromkeys(
        ("queries", "hits", "generated", "finished", "computed", "steps", "prefill_s", "decode_s"),
        0,
    )
    later = {
        "queries": 49_152,
        "hits": 4_915,
        "generated": 768,
        "finished": 48,
        "computed": 45_005,
        "steps": 420,
        "prefill_s": 22,
        "decode_s": 14,
    }
    before, after = (parse_metrics(OLD_PAGE.format(**values)) for values in (none, later))
    seen = Window(
        window_s=20.0,
        counters=counters_delta(before, after),
        gauges={key: [(i / 2, value) for i in range(40)] for key, value in after.gauges.items()},
        effective=EffectiveConfig(
            kv_cache_size_tokens=4096, max_num_seqs=256, block_size_tokens=128
        ),
        reusable_prefix_share={128: 0.73},
    )
    verdict = judge(seen)
    assert row(verdict, "peak_kv_usage").value == 0.2
    assert row(verdict, "waiting_sample_share").value == 1.0
    # 0.73 less a block of 128 in prompts of 1,024, less 10% of hits.
    assert row(verdict, "reusable_prefix_missed").value == pytest.approx(0.505, abs=1e-4)
    assert verdict.bottleneck is Bottleneck.PREFIX_THRASH


def several(seen, engines, fullest=None):
    more = {"kvtune:engines": [(0.0, float(engines))]}
    if fullest is not None:
        more['vllm:kv_cache_usage_perc{engines="fullest"}'] = [
            (at_s, fullest) for at_s, _ in seen.gauges[KV_USAGE]
        ]
    return replace(seen, gauges={**seen.gauges, **more})


def test_limits_of_several_engines_add_up():
    seen = short_decode(max_num_seqs=4, queue_s=30.0, samples=[(6, 4, 0.1)] * 9)
    assert judge(several(seen, 1)).bottleneck is Bottleneck.BATCH_WIDTH
    assert judge(several(seen, 2)).bottleneck is not Bottleneck.BATCH_WIDTH


def test_one_full_engine_is_capacity_though_the_mean_has_room():
    seen = short_decode(queue_s=30.0, samples=[(6, 8, 0.5)] * 9)
    assert judge(several(seen, 2, fullest=0.5)).bottleneck is not Bottleneck.KV_CAPACITY
    assert judge(several(seen, 2, fullest=0.98)).bottleneck is Bottleneck.KV_CAPACITY


def test_two_engines_have_twice_the_time():
    one, two = short_decode(), several(short_decode(), 2)
    assert row(judge(one), "weight_reads_of_ceiling").value == pytest.approx(0.599, abs=1e-3)
    assert row(judge(two), "weight_reads_of_ceiling").value == pytest.approx(0.2996, abs=1e-3)


# --- too little to judge ---


def test_server_without_statistics_is_not_judged():
    verdict = judge(Window(window_s=60.0, counters={"process_cpu_seconds_total": 9.0}))
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert "--disable-log-stats" in verdict.next_experiment


@pytest.mark.parametrize(
    "seen",
    [
        capacity(window_s=1.0),
        short_decode(requests=3, steps=40),
        idle(samples=[(1, 2, 0.1)] * 10),  # in flight, and not one step
    ],
)
def test_too_little_evidence_is_not_judged(seen):
    verdict = judge(seen)
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert verdict.next_experiment
    assert verdict.missing


def test_rare_requests_are_idle():
    seen = short_decode(window_s=60.0, samples=[(0, 8, 0.04)] * 3 + [(0, 0, 0.0)] * 25)
    assert judge(seen).bottleneck is Bottleneck.IDLE


def test_saturated_load_client_is_not_blamed_on_the_server():
    load = {"client_cpu_s_per_request": 0.01, "requests_per_s": 95.0}
    seen = replace(short_decode(), load=load, is_load_ours=True)
    assert judge(seen).bottleneck is Bottleneck.ABSTAIN
    assert "client" in judge(seen).summary
    spare = replace(seen, load={**load, "requests_per_s": 40.0})
    assert judge(spare).bottleneck is Bottleneck.WEIGHT_BANDWIDTH


# --- properties ---

windows = st.sampled_from(
    [
        capacity,
        shared_prefix,
        long_prompts,
        prefill_only,
        short_decode,
        long_decode,
        revisited_prefixes,
        idle,
    ]
)


@given(windows)
def test_every_sign_is_shown_and_unknown_ones_are_unknown(make):
    verdict = judge(make())
    names = [item.metric for item in verdict.evidence]
    assert len(names) == len(set(names)) >= 30
    assert all((item.holds is None) or item.value is not None for item in verdict.evidence)
    assert all(item.says and item.source and item.unit for item in verdict.evidence)
    assert verdict.summary


@given(windows, st.integers(2, 50))
def test_longer_window_of_the_same_load_gets_the_same_verdict(make, factor):
    seen = make()
    longer = replace(
        seen,
        window_s=seen.window_s * factor,
        counters={key: value * factor for key, value in seen.counters.items()},
    )
    assert judge(longer).bottleneck is judge(seen).bottleneck
    assert judge(longer).summary == judge(seen).summary


@given(windows, st.integers(1, 100))
def test_requests_that_are_redone_always_mean_capacity(make, preemptions):
    if make is not idle:
        assert judge(make(preemptions=preemptions)).bottleneck is Bottleneck.KV_CAPACITY


amounts = st.one_of(st.just(0.0), st.floats(0, 1e15))
KEYS = sorted(revisited_prefixes().counters)
models = st.builds(
    step_time,
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 1),
    weight_read_s=st.one_of(st.none(), st.floats(0, 10)),
)


@given(
    st.floats(0.001, 1e5),
    st.dictionaries(st.sampled_from(KEYS), amounts),
    st.lists(st.tuples(amounts, amounts, st.floats(0, 1)), max_size=5),
    st.booleans(),
    st.one_of(st.none(), st.floats(1, 1e15)),
    st.one_of(st.none(), models),
)
def test_any_window_gets_a_verdict(window_s, counters, samples, known, peak, model):
    effective = EffectiveConfig(max_num_seqs=8, kv_cache_size_tokens=4096, block_size_tokens=16)
    seen = Window(
        window_s=window_s,
        counters=counters,
        gauges=gauges(*samples) if samples else {},
        effective=effective if known else None,
        peak_flops_per_s=peak,
        peak_bytes_per_s=peak,
        weight_bytes=WEIGHT_BYTES if known else None,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        step_time=model,
        reusable_prefix_share={16: 0.5, 64: 0.4} if known else {},
    )
    verdict = judge(seen)
    assert verdict == judge(seen)
    if verdict.bottleneck is Bottleneck.ABSTAIN:
        assert verdict.next_experiment
    assert sum(verdict.shares.values()) <= 1 + 1e-9
    assert all(share >= 0 for share in verdict.shares.values())
