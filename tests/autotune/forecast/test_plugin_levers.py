"""What is forecast of the policies of kvtune's plugin for vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.forecast_baseline import CPU, context, found_on
from contracts.policy_samples import WITH_PLUGIN, workload
from contracts.store_values import a_study

from kvtune.autotune.forecast.counted import start_problem
from kvtune.autotune.forecast.experience import Experience, MeasuredRead
from kvtune.autotune.forecast.foresight import foresight_of
from kvtune.autotune.forecast.levers import lever_of
from kvtune.autotune.forecast.loading import LOADED_ON_CPU
from kvtune.autotune.forecast.predict import make_forecaster
from kvtune.autotune.forecast.read_times import STORES_ON_CPU
from kvtune.autotune.forecast.replay import simulate
from kvtune.autotune.forecast.sparse_reads import SparseReads
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.autotune.forecast.system import as_reported, system_of
from kvtune.policies.page_eviction import PageEviction
from kvtune.policies.plugin_arguments import (
    EVICTION_SHARE,
    HOST_BYTES,
    PROTECTED_TOKENS,
    QUEST_TOKENS,
    STORE_FORMAT,
    WINDOW_TOKENS,
    kv_format,
)
from kvtune.policies.plugin_config import (
    PageEvictionConfig,
    PluginConfig,
    QuestConfig,
    StoreConfig,
)
from kvtune.policies.sink_window import SinkWindow
from kvtune.profilers.load.arrivals import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.metrics.base import measure
from kvtune.store import open_store
from kvtune.types import (
    Choice,
    EffectiveConfig,
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


def beside_the_plugin(**changes):
    """A CPU server whose vLLM loads the plugin, with blocks of 16 tokens."""
    seen = {"blocks": 600, "max_model_len_tokens": 512, "max_num_batched_tokens": 128, **changes}
    return replace(context(CPU, **seen), engine=WITH_PLUGIN)


def sent(requests):
    return [
        Request(token_ids=tuple(one.content), output_tokens=one.output_tokens) for one in requests
    ]


@pytest.fixture
def forecaster_of(some_requests, model_of):
    """Makes a forecaster from a run with the true costs on such a server."""

    def make(cost=TRUE, **changes):
        ctx = beside_the_plugin(**changes)
        requests = some_requests()
        reported = as_reported(ctx)
        system = system_of(reported.base_arguments, reported)
        run = simulate(requests, PLAN.arrivals, system, cost).run
        return make_forecaster(sent(requests), PLAN, run, Goal(), ctx, model_of(cost, 0.1))

    return make


def forecast(forecaster, arguments):
    lever = lever_of(arguments, forecaster.context, name="x", says="does x")
    return {found.metric: found for found in forecaster.forecast(lever)}


def truth(forecaster, system):
    run = simulate(forecaster.baseline.requests, PLAN.arrivals, system, TRUE).run
    return measure(run, Goal())


def test_quest_shortens_steps_by_what_it_does_not_read(forecaster_of):
    forecaster = forecaster_of()
    found = forecast(forecaster, {QUEST_TOKENS: 64})
    reads = SparseReads(16, quest=QuestConfig(budget_tokens=64), dense_share=2 / 30)
    base = forecaster.baseline.system
    before = truth(forecaster, base)["itl_p50_s"]
    all_saved, none_saved = (
        truth(forecaster, replace(base, reads=reads, saved_ratio=ratio))["itl_p50_s"] / before
        for ratio in (1.0, 0.0)
    )
    ratio = found["itl_p50_s"].ratio
    assert all_saved < 0.9
    assert none_saved == pytest.approx(1.0)
    assert ratio.low <= all_saved <= ratio.estimate <= none_saved <= ratio.high * 1.01
    assert found["capacity_tokens"].ratio.estimate == 1.0
    assert found["sequences"].ratio.estimate == 1.0
    assert "tokens of a mean context are read, not " in found["itl_p50_s"].reason


def test_quest_changes_nothing_where_contexts_are_within_its_budget(forecaster_of):
    found = forecast(forecaster_of(), {QUEST_TOKENS: 512})
    for metric in ("itl_p50_s", "ttft_p50_s", "goodput_requests_per_s"):
        assert found[metric].ratio.estimate == pytest.approx(1.0)
    assert found["itl_p50_s"].reason.endswith("changes by under 3%, skip")


def test_nothing_is_gained_by_reading_less_where_reads_cost_nothing(forecaster_of):
    idle = replace(TRUE, per_kv_token_s=0.0)
    found = forecast(forecaster_of(idle), {QUEST_TOKENS: 64})
    assert found["itl_p50_s"].ratio.estimate == pytest.approx(1.0)


def test_a_window_makes_room_as_the_plugin_reports_it(forecaster_of):
    # Full: 90 blocks of 16. Beside it a request keeps 1 + 4 + 8 + 1 blocks of 512 / 16.
    forecaster = forecaster_of(blocks=90)
    found = forecast(forecaster, {WINDOW_TOKENS: 64})
    assert found["capacity_tokens"].baseline == 90 * 16
    assert found["capacity_tokens"].predicted == int(90 / 14 * 512)
    assert found["goodput_requests_per_s"].ratio.estimate > 1.1
    system = replace(forecaster.baseline.system, reads=SparseReads(16, SinkWindow(4, 64, 16)))
    before = truth(forecaster, forecaster.baseline.system)["goodput_requests_per_s"]
    after = truth(forecaster, system)["goodput_requests_per_s"]
    ratio = found["goodput_requests_per_s"].ratio
    assert ratio.low <= after / before <= ratio.high


def test_a_window_that_nothing_leaves_changes_nothing(forecaster_of):
    found = forecast(forecaster_of(), {WINDOW_TOKENS: 512})
    for metric in ("capacity_tokens", "itl_p50_s", "ttft_p50_s", "goodput_requests_per_s"):
        assert found[metric].ratio.estimate == pytest.approx(1.0)


def test_a_pool_that_holds_no_whole_request_starts_with_a_window():
    ctx = as_reported(beside_the_plugin(blocks=22))
    stock, windowed = (system_of(arguments, ctx) for arguments in ({}, {WINDOW_TOKENS: 64}))
    assert "less than one request of max-model-len 512" in start_problem(stock, ctx)
    assert start_problem(windowed, ctx) == ""


def test_levers_of_the_plugin_take_the_place_of_what_no_engine_serves():
    names = set(found_on(beside_the_plugin()))
    # Half and a quarter of the mean sequence of 800 tokens.
    assert {"quest 400", "quest 200", "streaming-llm 400", "streaming-llm 200"} <= names
    assert {"page-eviction 0.5", "host tier"} <= names
    assert {f"store {name}" for name in ("int8", "int4", "turboquant", "kivi")} <= names
    assert not any(":" in name for name in names)
    without = set(found_on(context(CPU)))
    assert "quest 400" not in without
    assert any(name.startswith("quest:") for name in without)
    assert "kv offload" in without


def test_methods_are_not_forecast_on_a_server_that_drops_or_skips_already():
    ctx = replace(beside_the_plugin(), base_arguments={QUEST_TOKENS: 64})
    assert not any(name.startswith(("snapkv", "quest", "stream")) for name in found_on(ctx))


def test_the_room_that_is_measured_is_what_vllm_reports_of_such_requests(
    tmp_path, some_requests, model_of
):
    ctx, requests = beside_the_plugin(blocks=90), some_requests()
    reported = as_reported(ctx)
    run = simulate(requests, PLAN.arrivals, system_of(reported.base_arguments, reported), TRUE).run
    figures = {name: (value,) for name, value in measure(run, Goal()).items()}
    blocks = {"num_gpu_blocks": 90, "block_size_tokens": 16}
    stock = Measurement(status=Status.OK, metrics=figures, effective=EffectiveConfig(**blocks))
    stack = PolicyStack(
        choices=(
            Choice(
                policy="streaming_window",
                parameters={},
                arguments={WINDOW_TOKENS: 64},
                harm=Harm.LOSSY,
            ),
        )
    )
    windowed = EffectiveConfig(
        **blocks, kv_cache_size_tokens=3291, plugin={"streaming_llm": {"window_tokens": 64}}
    )
    with open_store(tmp_path / "kvtune.db") as store:
        foresight = foresight_of(store, a_study(store, goal=Goal()), PLAN)
        foresight.learn(sent(requests), run, stock, ctx, model_of(TRUE))
        foresight.tell(stack)
        foresight.measured(
            Trial(number=1, stack=stack, base_arguments={}, repeats=1, seed=0),
            Measurement(status=Status.OK, metrics=figures, effective=windowed),
        )
        told = {one.metric: one for one in store.forecasts()}
    assert told["capacity_tokens"].predicted == 3291
    assert told["capacity_tokens"].measured == 3291


def test_a_server_that_nobody_here_started_is_simulated_with_what_its_plugin_says():
    does = {"schema_version": 1, "streaming_llm": {"window_tokens": 64}}
    ctx = as_reported(replace(context(CPU), baseline=EffectiveConfig(plugin=does)))
    system = system_of({**ctx.base_arguments, "num-gpu-blocks-override": 90}, ctx)
    assert system.sink_window == SinkWindow(4, 64, 128)
    told = PluginConfig(store=StoreConfig(format="int8")).model_dump(mode="json")
    stored = as_reported(replace(context(CPU), baseline=EffectiveConfig(plugin=told)))
    assert kv_format(stored.base_arguments) == "store int8"
    unheard_of = replace(ctx, baseline=EffectiveConfig(plugin={"magic": {}}), base_arguments={})
    assert as_reported(unheard_of).base_arguments == {}


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (
            {"tiers": {"host_bytes": 1, "disk_bytes": 1, "disk_path": "/x"}},
            "tiers.disk_bytes of kvtune's plugin",
        ),
        (
            {"tiers": {"host_bytes": 1}, "streaming_llm": {"window_tokens": 64}},
            "tiers beside streaming_llm of kvtune's plugin",
        ),
        (
            {"page_eviction": {"share": 0.5, "method": "h2o"}},
            "page_eviction by h2o of kvtune's plugin",
        ),
    ],
)
def test_what_the_simulation_does_not_know_of_the_plugin_is_not_forecast(asked, what):
    base = {"additional-config": {"kvtune": asked}}
    ctx = as_reported(replace(beside_the_plugin(), base_arguments=base))
    lever = lever_of({"max-num-seqs": 4}, ctx, name="x", says="does x")
    assert lever.problem == f"{what} is not part of the simulation"


@pytest.mark.parametrize(
    # 256 bytes of a key and value of 64 channels in 16 bits.
    ("name", "cell_bytes"),
    [("int8", 136), ("int4", 72), ("turboquant", 68), ("kivi", 80)],
)
def test_a_store_makes_room_by_its_bytes_and_steps_longer_by_its_reads(
    forecaster_of, name, cell_bytes
):
    forecaster = forecaster_of(blocks=90)
    found = forecast(forecaster, {STORE_FORMAT: name})
    pool_bytes = 90 * 16 * 23_040 + 77
    blocks = pool_bytes // (16 * 90 * cell_bytes)
    assert found["capacity_tokens"].predicted == blocks * 16
    expected = STORES_ON_CPU[f"store {name}"][1]
    slow = replace(TRUE, read_ratio=expected, prompt_read_ratio=expected)
    larger = replace(forecaster.baseline.system, blocks=blocks)
    requests = forecaster.baseline.requests
    run = simulate(requests, PLAN.arrivals, larger, slow).run
    before = truth(forecaster, forecaster.baseline.system)
    for metric in ("itl_p50_s", "goodput_requests_per_s"):
        ratio = found[metric].ratio
        assert ratio.low <= measure(run, Goal())[metric] / before[metric] <= ratio.high
    assert found["itl_p50_s"].ratio.estimate > 1
    assert "no trial here measured it" in found["itl_p50_s"].reason


def test_a_store_is_worth_nothing_where_there_is_room_for_all(forecaster_of):
    found = forecast(forecaster_of(), {STORE_FORMAT: "int8"})
    assert found["goodput_requests_per_s"].ratio.estimate < 1


def test_what_trials_measured_of_a_store_takes_the_place_of_the_guess():
    reads = {"store int8": MeasuredRead((1.0, 1.1, 1.2), 2)}
    lever = lever_of(
        {STORE_FORMAT: "int8"},
        as_reported(beside_the_plugin()),
        name="x",
        says="",
        experience=Experience(reads=reads),
    )
    assert lever.read_ratio == (1.0, 1.1, 1.2)
    assert lever.read_source == "as 2 trials here found"


def test_a_server_with_a_store_has_the_pool_that_was_measured():
    stored = {"additional-config": {"kvtune": {"store": {"format": "int8"}}}}
    ctx = as_reported(replace(beside_the_plugin(), base_arguments=stored))
    lever = lever_of({"block-size": 32}, ctx, name="x", says="does x")
    assert (lever.problem, lever.read_ratio) == ("", (1.0, 1.0, 1.0))
    # In proportion to what was measured: 600 blocks of 16 tokens.
    assert system_of({**ctx.base_arguments, **lever.arguments}, ctx).blocks == 300
    assert "fp8" not in found_on(ctx), "it does not go beside a store"


def test_page_eviction_lets_more_requests_decode_in_the_same_pool(forecaster_of):
    forecaster = forecaster_of(blocks=90)
    found = forecast(forecaster, {EVICTION_SHARE: 0.25})
    assert found["capacity_tokens"].ratio.estimate == 1.0
    mean = forecaster.mean
    # Sinks and the last 32 tokens stay, which are two or three pages of 16.
    pages = -(-mean.at_once // 16)
    last = pages - max(mean.at_once - 32, 0) // 16
    kept = max(-(-pages // 4), 1 + last)
    assert kept < pages
    assert found["sequences"].predicted == 89 // (-(-mean.tokens // 16) - pages + kept)
    assert found["sequences"].ratio.estimate > 1.2
    assert found["goodput_requests_per_s"].ratio.estimate > 1.05
    asked = PluginConfig(page_eviction=PageEvictionConfig(share=0.25))
    budget = asked.page_budget(16)
    system = replace(forecaster.baseline.system, reads=SparseReads(16, page_budget=budget))
    before = truth(forecaster, forecaster.baseline.system)["goodput_requests_per_s"]
    after = truth(forecaster, system)["goodput_requests_per_s"]
    ratio = found["goodput_requests_per_s"].ratio
    assert ratio.low <= after / before <= ratio.high
    assert "tokens of a mean context are read, not " in found["itl_p50_s"].reason


@pytest.mark.parametrize(
    ("prompt", "offered"),
    [(200.0, []), (384.0, []), (512.0, [0.5]), (1024.0, [0.5, 0.25]), (4096.0, [0.5, 0.25])],
)
def test_page_eviction_is_forecast_as_far_as_a_search_tries_it(prompt, offered):
    ctx = replace(
        as_reported(beside_the_plugin(max_model_len_tokens=8192)),
        fingerprint=workload(prompt, prompt),
    )
    found = [lever.arguments.get(EVICTION_SHARE) for lever in found_on(ctx).values()]
    assert [share for share in found if share is not None] == offered
    assert sorted(offered) == list(PageEviction().wanted(ctx))


def test_what_prompts_have_in_common_is_protected_in_forecasts_as_in_a_search():
    ctx = as_reported(beside_the_plugin(max_model_len_tokens=2048))
    bare = found_on(ctx)
    told = found_on(replace(ctx, fingerprint=workload(2000.0, 2000.0, shared=50)))
    assert not any(PROTECTED_TOKENS in lever.arguments for lever in bare.values())
    kept = {name for name, lever in told.items() if lever.arguments.get(PROTECTED_TOKENS) == 50}
    wanted = {
        name
        for name, lever in told.items()
        if EVICTION_SHARE in lever.arguments or lever.arguments.get(WINDOW_TOKENS, 0) >= 50
    }
    assert kept == wanted
    assert any(name.startswith("streaming-llm") for name in wanted)
    assert "page-eviction 0.5" in wanted


def test_a_host_tier_holds_as_many_blocks_as_it_has_bytes_for():
    ctx = as_reported(beside_the_plugin(blocks=90))
    lever = found_on(ctx)["host tier"]
    pool_bytes = 90 * 16 * 23_040 + 77
    assert lever.arguments == {HOST_BYTES: 4 * pool_bytes}
    assert lever.problem == ""
    assert lever.load_bytes_per_s == LOADED_ON_CPU
    system = system_of({**ctx.base_arguments, **lever.arguments}, ctx)
    assert (system.blocks, system.tier_blocks) == (90, 360)


def test_a_host_tier_that_the_machine_has_no_memory_for_is_not_forecast():
    # 300,000 tokens are 6.4 GiB and five times that 32.2, which pool and tier take together.
    lever = found_on(beside_the_plugin(blocks=18_750))["host tier"]
    assert lever.problem == "needs 32.2 GiB, the device has 8.0"


def test_what_a_host_tier_gives_back_is_said_to_be_assumed(forecaster_of):
    found = forecast(forecaster_of(blocks=90), {HOST_BYTES: 1 << 30})
    assert found["capacity_tokens"].ratio.estimate == 1.0
    assert "what it gives back is assumed to come at" in found["ttft_p50_s"].reason


def test_vllms_own_offload_does_not_run_where_a_cpu_computes():
    ctx = as_reported(beside_the_plugin())
    lever = lever_of({"kv-offloading-size": 1}, ctx, name="x", says="")
    assert "vLLM has no KV offload where a CPU computes" in lever.problem
