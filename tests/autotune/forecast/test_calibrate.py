"""Costs are found again from what a run with known costs recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtune.autotune.forecast.calibrate import Baseline, calibrate
from kvtune.autotune.forecast.replay import System, simulate
from kvtune.autotune.forecast.requests import SimulatedRequest
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.engines.simulated.scheduler import Limits
from kvtune.errors import BadInput
from kvtune.profilers.load.arrivals import ClosedLoop
from kvtune.profilers.window import PREFILL_S
from kvtune.types import Goal, LoadRun, Slo

TRUE = StepCost(0.02, per_sequence_s=2e-4, per_kv_token_s=4e-6, per_prefill_token_s=3e-4)
SYSTEM = System(200, 16, Limits(256, 16))
LOOP = ClosedLoop(8)
ANY = Goal()


@pytest.fixture
def baseline_of(some_requests):
    def make(cost=TRUE, system=SYSTEM, until=48, goal=ANY, **changes):
        requests = some_requests()
        run = replace(simulate(requests, LOOP, system, cost).run, **changes)
        return Baseline(requests, LOOP, system, run, goal, until)

    return make


def test_cost_of_a_prompt_token_is_found_and_the_baseline_reproduced(baseline_of, model_of):
    found = calibrate(baseline_of(), model_of(TRUE))
    assert found.cost.per_prefill_token_s == pytest.approx(TRUE.per_prefill_token_s, rel=0.1)
    assert found.drift == pytest.approx(1.0, abs=0.02)
    assert set(found.missed) == {
        "output_tokens_per_s",
        "itl_p50_s",
        "ttft_p50_s",
        "goodput_requests_per_s",
    }
    assert all(abs(miss) < 0.03 for miss in found.missed.values())
    assert found.problem("ttft_p50_s") == ""


def test_prefill_time_that_the_engine_counted_goes_before_the_time_to_first_token(
    baseline_of, model_of
):
    requests_run = baseline_of()
    prefill_s = simulate(requests_run.requests, LOOP, SYSTEM, TRUE).prefill_s
    name = PREFILL_S.removesuffix("_sum")
    # A client that is far away: its times are of no use.
    records = tuple(
        replace(record, sent_s=record.sent_s - 9.0) for record in requests_run.run.records
    )
    counters = {f"{name}_sum": prefill_s * 48, f"{name}_count": 48.0}
    found = calibrate(baseline_of(records=records, counters=counters), model_of(TRUE))
    assert found.cost.per_prefill_token_s == pytest.approx(TRUE.per_prefill_token_s, rel=0.1)
    assert "misses the baseline's ttft_p50_s" in found.problem("ttft_p50_s")
    assert found.problem("itl_p50_s") == ""


def test_steps_that_were_slower_under_load_scale_the_model(baseline_of, model_of):
    found = calibrate(baseline_of(TRUE.slower(1.25)), model_of(TRUE))
    assert found.drift == pytest.approx(1.25, rel=0.03)
    assert found.cost.per_kv_token_s == pytest.approx(1.25 * TRUE.per_kv_token_s, rel=0.03)
    assert found.problem("itl_p50_s") == ""
    far = calibrate(baseline_of(TRUE.slower(2.5)), model_of(TRUE))
    assert "steps under load take 2.5" in far.problem("itl_p50_s")


def test_steps_that_read_shared_blocks_faster_leave_the_other_costs_alone(
    baseline_of, some_requests, model_of
):
    near = replace(TRUE, per_kv_token_s=TRUE.per_kv_token_s / 4)
    prefix = list(range(160))
    requests = [
        SimulatedRequest(
            160 + request.prompt_tokens, request.output_tokens, [*prefix, *request.content]
        )
        for request in some_requests()
    ]
    run = simulate(requests, LOOP, SYSTEM, near).run
    found = calibrate(Baseline(requests, LOOP, SYSTEM, run, ANY, 48), model_of(TRUE))
    assert found.cost.per_kv_token_s == pytest.approx(near.per_kv_token_s, rel=0.15)
    assert found.cost.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.03)
    assert found.drift == pytest.approx(1.0, abs=0.03)
    kv = found.cost.per_kv_token_s
    low, high = (end.per_kv_token_s for end in found.ends[:2])
    assert (low, high) == pytest.approx((0.9 * kv, 1.1 * kv))


@pytest.mark.parametrize("together", [False, True])
def test_prompts_that_were_computed_in_one_step_are_told_from_those_that_were_not(
    together, model_of
):
    # Pairs of equal requests stay in step with each other for the whole run, or never.
    requests = [SimulatedRequest(600, 40, [number * 1000]) for number in range(12)]
    system, loop = System(101, 16, Limits(2048, 2)), ClosedLoop(2)
    done = simulate(requests, loop, system, TRUE, together=together)
    name = PREFILL_S.removesuffix("_sum")
    counters = {f"{name}_sum": 12 * done.prefill_s, f"{name}_count": 12.0}
    run = replace(done.run, counters=counters)
    found = calibrate(Baseline(requests, loop, system, run, ANY, 12), model_of(TRUE))
    assert found.cost.per_prefill_token_s == pytest.approx(TRUE.per_prefill_token_s, rel=0.1)
    assert found.problem("ttft_p50_s") == ""
    assert found.baseline.together is together


def test_ends_of_the_intervals_give_the_same_mean_step(baseline_of, model_of):
    found = calibrate(baseline_of(), model_of(TRUE, spread=0.3))
    sequences, tokens = found.simulated.mean_sequences, found.simulated.mean_resident_tokens

    def step_s(cost):
        return cost.fixed_s + sequences * cost.per_sequence_s + tokens * cost.per_kv_token_s

    assert [step_s(end) for end in found.ends] == pytest.approx([step_s(found.cost)] * 4)
    assert [end.per_kv_token_s / found.cost.per_kv_token_s for end in found.ends[:2]] == (
        pytest.approx([0.7, 1.3])
    )
    assert [end.per_sequence_s / found.cost.per_sequence_s for end in found.ends[2:]] == (
        pytest.approx([0.7, 1.3])
    )


def test_without_a_model_a_step_may_be_all_overhead_or_all_reading(baseline_of):
    found = calibrate(baseline_of(), None)
    assert found.drift == 1.0
    assert abs(found.missed["itl_p50_s"]) < 0.03
    sequences, tokens = found.simulated.mean_sequences, found.simulated.mean_resident_tokens
    cost = found.cost
    parts = cost.fixed_s, sequences * cost.per_sequence_s, tokens * cost.per_kv_token_s
    assert [part / sum(parts) for part in parts] == pytest.approx([0.5, 0.25, 0.25], abs=0.05)
    fixed, reading, _, width = found.ends
    assert (fixed.per_kv_token_s, fixed.per_sequence_s) == (0.0, 0.0)
    assert fixed.fixed_s == pytest.approx(sum(parts))
    assert reading.fixed_s == width.fixed_s == pytest.approx(0.0, abs=1e-9)
    assert reading.per_kv_token_s * tokens == pytest.approx(sum(parts))
    assert width.per_sequence_s * sequences == pytest.approx(sum(parts))


def test_gaps_of_messages_with_several_tokens_are_no_steps(baseline_of, model_of):
    def two_at_once(record):
        merged = []
        for at in range(0, len(record.gaps_s) - 1, 2):
            merged += [sum(record.gaps_s[at : at + 2]), 0.0]
        return replace(record, gaps_s=(*merged, *record.gaps_s[len(merged) :]))

    plain = baseline_of()
    records = tuple(two_at_once(record) for record in plain.run.records)
    found = calibrate(replace(plain, run=replace(plain.run, records=records)), model_of(TRUE))
    assert found.drift == pytest.approx(1.0, abs=0.05)
    assert "itl_p50_s was not measured" in found.problem("itl_p50_s")
    assert found.problem("ttft_p50_s") == ""


def test_baseline_that_is_missed_forecasts_nothing(baseline_of, model_of):
    # The engine that was measured admits half of what the model of it does.
    narrow = replace(SYSTEM, limits=Limits(256, 3))
    baseline = replace(baseline_of(system=narrow), system=SYSTEM)
    found = calibrate(baseline, model_of(TRUE))
    assert found.problem("output_tokens_per_s").startswith("the model misses the baseline's")


def test_goodput_under_a_limit_is_checked_too(baseline_of, model_of):
    strict = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=0.2),))
    found = calibrate(baseline_of(goal=strict), model_of(TRUE))
    assert 0 < found.measured["goodput_requests_per_s"] < found.measured["requests_per_s"]
    assert "goodput_requests_per_s" in found.missed


def limited(limit_s):
    return Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=limit_s),))


def far_away(baseline, prefill_s, **changes):
    """The same run as a client 9 s away saw it; the engine's own count of prefills is right."""
    records = tuple(replace(record, sent_s=record.sent_s - 9.0) for record in baseline.run.records)
    name = PREFILL_S.removesuffix("_sum")
    counters = {f"{name}_sum": prefill_s * 48, f"{name}_count": 48.0}
    run = replace(baseline.run, records=records, counters=counters)
    return replace(baseline, run=run, **changes)


def test_goodput_of_0_is_met_where_the_model_has_0_and_the_right_times(baseline_of, model_of):
    found = calibrate(baseline_of(goal=limited(1e-4)), model_of(TRUE))
    assert found.is_zero("goodput_requests_per_s")
    assert found.missed["goodput_requests_per_s"] == 0
    assert found.problem("goodput_requests_per_s") == ""


def test_goodput_of_0_by_wrong_times_is_not_met(baseline_of, model_of):
    plain = baseline_of()
    prefill_s = simulate(plain.requests, LOOP, SYSTEM, TRUE).prefill_s
    found = calibrate(far_away(plain, prefill_s, goal=limited(1e-4)), model_of(TRUE))
    assert "misses the baseline's ttft_p50_s" in found.problem("goodput_requests_per_s")


def test_goodput_of_0_that_the_model_misses_is_not_called_unmeasured(baseline_of, model_of):
    plain = baseline_of()
    prefill_s = simulate(plain.requests, LOOP, SYSTEM, TRUE).prefill_s
    found = calibrate(far_away(plain, prefill_s, goal=limited(5.0)), model_of(TRUE))
    assert found.problem("goodput_requests_per_s") == (
        "the baseline's goodput_requests_per_s is 0, but not that of the model"
    )


def test_part_of_a_run_is_compared_with_the_same_part(baseline_of, model_of):
    found = calibrate(baseline_of(until=24), model_of(TRUE))
    assert len(found.simulated.run.records) == 24
    assert abs(found.missed["output_tokens_per_s"]) < 0.03


def test_run_in_which_nothing_completed_is_refused(baseline_of):
    nothing = replace(baseline_of(), run=LoadRun((), 1.0, 0.0, {}, {}))
    with pytest.raises(BadInput, match="no request of the baseline completed"):
        calibrate(nothing, None)
