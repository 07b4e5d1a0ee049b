"""Points of a space that has the policies of kvtune's plugin."""

from itertools import product

import pytest
from contracts.policy_samples import MIB, WITH_PLUGIN, on_cpu, workload

from kvtune.autotune.space import build_space, infeasible_reason, stack_from
from kvtune.policies.plugin_arguments import (
    PROTECTED_TOKENS,
    QUEST_TOKENS,
    WINDOW_TOKENS,
    asked_by,
)
from kvtune.policies.plugin_clashes import clashes
from kvtune.policies.settings import settings_of
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


def test_policies_that_drop_tokens_leave_what_prompts_have_in_common():
    lengths = workload(input_p95=5000.0, output_p50=60.0, shared=400)
    ctx = on_cpu(engine=WITH_PLUGIN, fingerprint=lengths)
    for values in ({"streaming_window_tokens": 512}, {"page_eviction_share": 0.5}):
        assert arguments_of(values, ctx)[PROTECTED_TOKENS] == 400
    both = arguments_of({"streaming_window_tokens": 512, "page_eviction_share": 0.5}, ctx)
    assert both[PROTECTED_TOKENS] == 400, "whichever of the two gives way"


@pytest.mark.parametrize(("window", "fits"), [(512, True), (4096, False)])
def test_a_pool_that_is_too_small_for_a_request_may_be_large_enough_for_a_window(window, fits):
    ctx = on(**{"kv-cache-memory-bytes": 64 * MIB, "max-num-batched-tokens": 256})
    space = build_space(ctx, harm=Harm.LOSSY)
    # 21 blocks of 128, and the model's 8,192 tokens.
    assert infeasible_reason(stack_from(space, {}, ctx), ctx) is not None
    stack = stack_from(space, {"streaming_window_tokens": window}, ctx)
    assert (infeasible_reason(stack, ctx) is None) is fits


def sharing(**base):
    """The same, of prompts of which a half could be reused, beside a small pool."""
    lengths = workload(input_p95=5000.0, output_p50=60.0, reuse={128: 0.5})
    arguments = {"kv-cache-memory-bytes": "512M", **base}
    return on_cpu(engine=WITH_PLUGIN, fingerprint=lengths, base_arguments=arguments)


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ({"store_format": "int8", "kv_cache_dtype": "fp8"}, {"store"}),
        ({"store_format": "int8", "page_eviction_share": 0.5}, {"store"}),
        ({"store_format": "int8", "tier_host_bytes": 1 << 32}, {"store"}),
        ({"page_eviction_share": 0.5, "tier_host_bytes": 1 << 32}, {"page_eviction"}),
        ({"quest_budget_tokens": 512, "tier_host_bytes": 1 << 32}, {"quest"}),
        ({"page_eviction_share": 0.5, "streaming_window_tokens": 512}, {"streaming_llm"}),
        ({"page_eviction_share": 0.5, "kv_cache_dtype": "fp8"}, {"page_eviction"}),
        ({"page_eviction_share": 0.5, "quest_budget_tokens": 512}, {"page_eviction", "quest"}),
        ({"store_format": "int8", "quest_budget_tokens": 512}, {"store", "quest"}),
        (
            {"tier_host_bytes": 1 << 32, "streaming_window_tokens": 512},
            {"tiers", "streaming_llm"},
        ),
    ],
)
def test_what_the_plugin_refuses_together_is_not_tried_and_the_rest_is(values, asked):
    arguments = arguments_of(values, sharing())
    assert asked_by(arguments).model_fields_set == asked
    assert "kv-cache-dtype" not in arguments


def test_tiers_give_way_to_an_fp8_cache():
    values = {"tier_host_bytes": 1 << 32, "kv_cache_dtype": "fp8"}
    assert arguments_of(values, sharing()) == {"kv-cache-dtype": "fp8"}


def test_points_that_take_less_host_memory_are_the_simpler_ones():
    ctx = sharing()
    space = build_space(ctx, harm=Harm.LOSSLESS)
    (sizes,) = (e.knob.choices for e in space.knobs if e.knob.name == "tier_host_bytes")
    stacks = [stack_from(space, {"tier_host_bytes": size}, ctx) for size in reversed(sizes)]
    plain = stack_from(space, {"block_size": 32, "max_num_seqs": 8}, ctx)
    assert len(plain.arguments) == 2
    costs = [(size, 1) for size in sizes[1:]]
    assert [one.cost for one in sorted([*stacks, plain], key=lambda one: one.cost)] == [
        (0, 0),
        (0, 2),
        *costs,
    ]


def test_quest_moves_a_store_to_the_nearest_format_that_goes_with_it():
    asked = asked_by(arguments_of({"store_format": "kivi", "quest_budget_tokens": 512}, sharing()))
    assert (asked.store.format, asked.quest.budget_tokens) == ("turboquant", 512)


def test_no_point_of_a_space_is_one_that_the_plugin_refuses():
    ctx = sharing()
    space = build_space(ctx, harm=Harm.LOSSY)
    ours = {"store_format", "page_eviction_share", "tier_host_bytes", "quest_budget_tokens"}
    ours |= {"streaming_window_tokens", "kv_cache_dtype", "prefix_caching_hash_algo"}
    knobs = [entry.knob for entry in space.knobs if entry.knob.name in ours]
    assert len(knobs) == len(ours)
    for values in product(*(sorted({knob.choices[0], knob.choices[-1]}) for knob in knobs)):
        point = {knob.name: value for knob, value in zip(knobs, values, strict=True)}
        stack = stack_from(space, point, ctx)
        now = settings_of({**ctx.base_arguments, **stack.arguments}, ctx)
        assert clashes(now.beside) == ()


def test_a_store_makes_room_for_requests_that_full_precision_has_none_for():
    ctx = on(**{"kv-cache-memory-bytes": 64 * MIB})
    space = build_space(ctx, harm=Harm.LOSSY)
    assert infeasible_reason(stack_from(space, {}, ctx), ctx) is not None
    stack = stack_from(space, {"store_format": "turboquant"}, ctx)
    assert infeasible_reason(stack, ctx) is None
