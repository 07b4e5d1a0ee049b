"""Errors and costs of reads are found again from trials in which both are known."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from contracts.forecast_baseline import CPU, GPU, context, found_on

from kvtune.autotune.forecast.experience import (
    Experience,
    MeasuredRead,
    errors_of,
    experience_of,
    measured_read,
    read_ratio,
)
from kvtune.autotune.forecast.levers import lever_of
from kvtune.autotune.forecast.predict import make_forecaster
from kvtune.autotune.forecast.replay import System, simulate
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.engines.simulated.scheduler import Limits
from kvtune.policies.plugin_arguments import QUEST_TOKENS, STORE_FORMAT, WINDOW_TOKENS
from kvtune.profilers.load.arrivals import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import EffectiveConfig, Forecast, Goal, Interval, Request

TRUE = StepCost(0.02, per_sequence_s=2e-4, per_kv_token_s=1e-5, per_prefill_token_s=3e-4)
SYSTEM = System(400, 16, Limits(256, 16))
GOODPUT = "goodput_requests_per_s"


def told(estimate, measured, metric=GOODPUT, method="range", **changes):
    ratio = Interval(estimate=estimate, low=None, high=None, unit="ratio", method=method)
    values = {"measured": measured, "measured_baseline": 1.0, **changes}
    return Forecast(
        lever="l", arguments={}, metric=metric, unit="u", reason="", ratio=ratio, **values
    )


def tenths_off(count, **changes):
    """Forecasts of no change, each measured by a trial of its own at a tenth more."""
    baselines = [1.0 + number for number in range(count)]
    return [told(1.0, 1.1 * base, measured_baseline=base, **changes) for base in baselines]


@pytest.fixture
def records_of(some_requests):
    def make(cost):
        return simulate(some_requests(), ClosedLoop(8), SYSTEM, cost).run.records

    return make


@pytest.mark.parametrize("true", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("drift", [1.0, 1.4])
def test_time_of_a_read_is_found_on_a_machine_that_drifted(true, drift, records_of, model_of):
    slow = TRUE.slower(drift)
    plain = records_of(slow)
    changed = records_of(replace(slow, read_ratio=true))
    assert read_ratio(model_of(TRUE), plain, changed) == pytest.approx(true, rel=0.05)


def test_reads_that_are_a_twentieth_of_a_step_say_nothing(records_of, model_of):
    cost = StepCost(0.02, per_sequence_s=2e-4, per_kv_token_s=5e-7)
    assert read_ratio(model_of(cost), records_of(cost), records_of(cost)) is None


def test_run_without_a_decode_step_says_nothing(records_of, model_of):
    assert read_ratio(model_of(TRUE), records_of(TRUE), ()) is None


def test_trials_that_agree_are_still_unsure_and_others_more():
    assert measured_read([1.0]) == MeasuredRead((0.85, 1.0, 1.15), 1)
    low, middle, high = measured_read([0.8, 1.2]).ratios
    assert middle == pytest.approx(1.0)
    assert high - low > 2 * 0.3


def test_error_of_a_metric_holds_eight_of_ten_further_ones():
    numbers = random.Random(2)
    hits = total = 0
    for _ in range(400):
        apart = [numbers.gauss(0, 0.2) for _ in range(10)]
        error = errors_of([told(1.5, 1.5 * math.exp(one)) for one in apart[:9]])[GOODPUT]
        hits += 1 / (1 + error) <= math.exp(apart[9]) <= 1 + error
        total += 1
    assert hits / total == pytest.approx(0.8, abs=0.05)


def test_few_outcomes_counts_and_untold_ones_are_no_errors():
    assert errors_of(tenths_off(5)) == {GOODPUT: pytest.approx(0.1)}
    assert errors_of(tenths_off(4)) == {}
    assert errors_of([*tenths_off(4), told(1.0, None)]) == {}
    assert errors_of(tenths_off(9, method="by formula")) == {}


def test_what_was_told_again_before_it_was_measured_counts_once_by_its_newest_forecast():
    others = [told(1.0, measured) for measured in (1.01, 1.02, 1.03, 1.04)]
    assert errors_of([told(1.0, 1.1), told(1.0, 1.1), *others[:3]]) == {}
    found = errors_of([told(1.0, 1.5), told(0.1, 1.5), *others])
    assert found[GOODPUT] == pytest.approx(0.5)


def test_no_range_is_narrower_than_earlier_errors(some_requests, model_of):
    requests = some_requests()
    run = simulate(requests, ClosedLoop(8), SYSTEM, TRUE).run
    sent = [
        Request(token_ids=tuple(one.content), output_tokens=one.output_tokens) for one in requests
    ]
    forecaster = make_forecaster(
        sent,
        LoadPlan(ClosedLoop(8)),
        run,
        Goal(),
        context(blocks=400),
        model_of(TRUE),
        experience=Experience({GOODPUT: 0.25}),
    )
    lever = found_on(forecaster.context)["kv memory x2"]
    ratio = next(one.ratio for one in forecaster.forecast(lever) if one.metric == GOODPUT)
    assert ratio.low <= ratio.estimate / 1.25
    assert ratio.high >= ratio.estimate * 1.25


def test_measured_reads_replace_a_guess_and_the_reason_says_so():
    ctx = context(CPU, block_tokens=32)
    reads = {"fp8": MeasuredRead((0.9, 1.0, 1.1), 3)}
    known = Experience(reads=reads)
    lever = lever_of({"kv-cache-dtype": "fp8"}, ctx, name="fp8", says="", experience=known)
    assert lever.read_ratio == (0.9, 1.0, 1.1)
    assert lever.read_source == "as 3 trials here found"
    assert "guess" in found_on(ctx)["fp8"].read_source


class _History:
    """A history of one study: its baseline, and trials with 8-bit KV, other blocks, and a mixture.

    The baseline has a probed model.
    """

    def __init__(self, runs, model, device, engine):
        self._records = {number: [run] for number, run in enumerate(runs)}
        self._study = SimpleNamespace(name="s", model="m", engine=engine, device=device)
        effective = EffectiveConfig(num_gpu_blocks=400)
        self.forecasts = lambda: tenths_off(5, study="s") + tenths_off(5, study="other")
        self._profile = SimpleNamespace(
            model="m",
            engine=engine,
            device=device,
            effective=effective.model_copy(update={"start_kind": "warm"}),
            step_time=model,
        )
        self._rows = [
            SimpleNamespace(
                study="s",
                number=number,
                measurement=SimpleNamespace(effective=effective),
                trial=SimpleNamespace(
                    arguments=arguments, stack=SimpleNamespace(arguments=arguments)
                ),
            )
            for number, arguments in enumerate(
                (
                    {},
                    {"kv-cache-dtype": "fp8"},
                    {"block-size": 32},
                    {"kv-cache-dtype": "fp8", "kv-cache-dtype-skip-layers": ["0", "29"]},
                    {STORE_FORMAT: "int8"},
                    {QUEST_TOKENS: 64},
                    {"kv-cache-dtype": "fp8", WINDOW_TOKENS: 64},
                    {"additional-config.kvtune.of_another_version": 1},
                )
            )
        ]

    def ceilings(self, device):
        return SimpleNamespace(copy_bytes_per_s=7e9) if device == CPU.key else None

    def studies(self):
        return [self._study]

    def study(self, name):
        return self._study

    def profiles(self):
        return [SimpleNamespace(profile=self._profile)]

    def trials(self, name):
        return self._rows

    def records(self, name, number):
        return self._records[number]


def test_studies_of_the_device_tell_reads_and_errors(records_of, model_of):
    # The machine became a tenth slower after the baseline.
    later = TRUE.slower(1.1)
    mixed = records_of(replace(later, read_ratio=1.9))
    runs = (
        *(records_of(TRUE), records_of(replace(later, read_ratio=1.3)), records_of(later), mixed),
        records_of(replace(later, read_ratio=2.5)),
        # What these read less says nothing of what a token costs.
        *(records_of(replace(later, read_ratio=0.2)) for _ in range(3)),
    )
    engine = context().engine
    history = _History(runs, model_of(TRUE), CPU, engine)
    found = experience_of(history, CPU, engine)
    assert found.reads["fp8"].ratios[1] == pytest.approx(1.3, rel=0.06)
    assert found.reads["fp8"].trials == 1
    # The slower machine adds to the rest of a step too, which draws ratios a little together.
    assert found.reads["store int8"].ratios[1] == pytest.approx(2.5, rel=0.08)
    assert set(found.reads) == {"fp8", "store int8"}
    assert found.errors[GOODPUT] == pytest.approx(0.1)
    assert found.copy_bytes_per_s == 7e9
    elsewhere = experience_of(history, GPU, engine)
    assert elsewhere == Experience()
