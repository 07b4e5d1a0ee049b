"""Points of a space that has the policies of kvtune's plugin."""

import pytest
from contracts.policy_samples import MIB, WITH_PLUGIN, on_cpu, workload

from kvtune.autotune.space import build_space, infeasible_reason, stack_from
from kvtune.policies.plugin_arguments import QUEST_TOKENS, WINDOW_TOKENS, asked_by
from kvtune.types import Harm


def on(**base):
    lengths = workload(input_p95=5000.0, output_p50=60.0)
    return on_cpu(engine=WITH_PLUGIN, fingerprint=lengths, base_arguments=base)


def arguments_of(values, ctx):
    return stack_from(build_space(ctx, harm=Harm.LOSSY), values, ctx).arguments


def test_both_policies_are_knobs_of_a_lossy_space_alone():
    ours = {"quest_budget_tokens", "streaming_window_tokens"}
    names = {entry.knob.name for entry in build_space(on(), harm=Harm.LOSSY).knobs}
    assert ours <= names
    names = {entry.knob.name for entry in build_space(on(), harm=Harm.NEAR_LOSSLESS).knobs}
    assert not ours & names


def test_a_point_becomes_what_the_plugin_is_asked_for():
    asked = asked_by(
        arguments_of({"quest_budget_tokens": 512, "streaming_window_tokens": 2048}, on())
    )
    assert asked.quest.budget_tokens == 512
    assert asked.streaming_llm.window_tokens == 2048


def test_a_budget_that_holds_all_that_is_kept_is_left_out():
    found = arguments_of({"quest_budget_tokens": 2048, "streaming_window_tokens": 512}, on())
    assert found == {WINDOW_TOKENS: 512}


def test_layers_in_formats_of_their_own_give_way_to_the_plugin():
    values = {
        "kv_cache_dtype": "fp8",
        "kv_cache_dtype_skip_layers": 2,
        "quest_budget_tokens": 512,
    }
    assert arguments_of(values, on()) == {"kv-cache-dtype": "fp8", QUEST_TOKENS: 512}


@pytest.mark.parametrize(("window", "fits"), [(512, True), (4096, False)])
def test_a_pool_that_is_too_small_for_a_request_may_be_large_enough_for_a_window(window, fits):
    ctx = on(**{"kv-cache-memory-bytes": 64 * MIB, "max-num-batched-tokens": 256})
    space = build_space(ctx, harm=Harm.LOSSY)
    # 21 blocks of 128, and the model's 8,192 tokens.
    assert infeasible_reason(stack_from(space, {}, ctx), ctx) is not None
    stack = stack_from(space, {"streaming_window_tokens": window}, ctx)
    assert (infeasible_reason(stack, ctx) is None) is fits
