"""Which levers a rung opens, why others stay closed, and when a search climbs."""

from dataclasses import replace

import pytest
from contracts.policy_samples import MIB, SITUATIONS, WITH_PLUGIN, on_cpu, on_gpu, workload

from kvtune.autotune.ladder import (
    SHARES,
    UNLIKELY,
    UNLIKELY_TRIALS,
    Rung,
    Stand,
    ladder,
    next_step,
    unlocked,
    untried,
)
from kvtune.autotune.space import SearchSpace, build_space
from kvtune.types import Bottleneck, Harm, Verdict

LOSSLESS, NEAR, LOSSY = Harm


def by_name(ctx, most=LOSSY):
    return {rung.name: rung for rung in ladder(ctx, most)}


def test_each_rung_opens_the_levers_of_its_own_harm():
    found = by_name(on_gpu())
    assert {"block_size", "max_num_seqs"} <= set(found["L1"].opens)
    assert found["L2"].opens == ("kv_cache_dtype", "kv_cache_dtype_skip_layers")
    assert set(found["L3"].opens) == {
        f"kv_cache_dtype={dtype}"
        for dtype in (
            "int8_per_token_head",
            "fp8_per_token_head",
            "int4_per_token_head",
            "turboquant_k8v4",
            "turboquant_4bit_nc",
        )
    }


def test_a_rung_is_searched_together_with_those_below_it():
    for rung in ladder(on_gpu(), LOSSY):
        assert rung.space == build_space(on_gpu(), harm=rung.harm)


def test_a_search_has_no_rung_above_the_harm_that_it_may_do():
    assert [rung.name for rung in ladder(on_gpu(), LOSSLESS)] == ["L1"]
    assert [rung.name for rung in ladder(on_gpu(), NEAR)] == ["L1", "L2"]


def test_what_no_engine_serves_is_named_on_its_rung():
    closed = by_name(on_cpu())["L3"].closed
    for name in ("gear", "kvzip", "palu"):
        assert closed[name] == "no engine at hand serves it"
    ours = {"quest", "streaming-llm", "chunkkv", "snapkv", "kivi", "turboquant"}
    assert not ours & set(closed), "kvtune's plugin serves them"
    assert "garbage" in closed["kv_cache_dtype=int4_per_token_head"]
    assert "vllm-turboquant" not in closed, "it is a value of a lever"
    assert "gqa" not in closed, "an architecture is nothing to try"


def test_a_rung_with_nothing_to_try_says_so_with_the_reasons():
    says = by_name(on_cpu())["L3"].says
    assert says.startswith("L3, lossy settings: nothing to try here; not tried, ")
    assert ", palu, " in says
    assert "kv_cache_dtype=int4_per_token_head" in says
    assert says.count("no engine at hand serves it") == 1


def test_a_rung_says_what_it_opens_and_when():
    found = by_name(on_cpu(base_arguments={"block-size": 64}))
    assert found["L1"].says.startswith("L1, lossless settings, tried together: ")
    assert found["L1"].says.endswith("block_size: block-size is fixed by --engine-args") or (
        "block_size: block-size is fixed by --engine-args; " in found["L1"].says
    )
    assert found["L2"].says.startswith(
        "L2, near-lossless settings, tried if the goal is missed: "
        "kv_cache_dtype, kv_cache_dtype_skip_layers"
    )
    assert "nvfp4" not in found["L2"].says
    assert "nvfp4" in " ".join(found["L2"].closed)


def test_a_value_that_does_not_fit_is_closed_on_the_rung_of_its_lever():
    base = {"kv-cache-memory-bytes": 64 * MIB, "max-model-len": 2600}
    found = by_name(on_cpu(base_arguments=base))
    assert "11 blocks of 256" in found["L1"].closed["block_size=256"]
    assert "block_size=256" in found["L2"].opens, "it fits together with fp8"


def test_the_verdict_closes_what_cannot_help():
    verdict = Verdict(bottleneck=Bottleneck.COMPUTE, confidence="high", evidence=(), summary="")
    found = by_name(on_cpu(verdict=verdict))
    assert found["L1"].opens
    assert found["L2"].opens == ()
    assert "bound by compute" in found["L2"].closed["kv_dtype"]
    unsure = verdict.model_copy(update={"confidence": "medium"})
    assert "kv_cache_dtype" in by_name(on_cpu(verdict=unsure))["L2"].opens


# --- climbing ---------------------------------------------------------------------------------

L1, L2, L3 = ladder(on_gpu(), LOSSY)
EARLY = Stand(met=0, trials=3, tried=3, spent=0.25)


def likely():
    return 0.5


def unlikely():
    return UNLIKELY / 2


def unasked():
    raise AssertionError("this takes long, and nobody needs it")


def test_nothing_opens_while_the_rung_below_has_hope():
    assert next_step(L1, L2, EARLY, likely) == ""
    few = replace(EARLY, tried=UNLIKELY_TRIALS - 1)
    assert next_step(L1, L2, few, unasked) == "", "too few trials to believe a small chance"


@pytest.mark.parametrize(
    ("stand", "chance", "why"),
    [
        (
            replace(EARLY, is_exhausted=True),
            unasked,
            "no lossless configuration is left",
        ),
        (
            replace(EARLY, spent=SHARES[LOSSLESS]),
            unasked,
            "the lossless share of the budget is spent and the goal is missed",
        ),
        (
            replace(EARLY, tried=UNLIKELY_TRIALS),
            unlikely,
            "no lossless configuration that is left is likely to meet the goal",
        ),
    ],
)
def test_the_next_rung_opens_when_the_one_below_is_used_up(stand, chance, why):
    assert next_step(L1, L2, stand, chance) == why
    assert next_step(L1, L2, replace(stand, met=1), unasked) == "", "harm is not needed"


@pytest.mark.parametrize("rung", [(L1, L2), (L2, L3)], ids=["L2", "L3"])
def test_harm_that_is_asked_for_needs_no_reason(rung):
    met = replace(EARLY, met=1)
    assert next_step(*rung, met, unasked, is_asked_for=True) == "it was asked for"


def test_lossy_settings_wait_until_near_lossless_ones_miss_too():
    assert SHARES[LOSSLESS] < SHARES[NEAR] < 1
    later = replace(EARLY, tried=9, spent=SHARES[LOSSLESS])
    assert next_step(L2, L3, later, likely) == ""
    why = next_step(L2, L3, replace(later, spent=SHARES[NEAR]), likely)
    assert why == "the near-lossless share of the budget is spent and the goal is missed"
    assert next_step(L2, L3, replace(later, spent=1.0, met=1), unasked) == ""


def test_harm_is_tried_at_once_where_nothing_else_can_be():
    nothing = Rung(LOSSLESS, SearchSpace((), {}), (), {})
    said = next_step(nothing, L2, EARLY, unasked)
    assert said == "no lossless setting can be searched here"


def test_a_rung_without_anything_to_try_never_opens():
    empty = replace(L3, opens=())
    done = replace(EARLY, spent=1.0, is_exhausted=True)
    assert next_step(L2, empty, done, unasked, is_asked_for=True) == ""


def test_rungs_without_a_trial_are_found_if_there_is_anything_to_try():
    assert untried((L1, L2, L3), {LOSSLESS, LOSSY}) == [L2]
    assert untried((L1, replace(L2, opens=())), {LOSSLESS}) == []


def test_what_opens_is_said_with_how_the_trials_stood():
    assert unlocked(L1, L2, Stand(0, 7, 8, 0.7), "a reason") == (
        "settings that may change answers are tried from here on: a reason; "
        "0 of 7 lossless trials met the goal by then"
    )
    assert unlocked(L2, L3, Stand(0, 9, 10, 0.9), "a reason") == (
        "lossy settings are tried from here on: a reason; "
        "0 of 9 near-lossless trials met the goal by then"
    )


LONG = on_cpu(engine=WITH_PLUGIN, fingerprint=workload(input_p95=5000.0))


def bound(bottleneck):
    verdict = Verdict(bottleneck=bottleneck, confidence="high", evidence=(), summary="")
    return replace(LONG, verdict=verdict)


def test_policies_of_the_plugin_are_on_the_rung_for_lossy_settings():
    found = by_name(LONG)
    lossy = {"quest_budget_tokens", "streaming_window_tokens", "page_eviction_share"}
    assert lossy | {f"store_format={name}" for name in ("int4", "turboquant", "kivi")} <= set(
        found["L3"].opens
    )
    assert not lossy & set(found["L2"].opens)
    assert "store_format" in found["L2"].opens
    (store,) = [one for one in found["L2"].space.knobs if one.knob.name == "store_format"]
    assert store.knob.choices == ("none", "int8")


def test_host_memory_of_the_plugin_is_on_the_rung_for_lossless_settings():
    ctx = SITUATIONS["cpu, shared prefixes and the plugin"]
    assert "tier_host_bytes" in by_name(ctx)["L1"].opens
    assert "tier_host_bytes" not in by_name(LONG)["L1"].opens


@pytest.mark.parametrize(
    ("bottleneck", "opened"),
    [
        (Bottleneck.KV_CAPACITY, {"streaming_window", "page_eviction", "store_format"}),
        (Bottleneck.PREFIX_THRASH, {"streaming_window", "page_eviction", "store_format"}),
        (Bottleneck.KV_BANDWIDTH, {"streaming_window", "page_eviction", "page_selection"}),
        (Bottleneck.COMPUTE, set()),
    ],
)
def test_the_verdict_says_which_of_them_is_tried(bottleneck, opened):
    found = by_name(bound(bottleneck))
    ours = {"streaming_window", "page_selection", "page_eviction", "store_format"}
    assert {one.policy for one in found["L3"].space.knobs} & ours == opened
    closed = {**found["L2"].closed, **found["L3"].closed}
    for name in ours - opened:
        assert "bound by" in closed[name]


def test_a_vllm_without_the_plugin_is_told_what_to_install():
    without = WITH_PLUGIN.model_copy(update={"plugin": None, "python": "/venv/bin/python"})
    closed = by_name(replace(LONG, engine=without))["L3"].closed
    for name in ("page_selection", "streaming_window", "page_eviction"):
        assert "to fix: /venv/bin/python -m pip install kvtune==" in closed[name]
