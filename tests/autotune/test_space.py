import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.autotune.space import (
    SearchSpace,
    build_space,
    dry_run_text,
    infeasible_reason,
    stack_from,
    unhelpful,
)
from kvtune.kernels.device import DeviceDetail
from kvtune.policies.base import Context
from kvtune.policies.kv_dtype import KvDtype
from kvtune.policies.model_shape import ModelShape
from kvtune.policies.stack import broken_rules
from kvtune.types import (
    Bottleneck,
    Device,
    EngineInfo,
    Harm,
    Histogram,
    PolicyStack,
    Verdict,
    WorkloadFingerprint,
)

MIB = 1 << 20
SMOLLM2 = ModelShape("LlamaForCausalLM", 30, 9, 3, 64, 2, 8192, 49152)
LONG_PROMPTS = WorkloadFingerprint(
    requests=9,
    input_tokens=Histogram(edges=(0.0, 9999.0), counts=(9,), mean=2e3, p50=2e3, p95=4e3, p99=4e3),
    output_tokens=None,
    duration_s=None,
    request_rate_per_s=None,
    burstiness=None,
)


def situation(platform="cpu", **facts):
    device = Device(
        kind="cuda" if platform == "cuda" else "cpu", name="x", count=1, memory_bytes=80 << 30
    )
    engine = EngineInfo(
        name="vllm", version="0.32.0", distribution="vllm", platform=platform, python=None
    )
    return Context(engine=engine, device=device, **{"model": SMOLLM2, **facts})


def point(stack):
    return {name: value for choice in stack.choices for name, value in choice.parameters.items()}


def arguments_for(ctx, values, **options):
    space = build_space(ctx, harm=Harm.NEAR_LOSSLESS, **options)
    return stack_from(space, values, ctx).arguments


def test_the_defaults_are_the_stock_configuration():
    space = build_space(situation(), harm=Harm.LOSSLESS)
    assert stack_from(space, space.defaults, situation()) == PolicyStack()
    assert stack_from(space, {}, situation()) == PolicyStack()


def test_a_worse_harm_class_must_be_asked_for():
    lossless = build_space(situation(), harm=Harm.LOSSLESS)
    assert lossless.refusals["kv_dtype"] == "it is near-lossless, and this search is lossless"
    assert "kv_dtype" not in {entry.policy for entry in lossless.knobs}
    wider = build_space(situation(), harm=Harm.NEAR_LOSSLESS)
    assert "kv_dtype" in {entry.policy for entry in wider.knobs}
    assert "garbage" in wider.refusals["kv_cache_dtype=int8_per_token_head"]


def test_what_the_user_fixed_is_not_searched_and_the_reason_is_kept():
    ctx = situation(base_arguments={"block-size": 64})
    space = build_space(ctx, harm=Harm.LOSSLESS)
    assert space.refusals["block_size"] == "block-size is fixed by --engine-args"
    assert "block_size" not in space.defaults
    assert "block-size" not in arguments_for(ctx, {"block_size": 32})


def test_a_policy_with_one_value_is_not_offered():
    space = build_space(
        situation(base_arguments={"num-gpu-blocks-override": 4}), harm=Harm.LOSSLESS
    )
    assert space.refusals["watermark"] == "there is only one value to try"
    assert "watermark" not in [entry.policy for entry in space.knobs]


def test_a_knob_comes_after_those_that_it_depends_on():
    space = build_space(situation("cuda"), harm=Harm.NEAR_LOSSLESS)
    names = [entry.knob.name for entry in space.knobs]
    conditions = [
        (entry.knob.name, parent) for entry in space.knobs for parent in entry.active_when or {}
    ]
    assert len(conditions) == 3
    assert all(names.index(parent) < names.index(name) for name, parent in conditions)


def test_a_condition_on_a_knob_that_is_not_there_falls_away():
    ctx = situation("cuda", base_arguments={"max-num-seqs": 64})
    space = build_space(ctx, harm=Harm.LOSSLESS)
    (entry,) = [entry for entry in space.knobs if entry.policy == "max_num_active_seqs"]
    assert entry.active_when is None
    assert entry.is_active({})


def test_a_knob_whose_condition_can_never_hold_is_refused():
    # fp8 needs a compute capability of 8.0, and the other formats are lossy: auto is all there is.
    ctx = situation("cuda", detail=DeviceDetail((7, 5)))
    near = build_space(ctx, harm=Harm.NEAR_LOSSLESS)
    assert not {entry.policy for entry in near.knobs} & {"kv_dtype", "kv_skip_layers"}
    assert "kv_cache_dtype" in near.refusals["kv_skip_layers"]
    assert stack_from(near, {"kv_cache_dtype_skip_layers": 2}, ctx).arguments == {}
    lossy = build_space(ctx, harm=Harm.LOSSY)
    assert {"kv_dtype", "kv_skip_layers"} <= {entry.policy for entry in lossy.knobs}


def sizes_in(harm, **base):
    ctx = situation(base_arguments={"kv-cache-memory-bytes": 64 * MIB, **base})
    space = build_space(ctx, harm=harm)
    (entry,) = [entry for entry in space.knobs if entry.policy == "block_size"]
    return entry.knob.choices, space.refusals.get("block_size=256")


# 64 MiB holds 22 blocks of 128 or 11 of 256 in 16 bits, twice as many in 8; one is reserved.
def test_a_block_that_fits_in_eight_bits_alone_is_offered_where_these_are():
    assert sizes_in(Harm.LOSSLESS, **{"max-model-len": 2560}) == ((32, 64, 128, 256), None)
    sizes, why = sizes_in(Harm.LOSSLESS, **{"max-model-len": 2600})
    assert sizes == (32, 64, 128)
    assert "11 blocks of 256 tokens" in why
    assert sizes_in(Harm.NEAR_LOSSLESS, **{"max-model-len": 2600})[0] == (32, 64, 128, 256)
    assert sizes_in(Harm.NEAR_LOSSLESS, **{"max-model-len": 5500})[0] == (32, 64, 128)


def test_a_large_block_and_eight_bits_go_together_and_not_without_each_other():
    ctx = situation(base_arguments={"kv-cache-memory-bytes": 64 * MIB, "max-model-len": 2600})
    space = build_space(ctx, harm=Harm.NEAR_LOSSLESS)
    alone = stack_from(space, {"block_size": 256}, ctx)
    assert "11 blocks" in infeasible_reason(alone, ctx)
    both = stack_from(space, {"block_size": 256, "kv_cache_dtype": "fp8"}, ctx)
    assert infeasible_reason(both, ctx) is None


def test_the_default_stays_even_where_only_smaller_blocks_fit():
    assert sizes_in(Harm.LOSSLESS, **{"max-model-len": 2800})[0] == (32, 64, 128)


def test_levers_that_cannot_mend_a_pool_keep_their_values():
    # Only blocks of 32 or 64 together with eight bits hold so long a request.
    ctx = situation(
        max_concurrency=20,
        base_arguments={"kv-cache-memory-bytes": 64 * MIB, "max-model-len": 5700},
    )
    space = build_space(ctx, harm=Harm.NEAR_LOSSLESS)
    assert knob_in(space, "block_size").knob.choices == (32, 64, 128)
    assert len(knob_in(space, "enable_prefix_caching").knob.choices) == 2
    assert len(knob_in(space, "kv_cache_dtype").knob.choices) == 3


def knob_in(space, name):
    (entry,) = [entry for entry in space.knobs if entry.knob.name == name]
    return entry


def test_formats_of_a_worse_harm_are_left_out_of_a_list_and_the_reason_is_kept():
    near = build_space(situation("cuda"), harm=Harm.NEAR_LOSSLESS)
    assert knob_in(near, "kv_cache_dtype").knob.choices == ("auto", "fp8", "fp8_e5m2")
    reason = near.refusals["kv_cache_dtype=int4_per_token_head"]
    assert reason == "it is lossy, and this search is near-lossless"
    lossy = build_space(situation("cuda"), harm=Harm.LOSSY)
    assert "int4_per_token_head" in knob_in(lossy, "kv_cache_dtype").knob.choices
    stack = stack_from(lossy, {"kv_cache_dtype": "int4_per_token_head"}, situation("cuda"))
    assert stack.harm is Harm.LOSSY


def test_a_longer_list_of_values_is_kept_under_another_name():
    near, lossy = (
        knob_in(build_space(situation("cuda"), harm=harm), "kv_cache_dtype")
        for harm in (Harm.NEAR_LOSSLESS, Harm.LOSSY)
    )
    assert near.key == "kv_cache_dtype"
    assert lossy.key != near.key


def test_a_search_may_be_lossy_where_nothing_lossy_is_served():
    near, lossy = (
        build_space(situation("cpu"), harm=harm) for harm in (Harm.NEAR_LOSSLESS, Harm.LOSSY)
    )
    assert lossy.knobs == near.knobs


def test_layers_are_skipped_only_together_with_a_format():
    skip = {"kv_cache_dtype_skip_layers": 2}
    assert arguments_for(situation(), skip) == {}
    assert arguments_for(situation(), {**skip, "kv_cache_dtype": "fp8"}) == {
        "kv-cache-dtype": "fp8",
        "kv-cache-dtype-skip-layers": ["0", "1", "28", "29"],
    }


@pytest.mark.parametrize(
    ("bottleneck", "confidence", "is_open"),
    [
        (Bottleneck.COMPUTE, "high", False),
        (Bottleneck.IDLE, "high", False),
        (Bottleneck.WEIGHT_BANDWIDTH, "high", False),
        (Bottleneck.PREFIX_THRASH, "high", True),
        (Bottleneck.COMPUTE, "medium", True),
        (Bottleneck.KV_CAPACITY, "high", True),
        (Bottleneck.KV_BANDWIDTH, "high", True),
        (Bottleneck.ABSTAIN, "high", True),
    ],
)
def test_levers_on_keys_and_values_are_closed_where_these_surely_do_not_bind(
    bottleneck, confidence, is_open
):
    verdict = Verdict(bottleneck=bottleneck, confidence=confidence, evidence=(), summary="")
    space = build_space(situation(verdict=verdict), harm=Harm.NEAR_LOSSLESS)
    policies = {entry.policy for entry in space.knobs}
    assert ("kv_dtype" in policies) == ("kv_skip_layers" in policies) == is_open
    assert is_open or f"bound by {bottleneck.value}" in space.refusals["kv_dtype"]
    assert {"block_size", "max_num_seqs"} <= policies, "lossless levers are tried together"


class SavesMemoryOnly(KvDtype):
    def relieves(self, ctx):
        return frozenset({"capacity"})


def test_what_saves_memory_alone_does_not_help_where_reading_binds():
    verdict = Verdict(
        bottleneck=Bottleneck.KV_BANDWIDTH, confidence="high", evidence=(), summary=""
    )
    said = unhelpful(SavesMemoryOnly(), situation(verdict=verdict))
    assert said == "the workload is bound by kv-bandwidth, and it saves capacity only"


def test_only_one_of_the_two_batch_limits_is_ever_set():
    ctx = situation("cuda", max_concurrency=64)
    both = {"max_num_seqs": 16, "max_num_active_seqs": 8}
    assert arguments_for(ctx, both) == {"max-num-seqs": 16}
    assert arguments_for(ctx, {"max_num_active_seqs": 8}) == {"max-num-active-seqs": 8}


def test_a_hash_without_a_prefix_cache_is_dropped():
    values = {"enable_prefix_caching": False, "prefix_caching_hash_algo": "sha256_cbor"}
    assert arguments_for(situation(), values) == {"enable-prefix-caching": False}


def test_a_budget_below_a_wide_batch_is_raised_just_enough():
    ctx = situation(max_concurrency=400)
    values = {"max_num_seqs": 384, "max_num_batched_tokens": 256}
    assert arguments_for(ctx, values) == {"max-num-seqs": 384, "max-num-batched-tokens": 512}


def test_a_batch_above_a_fixed_budget_is_narrowed_just_enough():
    ctx = situation(max_concurrency=400, base_arguments={"max-num-batched-tokens": 200})
    assert arguments_for(ctx, {"max_num_seqs": 384}) == {"max-num-seqs": 192}


def test_a_cap_that_caps_nothing_is_dropped():
    ctx = situation(fingerprint=LONG_PROMPTS)
    values = {"long_prefill_token_threshold": 512, "max_num_batched_tokens": 512}
    assert arguments_for(ctx, values) == {"max-num-batched-tokens": 512}
    values["max_num_batched_tokens"] = 1024
    assert arguments_for(ctx, values) == {
        "max-num-batched-tokens": 1024,
        "long-prefill-token-threshold": 512,
    }


def test_values_outside_their_range_become_the_nearest_and_unknown_names_are_ignored():
    ctx = situation(max_concurrency=12)
    values = {"block_size": 40, "max_num_seqs": 5, "watermark": "much", "colour": "red"}
    assert arguments_for(ctx, values) == {"block-size": 32, "max-num-seqs": 4}


def test_what_cannot_hold_one_request_is_infeasible():
    ctx = situation(base_arguments={"kv-cache-memory-bytes": 64 * MIB, "max-model-len": 2800})
    space = build_space(ctx, harm=Harm.LOSSLESS)
    reason = infeasible_reason(PolicyStack(), ctx)
    assert reason is not None
    assert "2,688 tokens" in reason
    assert infeasible_reason(stack_from(space, {"block_size": 32}, ctx), ctx) is None
    roomy = situation(base_arguments={"kv-cache-memory-bytes": 64 * MIB, "max-model-len": 2688})
    assert infeasible_reason(PolicyStack(), roomy) is None


def test_what_the_engine_refuses_is_infeasible_and_what_is_only_useless_is_not():
    refused = situation(base_arguments={"max-num-seqs": 9, "max-num-batched-tokens": 8})
    assert "below max-num-seqs" in str(infeasible_reason(PolicyStack(), refused))
    useless = situation(base_arguments={"long-prefill-token-threshold": 4096})
    assert infeasible_reason(PolicyStack(), useless) is None


def test_a_dry_run_names_knobs_ranges_reasons_and_refusals():
    ctx = situation("cuda", base_arguments={"kv-cache-memory-bytes": 640 * MIB})
    text = dry_run_text(build_space(ctx, harm=Harm.NEAR_LOSSLESS))
    assert "kv_memory: kv-cache-memory-bytes is fixed by --engine-args" in text
    assert "block_size: 16, 32, 64, 128 tokens (default 16)" in text
    assert "max_num_batched_tokens: powers of two 1024..8192 tokens (default 8192)" in text
    assert "only when enable_prefix_caching is True" in text
    assert "chunk_threshold: the lengths of prompts are not known" in text
    shared = [line for line in text.splitlines() if "turboquant_4bit_nc" in line]
    assert len(shared) == 1
    assert "turboquant_k8v4" in shared[0]


def test_a_dry_run_of_nothing_says_so():
    space = SearchSpace((), {"block_size": "block-size is fixed by --engine-args"})
    text = dry_run_text(space)
    assert text.splitlines() == [
        "knobs: 0, at most 1 combinations",
        "not offered:",
        "  block_size: block-size is fixed by --engine-args",
    ]


base_arguments = st.fixed_dictionaries(
    {},
    optional={
        "max-model-len": st.sampled_from([100, 512, 3000, 8192]),
        "max-num-seqs": st.sampled_from([1, 4, 100, 300]),
        "max-num-batched-tokens": st.sampled_from([64, 300, 2048, 16384]),
        "enable-chunked-prefill": st.booleans(),
        "enable-prefix-caching": st.booleans(),
        "long-prefill-token-threshold": st.sampled_from([0, 256]),
        "tensor-parallel-size": st.sampled_from([1, 3]),
        "kv-cache-memory-bytes": st.sampled_from([64 * MIB, 4096 * MIB]),
    },
)
situations = st.builds(
    situation,
    st.sampled_from(["cpu", "cuda", "simulated"]),
    base_arguments=base_arguments,
    max_concurrency=st.sampled_from([None, 1, 3, 12, 500]),
    fingerprint=st.sampled_from([None, LONG_PROMPTS]),
)


def drawn(space, rng):
    """A point of a space, each knob for itself."""
    return {entry.knob.name: rng.choice(entry.knob.choices) for entry in space.knobs}


# A space takes long to build, its points do not: each of the few has several.
@settings(max_examples=120, deadline=None)
@given(situations, st.integers(0, 1 << 30))
def test_no_point_breaks_a_rule_that_the_defaults_keep_and_each_stack_is_its_own_fixed_point(
    ctx, seed
):
    space = build_space(ctx, harm=Harm.NEAR_LOSSLESS)
    rng = random.Random(seed)
    kept = set(broken_rules(PolicyStack(), ctx))
    for stack in (stack_from(space, drawn(space, rng), ctx) for _ in range(6)):
        for rule in set(broken_rules(stack, ctx)) - kept:
            # Only an argument that the user fixed may be left without effect: it cannot be moved.
            assert rule.effect == "dead"
            assert not set(rule.repairs) & set(space.defaults)
        assert not {name for name in stack.arguments if name in ctx.base_arguments}
        assert stack_from(space, point(stack), ctx) == stack


@settings(max_examples=50, deadline=None)
@given(
    situations,
    st.dictionaries(
        st.sampled_from(["block_size", "max_num_seqs", "watermark", "kv_cache_dtype", "x"]),
        st.one_of(st.none(), st.booleans(), st.integers(-5, 5000), st.text(max_size=4)),
    ),
)
def test_any_mapping_becomes_a_stack_without_an_error(ctx, values):
    space = build_space(ctx, harm=Harm.NEAR_LOSSLESS)
    stack = stack_from(space, values, ctx)
    for entry in space.knobs:
        assert entry.knob.allows(point(stack).get(entry.knob.name, entry.knob.default))
