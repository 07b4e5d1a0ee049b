"""The division of a mean step, by hand: 100 steps of 0.1 s, 4 sequences of 1,100 tokens."""

from dataclasses import replace

import pytest
from contracts.windows import KV_BYTES_PER_TOKEN, WEIGHT_BYTES, exactly, step_time, stepping
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.kv_reads import PAGES_READ, PAGES_SEEN
from kvtune.profilers.step_shares import (
    fitted_step,
    predicted_ratio,
    shares_of,
    step_model,
    traffic_share,
    weight_traffic_share,
)
from kvtune.types import Bottleneck


def test_a_step_divides_as_the_model_says():
    seen = stepping(step_time=step_time(0.02, 0.0025, 10e-6, weight_read_s=0.015))
    fitted = fitted_step(seen)
    assert fitted.fixed == pytest.approx(0.2)
    assert (fitted.weights, fitted.overhead) == pytest.approx((0.15, 0.05))
    assert fitted.per_sequence == pytest.approx(0.1)
    assert (fitted.kv_low, fitted.kv, fitted.kv_high) == pytest.approx((0.396, 0.44, 0.484))
    assert fitted.prefill == pytest.approx(0.26), "what is left of 0.1 s"
    assert predicted_ratio(seen) == pytest.approx(0.74)


def test_weights_never_take_more_than_the_fixed_price():
    fitted = fitted_step(stepping(step_time=step_time(0.02, 0, 0, weight_read_s=0.05)))
    assert (fitted.weights, fitted.overhead) == pytest.approx((0.2, 0.0))


def test_a_fixed_price_without_ceiling_is_left_undivided():
    seen = stepping(step_time=step_time(0.02, 0.0025, 10e-6))
    assert fitted_step(seen).weights is None
    assert shares_of(seen) == pytest.approx(
        {Bottleneck.KV_BANDWIDTH: 0.44, Bottleneck.COMPUTE: 0.36}, abs=0.0011
    )


def test_few_prompt_tokens_do_not_explain_what_is_left():
    # Two prompt tokens a step at 2.5 ms each are 5% of a step, not the 26% that are left.
    seen = stepping(step_tokens=400 + 200, step_time=step_time(0.02, 0.0025, 10e-6))
    assert fitted_step(seen).prefill == pytest.approx(0.05)


def test_what_is_left_may_be_prefill_where_it_is_not_known_how_many_tokens_were_computed():
    repeated = {
        "vllm:prompt_tokens_total": 10_000,
        "vllm:prefix_cache_queries_total": 20_000,
        "vllm:prefix_cache_hits_total": 12_000,
    }
    seen = stepping(counters=repeated, step_time=step_time(0.02, 0.0025, 10e-6))
    assert seen.prefill_tokens_per_step is None
    assert fitted_step(seen).prefill == pytest.approx(0.26)


@pytest.mark.parametrize(("fixed_s", "fits"), [(0.149, True), (0.151, False)])
def test_a_model_that_predicts_far_longer_steps_is_not_used(fixed_s, fits):
    fitted = fitted_step(stepping(step_time=step_time(fixed_s, 0, 0)))
    assert (fitted is not None) is fits
    if fits:
        assert fitted.fixed == pytest.approx(1.0), "no more than the whole"


def test_blocks_that_sequences_share_are_read_in_what_the_other_parts_leave_of_a_step():
    # Unshared, 4,400 tokens would take 176 ms of a step of 100; 30 ms go to the other parts, and
    # 20 prompt tokens at 2.5 ms each may take 50 of the 70 ms that are left.
    seen = stepping(step_time=step_time(0.02, 0.0025, 40e-6))
    assert fitted_step(seen) is None
    shared = {"vllm:prompt_tokens_total": 10_000, "vllm:prompt_tokens_cached_total": 5_000}
    fitted = fitted_step(replace(seen, counters={**seen.counters, **shared}))
    assert (fitted.fixed, fitted.per_sequence, fitted.prefill) == pytest.approx((0.2, 0.1, 0.0))
    assert (fitted.kv_low, fitted.kv, fitted.kv_high) == pytest.approx((0.2, 0.7, 0.7))


def test_a_shared_load_whose_other_parts_take_longer_than_its_steps_is_not_divided():
    shared = {"vllm:prompt_tokens_total": 10_000, "vllm:prompt_tokens_cached_total": 5_000}
    seen = stepping(step_time=step_time(0.151, 0.0, 40e-6))
    assert fitted_step(replace(seen, counters={**seen.counters, **shared})) is None


def test_without_counts_of_tokens_nothing_is_divided():
    seen = stepping(step_time=step_time(0.02, 0.0025, 10e-6))
    for lost in ("vllm:generation_tokens_total", "vllm:request_prompt_tokens_count"):
        counters = {key: value for key, value in seen.counters.items() if key != lost}
        assert fitted_step(replace(seen, counters=counters)) is None
    assert fitted_step(replace(seen, step_time=None)) is None


def test_negative_estimates_and_bounds_cost_nothing():
    model = step_time(0.05, 0, 0).model_copy(update={"per_kv_token_s": exactly(-1e-6, 0.5)})
    fitted = fitted_step(stepping(step_time=model))
    assert (fitted.kv, fitted.fixed) == pytest.approx((0.0, 0.5))


def test_the_ideal_division_counts_weights_once_kv_per_token_and_arithmetic_by_the_ridge():
    ideal = step_model(stepping())
    parts = (20 / 300, 1, 4400 * KV_BYTES_PER_TOKEN / WEIGHT_BYTES)
    assert tuple(ideal) == pytest.approx(tuple(part / sum(parts) for part in parts))


def test_ideal_shares_with_ceilings_are_shares_of_what_steps_took():
    # 269 MB at 6.7 GB/s are 40.1 ms of 100 ms, KV of 4,400 tokens is 101 MB or 15.1 ms, and 20
    # prompt tokens are 20 x 269e6 flop at 1.32 Tflop/s or 4.1 ms.
    seen = stepping(peak_bytes_per_s=6.7e9, peak_flops_per_s=1.32e12)
    assert weight_traffic_share(seen) == pytest.approx(0.4015, abs=1e-4)
    assert shares_of(seen) == pytest.approx(
        {
            Bottleneck.WEIGHT_BANDWIDTH: 0.4015,
            Bottleneck.KV_BANDWIDTH: 0.1513,
            Bottleneck.COMPUTE: 0.0408,
        },
        abs=0.0011,
    )


def test_ideal_shares_of_steps_faster_than_the_ceilings_are_still_a_division():
    # Of 110 ms, weights would take 82%, KV 31% and arithmetic 4%.
    seen = stepping(peak_bytes_per_s=3.0e9, peak_flops_per_s=1.32e12, window_s=11.0)
    assert weight_traffic_share(seen) == pytest.approx(0.8152, abs=1e-4)
    assert sum(shares_of(seen).values()) == pytest.approx(1.0, abs=0.004)


def test_a_peak_that_traffic_exceeds_divides_nothing():
    seen = stepping(peak_bytes_per_s=1e9, peak_flops_per_s=1.32e12)
    assert weight_traffic_share(seen) is None
    assert Bottleneck.WEIGHT_BANDWIDTH not in shares_of(seen)


seconds = st.floats(0, 0.2)


@given(
    seconds,
    seconds,
    st.floats(0, 1e-4),
    st.floats(0, 3),
    st.one_of(st.none(), seconds),
    st.integers(0, 100_000),
)
def test_shares_are_a_division(fixed_s, per_sequence_s, per_token_s, spread, weight_read_s, extra):
    model = step_time(
        fixed_s, per_sequence_s, per_token_s, spread=spread, weight_read_s=weight_read_s
    )
    seen = stepping(step_tokens=400 + extra, step_time=model)
    shares = shares_of(seen)
    assert all(0 <= share <= 1 for share in shares.values())
    assert sum(shares.values()) <= 1 + 1e-9
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    if (fitted := fitted_step(seen)) is not None:
        assert fitted.kv_low <= fitted.kv + 1e-12
        assert fitted.kv <= fitted.kv_high + 1e-12
        total = fitted.fixed + fitted.per_sequence + fitted.prefill + fitted.kv
        assert total <= 1 + 1e-9


QUARTER = {PAGES_SEEN: 80_000, PAGES_READ: 20_000}
"""What kvtune's plugin counts where decoding reads a quarter of its pages."""

# Of 4,400 tokens a step, and the weights, in 0.1 s: what vLLM takes dense attention to read.
DENSE_GBYTES_PER_S = (WEIGHT_BYTES + 4400 * KV_BYTES_PER_TOKEN) / 0.1 / 1e9


@pytest.mark.parametrize("estimated", [DENSE_GBYTES_PER_S, 0.0])
def test_traffic_is_without_the_kv_that_is_skipped(estimated):
    ceiling = {"peak_bytes_per_s": 50e9, "gbytes_per_s": estimated}
    whole = traffic_share(stepping(**ceiling))
    part = traffic_share(stepping(**ceiling, counters=QUARTER))
    assert whole == pytest.approx((WEIGHT_BYTES + 4400 * KV_BYTES_PER_TOKEN) / 0.1 / 50e9)
    assert part == pytest.approx((WEIGHT_BYTES + 1100 * KV_BYTES_PER_TOKEN) / 0.1 / 50e9)


def test_an_estimate_is_left_aside_where_nobody_knows_how_much_is_skipped():
    unknown = {"peak_bytes_per_s": 50e9, "gbytes_per_s": 3.7, "kv_bytes_per_token": None}
    assert traffic_share(stepping(**unknown)) == pytest.approx(3.7 / 50)
    assert traffic_share(stepping(**unknown, counters=QUARTER)) is None


def test_an_ideal_device_reads_what_the_plugin_leaves_it():
    _, weights, kv = step_model(stepping(counters=QUARTER))
    assert kv / weights == pytest.approx(1100 * KV_BYTES_PER_TOKEN / WEIGHT_BYTES)


def test_a_fitted_model_keeps_its_price_of_a_token_of_context():
    model = step_time(0.02, 0.0025, 10e-6)
    dense, sparse = stepping(step_time=model), stepping(step_time=model, counters=QUARTER)
    assert fitted_step(sparse) == fitted_step(dense), "it was fitted to the same server"
