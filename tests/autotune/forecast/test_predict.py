"""Forecasts, against simulations whose truth is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from contracts.forecast_baseline import context, found_on

from kvtune.autotune.forecast.levers import lever_of
from kvtune.autotune.forecast.predict import make_forecaster
from kvtune.autotune.forecast.replay import System, simulate
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.autotune.forecast.system import as_reported, system_of
from kvtune.errors import BadInput
from kvtune.profilers.load.arrivals import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.scrape import ENGINES
from kvtune.types import Goal, Request, Slo

TRUE = StepCost(0.02, per_sequence_s=2e-4, per_kv_token_s=1e-5, per_prefill_token_s=3e-4)
PLAN = LoadPlan(ClosedLoop(16))
ANY = Goal()


@pytest.fixture
def forecaster_of(some_requests, model_of):
    """Makes a forecaster from a run with the true costs on `blocks` blocks of 16 tokens."""

    def make(blocks=120, spread=0.1, repeats=None, goal=ANY, **changes):
        ctx = context(blocks=blocks)
        requests = some_requests()
        reported = as_reported(ctx)
        system = system_of(reported.base_arguments, reported)
        run = replace(simulate(requests, PLAN.arrivals, system, TRUE).run, **changes)
        sent = [
            Request(token_ids=tuple(one.content), output_tokens=one.output_tokens)
            for one in requests
        ]
        return make_forecaster(sent, PLAN, run, goal, ctx, model_of(TRUE, spread), repeats)

    return make


def by_metric(forecaster, lever):
    return {found.metric: found for found in forecaster.forecast(lever)}


def truth(forecaster, system: System, cost: StepCost = TRUE):
    run = simulate(forecaster.baseline.requests, PLAN.arrivals, system, cost).run
    return measure(run, Goal())


def test_more_memory_is_forecast_where_the_pool_is_full(forecaster_of):
    forecaster = forecaster_of()
    found = by_metric(forecaster, found_on(forecaster.context)["kv memory x2"])
    assert found["capacity_tokens"].baseline == 120 * 16
    assert found["capacity_tokens"].predicted == 240 * 16
    requests = forecaster.baseline.requests
    held_tokens = sum(one.prompt_tokens + one.output_tokens for one in requests) / len(requests)
    blocks = held_tokens // 16 + 1
    assert found["sequences"].baseline == 119 // blocks
    assert found["sequences"].predicted == 239 // blocks
    doubled = replace(forecaster.baseline.system, blocks=240)
    after, before = truth(forecaster, doubled), truth(forecaster, forecaster.baseline.system)
    for metric in ("itl_p50_s", "ttft_p50_s", "goodput_requests_per_s"):
        forecast = found[metric]
        assert forecast.ratio.estimate == pytest.approx(after[metric] / before[metric], rel=0.05)
        assert forecast.ratio.low <= forecast.ratio.estimate <= forecast.ratio.high
        assert forecast.predicted == pytest.approx(forecast.baseline * forecast.ratio.estimate)
    assert found["goodput_requests_per_s"].ratio.low > 1.05
    reason = found["goodput_requests_per_s"].reason
    assert reason.startswith("doubles the memory: 1,920 to 3,840 KV tokens, and the load fills 1")


def test_more_memory_is_skipped_where_the_pool_is_half_empty(forecaster_of):
    forecaster = forecaster_of(blocks=600)
    found = by_metric(forecaster, found_on(forecaster.context)["kv memory x2"])
    assert found["goodput_requests_per_s"].ratio.estimate == pytest.approx(1.0, abs=0.01)
    reason = found["goodput_requests_per_s"].reason
    assert "but the load fills 4" in reason
    assert reason.endswith("goodput changes by under 3%, skip")


def test_reading_less_shortens_steps_by_the_share_of_reads(forecaster_of):
    forecaster = forecaster_of(blocks=600)
    found = by_metric(forecaster, found_on(forecaster.context)["fp8"])
    cheaper = replace(TRUE, per_kv_token_s=TRUE.per_kv_token_s * 0.8)
    system = replace(forecaster.baseline.system, blocks=1200)
    after = truth(forecaster, system, cheaper)["itl_p50_s"]
    before = truth(forecaster, forecaster.baseline.system)["itl_p50_s"]
    forecast = found["itl_p50_s"]
    assert forecast.ratio.estimate == pytest.approx(after / before, rel=0.03)
    # Reads are more than half of a step here: half as long at best, a quarter longer at worst.
    assert forecast.ratio.low < 0.8
    assert forecast.ratio.high > 1.05
    said = "takes 0.8 times as long (a guess, no trial here measured it)"
    assert said in forecast.reason


def test_interval_is_as_wide_as_the_parts_of_a_step_are_unsure(forecaster_of):
    lever = replace(found_on(context())["fp8"], read_ratio=(0.5, 0.5, 0.75))
    sure, unsure = (
        by_metric(forecaster, lever)["itl_p50_s"].ratio
        for forecaster in (forecaster_of(blocks=600, spread=0.05), forecaster_of(600, 0.9))
    )
    assert unsure.high - unsure.low > 1.5 * (sure.high - sure.low)
    assert sure.repeats == unsure.repeats == 5


def test_range_holds_eight_of_ten_ratios_of_two_noisy_measurements(forecaster_of):
    goodput = "goodput_requests_per_s"
    # Mean 1, standard deviation 0.1 of a mean of two.
    repeats = {goodput: (1 - 0.1, 1 + 0.1)}
    forecaster = forecaster_of(blocks=600, repeats=repeats)
    forecast = by_metric(forecaster, found_on(forecaster.context)["kv memory x2"])[goodput]
    numbers = random.Random(4)
    ratios = [numbers.gauss(1, 0.1) / numbers.gauss(1, 0.1) for _ in range(4000)]
    within = sum(forecast.ratio.low <= ratio <= forecast.ratio.high for ratio in ratios)
    assert within / len(ratios) == pytest.approx(forecast.ratio.confidence, abs=0.03)
    # It is the measurements that are unsure, not what the lever does.
    assert forecast.reason.endswith("goodput changes by under 3%, skip")


def test_what_the_model_misses_of_the_baseline_widens_only_what_the_lever_changes(forecaster_of):
    def misses(blocks, share):
        forecaster = forecaster_of(blocks)
        goodput = "goodput_requests_per_s"
        forecaster.calibration = replace(
            forecaster.calibration, missed={**forecaster.calibration.missed, goodput: share}
        )
        ratio = by_metric(forecaster, found_on(forecaster.context)["kv memory x2"])[goodput].ratio
        return ratio.high - ratio.low

    assert misses(120, 0.14) > 1.05 * misses(120, 0.0)
    assert misses(600, 0.14) == pytest.approx(misses(600, 0.0), rel=0.01)


def test_method_of_no_engine_is_a_reference(forecaster_of):
    forecaster = forecaster_of()
    found = by_metric(forecaster, found_on(forecaster.context)["turboquant_3bit_nc"])
    forecast = found["capacity_tokens"]
    assert forecast.served_by == "reference"
    assert forecast.stack == "vllm-turboquant:preset=3bit_nc"
    # 54 bytes of a key and a value of 64 channels; the outer 4 of 30 layers take 256.
    assert forecast.ratio.estimate == pytest.approx(256 * 30 / (26 * 54 + 4 * 256), rel=0.01)
    assert "reference only" in found["goodput_requests_per_s"].reason


def test_eviction_is_forecast_with_whole_prompts_first(forecaster_of):
    forecaster = forecaster_of()
    lever = found_on(forecaster.context)["snapkv:budget_tokens=400"]
    kept = lever.resident_ratio
    assert kept < 1
    found = by_metric(forecaster, lever)
    base = forecaster.baseline.system
    assert found["capacity_tokens"].predicted == pytest.approx(120 * 16 / kept, abs=1)
    unpublished = replace(base.limits, prefix_caching=False)
    cheaper = replace(TRUE, read_ratio=lever.read_ratio[1])
    after = truth(forecaster, replace(base, limits=unpublished, kept_ratio=kept), cheaper)
    already_cut = replace(base, limits=unpublished, blocks=int(base.blocks / kept))
    before = truth(forecaster, base)
    ratio = found["ttft_p50_s"].ratio.estimate
    assert ratio == pytest.approx(after["ttft_p50_s"] / before["ttft_p50_s"], rel=0.05)
    assert ratio > truth(forecaster, already_cut, cheaper)["ttft_p50_s"] / before["ttft_p50_s"]


def test_lever_with_a_problem_says_it_for_every_metric(forecaster_of):
    forecaster = forecaster_of()
    lever = lever_of({"enforce-eager": True}, forecaster.context, name="eager", says="")
    found = forecaster.forecast(lever)
    assert len(found) == 5
    assert all(one.predicted is None and "not part of" in one.reason for one in found)


def test_pool_in_which_the_engine_would_not_start_is_said(forecaster_of):
    forecaster = forecaster_of(blocks=24)
    found = forecaster.forecast(found_on(forecaster.context)["kv memory x0.5"])
    reason = "the engine would refuse it: 176 tokens are less than one request of max-model-len 360"
    assert [(one.predicted, one.reason) for one in found] == [(None, reason)] * 5


def test_request_that_would_not_fit_is_said(forecaster_of):
    forecaster = forecaster_of(blocks=24)
    # The longest sequence that the engine serves is not known.
    forecaster.context = replace(forecaster.context, baseline=None, model=None)
    lever = replace(found_on(context())["turboquant_3bit_nc"], resident_ratio=2.0)
    found = by_metric(forecaster, lever)
    assert "does not fit" in found["goodput_requests_per_s"].reason
    assert found["goodput_requests_per_s"].predicted is None
    assert found["capacity_tokens"].predicted == 12 * 16


def test_metric_that_the_simulation_misses_is_not_forecast(forecaster_of):
    forecaster = forecaster_of()
    far = tuple(
        replace(record, sent_s=record.sent_s - 9.0) for record in forecaster.baseline.run.records
    )
    missing = forecaster_of(records=far, duration_s=forecaster.baseline.run.duration_s)
    found = by_metric(missing, found_on(missing.context)["kv memory x2"])
    assert found["capacity_tokens"].predicted == 240 * 16
    reason = found["goodput_requests_per_s"].reason
    assert reason.startswith("cannot forecast: the model misses the baseline's")


def test_goodput_of_a_baseline_in_which_no_request_keeps_the_limits_is_told_by_itself(
    forecaster_of,
):
    goodput = "goodput_requests_per_s"
    limit = Goal(slos=(Slo(metric="tpot", statistic="mean", limit_s=0.034),))
    forecaster = forecaster_of(blocks=600, goal=limit)
    assert forecaster.calibration.measured[goodput] == 0
    # Steps of four sequences are short, of sixteen they are not.
    lever = lever_of({"max-num-seqs": 4}, forecaster.context, name="narrow", says="narrows")
    found = by_metric(forecaster, lever)
    forecast = found[goodput]
    narrow = replace(
        forecaster.baseline.system,
        limits=replace(forecaster.baseline.system.limits, max_active=4),
    )
    run = simulate(forecaster.baseline.requests, PLAN.arrivals, narrow, TRUE).run
    after = measure(run, limit)[goodput]
    assert after > 0
    assert (forecast.baseline, forecast.ratio) == (0.0, None)
    assert forecast.predicted == pytest.approx(after, rel=0.1)
    assert f"goodput 0 to {forecast.predicted:.2g} requests/s (" in forecast.reason
    assert found["itl_p50_s"].ratio.estimate < 1
    same = by_metric(forecaster, found_on(forecaster.context)["kv memory x2"])[goodput]
    assert same.predicted == 0
    assert same.reason.endswith("goodput stays at 0")


def test_arguments_are_the_users_with_the_lever_in_them(forecaster_of):
    forecaster = forecaster_of()
    (first, *_) = forecaster.forecast(found_on(forecaster.context)["max-num-seqs 128"])
    assert first.arguments == {"max-num-seqs": 128}


def test_several_engines_behind_one_address_are_not_simulated(forecaster_of):
    with pytest.raises(BadInput, match="several engines"):
        forecaster_of(gauges={ENGINES: ((0.0, 2.0),)})
