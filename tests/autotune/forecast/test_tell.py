"""What is forecast of a profile, by what is known of its server."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from contracts.forecast_baseline import CONFIG, CPU, GPU, context
from contracts.store_values import a_profile

from kvtune.autotune.forecast import tell
from kvtune.autotune.forecast.replay import simulate
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.autotune.forecast.system import as_reported, system_of
from kvtune.autotune.forecast.tell import (
    IS_ELSEWHERE,
    NEEDS_LIMITS,
    NEEDS_LOAD,
    capacities_of,
    forecasts_of,
)
from kvtune.policies.method_stack import parse_stack
from kvtune.profilers.load.arrivals import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.scrape import ENGINES
from kvtune.profilers.server_lengths import ANSWERS, PROMPTS
from kvtune.types import Goal, LoadRun, Request

TRUE = StepCost(0.02, per_sequence_s=2e-4, per_kv_token_s=1e-5, per_prefill_token_s=3e-4)
PLAN = LoadPlan(ClosedLoop(16))
WATCHED = LoadRun((), 30.0, 0.0, {}, {})
HERE, ELSEWHERE = "http://127.0.0.1:8000", "http://10.1.2.3:8000"
GOODPUT = "goodput_requests_per_s"
ANY_DEVICE = {"kv memory x2", "kv memory x0.5", "prefix caching off"}
LIMITS = {
    *("max-num-seqs 128", "max-num-seqs 32"),
    *("max-num-batched-tokens 4096", "max-num-batched-tokens 1024"),
}


def counted(metric, requests, tokens):
    """Counters of requests of `tokens` tokens each."""
    return {
        f'{metric}_bucket{{le="1000.0"}}': requests,
        f'{metric}_bucket{{le="+Inf"}}': requests,
        f"{metric}_sum": requests * tokens,
        f"{metric}_count": requests,
    }


COUNTERS = {**counted(PROMPTS, 5.0, 600.0), **counted(ANSWERS, 5.0, 200.0)}


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The device that this machine has; a test puts another one in."""
    found = [GPU]
    monkeypatch.setattr(tell, "detect_device", lambda: found[-1])
    monkeypatch.setattr(tell, "detect_detail", lambda: None)
    return found


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def profile_of(url=HERE, counters=COUNTERS, **effective):
    """The profile of a server that kvtune attached to, as in `contracts.forecast_baseline`."""
    return a_profile("m").model_copy(
        update={
            "endpoint_url": url,
            "device": None,
            "counters": counters,
            "effective": context(start_kind="attached", **effective).baseline,
            "fingerprint": None,
        }
    )


def watched(profile, *stacks, model=None, **changes):
    run = replace(WATCHED, **changes)
    asked = [parse_stack(stack) for stack in stacks]
    return capacities_of(profile, run, model=model, arguments={}, stacks=asked)


def by_lever(told):
    found = {}
    for forecast in told.forecasts:
        found.setdefault(forecast.lever, {})[forecast.metric] = forecast
    return found


def with_a_figure(told):
    """The levers of which anything is told."""
    return {one.lever for one in told.forecasts if one.predicted is not None}


def counts(told, lever):
    found = by_lever(told)[lever]
    return [
        (found[metric].baseline, found[metric].predicted)
        for metric in ("capacity_tokens", "sequences")
    ]


def test_watched_server_is_told_what_fits_and_what_the_rest_needs(checkpoint):
    told = watched(profile_of(), model=checkpoint)
    # A request of 800 tokens takes 50 of the 999 blocks of 16 tokens that can be used.
    assert counts(told, "kv memory x2") == [(16_000, 32_000), (19, 39)]
    assert counts(told, "fp8") == [(16_000, 32_000), (19, 39)]
    assert counts(told, "prefix caching off") == [(16_000, 16_000), (19, 19)]
    doubled = by_lever(told)["kv memory x2"]
    assert doubled["capacity_tokens"].ratio.method == "by formula"
    for metric in ("capacity_tokens", "sequences"):
        assert doubled[metric].reason == (
            "doubles the memory: 16,000 to 32,000 KV tokens, 19 to 39 sequences of 800 tokens"
        )
    same = by_lever(told)["prefix caching off"]["capacity_tokens"]
    assert same.reason == "still 16,000 KV tokens, still 19 sequences of 800 tokens"
    for metric in ("itl_p50_s", "ttft_p50_s", GOODPUT):
        assert doubled[metric].predicted is None
        assert doubled[metric].reason == NEEDS_LOAD
    assert told.subject == "", "no trial measures it"
    assert (told.missing, told.notes) == ("", ())


def test_sequences_are_as_long_as_may_be_where_no_request_ended(checkpoint):
    # 23 blocks for the 360 tokens of max-model-len: 43 fit, and 86, of which 64 may run.
    told = watched(profile_of(counters={}), model=checkpoint)
    assert counts(told, "kv memory x2")[1] == (43, 64)


def test_lever_that_the_engine_would_refuse_has_no_count():
    told = watched(profile_of(blocks=40, counters={}))
    halved = by_lever(told)["kv memory x0.5"]
    assert halved["capacity_tokens"].predicted is None
    assert "less than one request" in halved["capacity_tokens"].reason
    assert "less than one request" in halved[GOODPUT].reason


@pytest.mark.parametrize(
    ("effective", "run", "reason"),
    [
        ({"num_gpu_blocks": None, "kv_cache_memory_bytes": None}, {}, "size of the pool is not"),
        ({}, {"gauges": {ENGINES: [(0.0, 2.0)]}}, "spread over several engines"),
        ({"max_model_len_tokens": None}, {}, "how long a request may be is not known"),
    ],
)
def test_what_keeps_counts_from_being_told_is_said_with_what_the_rest_needs(effective, run, reason):
    told = watched(profile_of(counters={}, **effective), **run)
    assert told.forecasts == ()
    assert reason in told.missing
    assert told.missing.endswith(NEEDS_LOAD)


@pytest.fixture
def replayed(some_requests, model_of):
    """A run on the server of a profile, and all that a forecast of it takes."""

    def make(profile):
        reported = as_reported(replace(context(), baseline=profile.effective))
        requests = some_requests()
        system = system_of(reported.base_arguments, reported)
        run = simulate(requests, PLAN.arrivals, system, TRUE).run
        sent = [
            Request(token_ids=tuple(one.content), output_tokens=one.output_tokens)
            for one in requests
        ]
        profile = profile.model_copy(update={"step_time": model_of(TRUE)})
        return forecasts_of(profile, run, sent, PLAN, Goal(), model=None, arguments={})

    return make


def test_server_here_is_forecast_for_the_device_here_and_one_elsewhere_is_not(replayed, device):
    here = replayed(profile_of(blocks=120))
    elsewhere = replayed(profile_of(url=ELSEWHERE, blocks=120))
    device.append(CPU)
    assert replayed(profile_of(url=ELSEWHERE, blocks=120)) == elsewhere
    assert {"fp8", "blocks of 32", "kv offload"} < with_a_figure(here)
    assert with_a_figure(elsewhere) == ANY_DEVICE | LIMITS
    assert elsewhere.notes == (IS_ELSEWHERE,)
    assert (bool(here.subject), elsewhere.subject) == (True, ""), "no search measures that device"
    for lever, found in by_lever(elsewhere).items():
        assert found == by_lever(here)[lever], "what does not depend on the device"
    assert by_lever(elsewhere)["kv memory x2"][GOODPUT].ratio.estimate > 1.05


def test_limits_that_a_server_elsewhere_does_not_tell_are_not_guessed_from_the_device_here(
    replayed,
):
    told = replayed(profile_of(url=ELSEWHERE, max_num_seqs=None))
    assert with_a_figure(told) == ANY_DEVICE
    doubled = by_lever(told)["kv memory x2"]
    # The model is not known, so what is left over of the pool is not either.
    assert doubled["capacity_tokens"].predicted == pytest.approx(32_000, abs=16)
    assert doubled["sequences"].predicted is None
    assert doubled["sequences"].reason == doubled[GOODPUT].reason == NEEDS_LIMITS


def test_forecast_of_a_model_that_only_a_server_named_says_how_it_is_measured(replayed):
    (note,) = replayed(profile_of()).notes
    assert "its model is called m too; with --model" in note


def test_stack_is_told_beside_the_levers_that_it_is_made_of(checkpoint):
    both = "snapkv:budget_tokens=400 + vllm-fp8"
    told = watched(profile_of(), both, model=checkpoint)
    assert list(by_lever(told))[-1] == both
    lever = by_lever(told)[both]["capacity_tokens"]
    assert lever.served_by == "reference"
    # 400 tokens of the 600 of a prompt and the 200 after it: 600 of 800. A token of a KV head is
    # 128 bytes of numbers in 8 bits and a position of 4, where it was 256.
    assert lever.ratio.estimate == pytest.approx(800 / 600 * 256 / (128 + 4), rel=0.01)
    alone = by_lever(told)["snapkv:budget_tokens=400"]["capacity_tokens"].ratio.estimate
    assert lever.ratio.estimate > max(alone, 2.0)


def test_stack_that_is_a_lever_of_the_engine_takes_its_place(checkpoint):
    found = by_lever(watched(profile_of(), "vllm-fp8", model=checkpoint))
    assert "fp8" not in found
    assert found["vllm-fp8"]["capacity_tokens"].arguments == {"kv-cache-dtype": "fp8"}
    assert found["vllm-fp8"]["capacity_tokens"].served_by == "engine"


@pytest.mark.parametrize("written", ["vllm-turboquant", "vllm-turboquant:preset=4bit_nc"])
def test_stack_takes_the_place_of_its_like_however_it_is_written(written, checkpoint):
    found = by_lever(watched(profile_of(), written, model=checkpoint))
    assert "turboquant_4bit_nc" not in found
    assert found["vllm-turboquant"]["capacity_tokens"].predicted is not None


@pytest.mark.parametrize(
    ("stack", "has_model", "url", "cache", "reason"),
    [
        ("vllm-fp8 + vllm-int8-per-token-head", True, HERE, "auto", "two number formats"),
        ("snapkv:budget_tokens=300", False, HERE, "auto", "name the checkpoint with --model"),
        ("snapkv:budget_tokens=300", True, HERE, "fp8", "this cache is fp8"),
        ("vllm-fp8", True, ELSEWHERE, "auto", "not on this machine"),
    ],
)
def test_stack_without_a_forecast_says_why(stack, has_model, url, cache, reason, checkpoint):
    model = checkpoint if has_model else None
    found = by_lever(watched(profile_of(url=url, kv_cache_dtype=cache), stack, model=model))
    assert found[stack]["capacity_tokens"].predicted is None
    assert reason in found[stack]["capacity_tokens"].reason


def test_methods_that_are_the_same_on_every_device_are_told_of_a_server_elsewhere(checkpoint):
    told = watched(profile_of(url=ELSEWHERE), "snapkv:budget_tokens=300", model=checkpoint)
    assert {"snapkv:budget_tokens=300", "snapkv:budget_tokens=400"} < with_a_figure(told)
    assert not {"fp8", "int8_per_token_head", "turboquant"} & with_a_figure(told)


@pytest.mark.parametrize("model", ["org/name", None])
def test_methods_of_a_model_that_is_not_here_say_so(model):
    told = by_lever(watched(profile_of(), model=model))["snapkv:budget_tokens=400"]
    assert "name the checkpoint with --model" in told["capacity_tokens"].reason
