"""What takes the time of a step: against ceilings, and by the step-time model."""

from dataclasses import replace

import pytest
from contracts.windows import (
    long_decode,
    prefill_only,
    row,
    short_decode,
    step_time,
    stepping,
)

from kvtune.profilers.kv_reads import PAGES_READ, PAGES_SEEN
from kvtune.profilers.verdict import judge
from kvtune.types import Bottleneck


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


@pytest.mark.parametrize(("prefill_s", "confidence"), [(0.0, "low"), (300.0, "medium")])
def test_a_model_that_explains_little_of_the_steps_needs_another_sign(prefill_s, confidence):
    # The ideal device would need 0.05 s of each step of 1.9 s.
    seen = stepping(
        window_s=203.0,
        requests=24,
        prompt=896,
        answer=8,
        steps=108,
        step_tokens=24 * 904,
        prefill_s=prefill_s,
        decode_s=100.0,
        peak_bytes_per_s=58e9,
        peak_flops_per_s=1e12,
    )
    verdict = judge(seen)
    assert row(verdict, "modelled_step_of_observed").value == pytest.approx(0.03, abs=0.005)
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.COMPUTE, confidence)
    assert "explains 3% of the real ones" in verdict.summary


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
        (0.029, Bottleneck.WEIGHT_BANDWIDTH, "medium"),
        (0.027, Bottleneck.OVERHEAD, "medium"),
        (0.01, Bottleneck.OVERHEAD, "high"),
        (None, Bottleneck.ABSTAIN, "low"),
    ],
)
def test_fixed_price_is_overhead_only_if_weights_cannot_be_most_of_it(
    weight_read_s, bottleneck, confidence
):
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


# --- where kvtune's plugin lets decoding skip pages ---

TENTH = {PAGES_SEEN: 1e7, PAGES_READ: 1e6}


def test_kv_that_is_not_read_limits_nothing():
    assert judge(long_decode()).bottleneck is Bottleneck.KV_BANDWIDTH
    verdict = judge(long_decode(counters=TENTH))
    assert verdict.bottleneck is not Bottleneck.KV_BANDWIDTH
    skipping = row(verdict, "kv_pages_read_share")
    assert (skipping.value, skipping.holds) == (0.1, True)
    assert "kvtune's plugin" in skipping.says


def test_a_server_without_the_plugin_has_no_row_of_it():
    rows = [one.metric for one in judge(long_decode()).evidence]
    assert "kv_pages_read_share" not in rows


def test_an_estimate_that_counts_skipped_kv_needs_the_bytes_of_a_token():
    verdict = judge(long_decode(counters=TENTH, kv_bytes_per_token=None))
    assert row(verdict, "memory_traffic_of_peak").value is None
    (reason,) = (one for one in verdict.missing if one.startswith("memory_traffic_of_peak"))
    assert "--model" in reason
