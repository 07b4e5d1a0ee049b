"""What every policy does, whatever lever it pulls."""

from dataclasses import replace

import pytest

from kvtune.errors import BadInput
from kvtune.policies.base import Policy
from kvtune.types import Choice, Harm, PolicyStack

VLLM_OPTIONS = frozenset(
    {
        "additional-config.kvtune.page_eviction.share",
        "additional-config.kvtune.protect.prefix_tokens",
        "additional-config.kvtune.quest.budget_tokens",
        "additional-config.kvtune.store.format",
        "additional-config.kvtune.streaming_llm.window_tokens",
        "additional-config.kvtune.tiers.host_bytes",
        "block-size",
        "enable-prefix-caching",
        "gpu-memory-utilization",
        "kv-cache-dtype",
        "kv-cache-dtype-skip-layers",
        "long-prefill-token-threshold",
        "max-num-active-seqs",
        "max-num-batched-tokens",
        "max-num-seqs",
        "prefix-caching-hash-algo",
        "scheduler-reserve-full-isl",
        "watermark",
    }
)
"""Option names that the parser of vLLM 0.32 was seen to accept."""

HARMS = list(Harm)
A_FIXED_VALUE = {
    "enable-prefix-caching": True,
    "kv-cache-dtype": "auto",
    "prefix-caching-hash-algo": "sha256",
    "scheduler-reserve-full-isl": True,
    "gpu-memory-utilization": 0.9,
    "watermark": 0.0,
}


def is_one_line(text):
    return bool(text.strip()) and "\n" not in text and len(text) < 400


class PolicyContract:
    """Subclass it, and give the fixtures `policy` (an instance) and `ctx` (a situation)."""

    def test_it_says_what_it_is(self, policy: Policy):
        assert is_one_line(policy.title)
        assert policy.saves
        assert policy.harm in Harm
        assert policy.arguments
        assert set(policy.arguments) <= VLLM_OPTIONS

    def test_a_refusal_has_a_reason(self, policy, ctx):
        support = policy.supports(ctx)
        assert support.ok or is_one_line(support.reason)
        for what, reason in policy.refused_values(ctx).items():
            knob, _, value = what.partition("=")
            assert knob
            assert value
            assert is_one_line(reason)

    def test_knobs_are_typed_and_their_default_is_one_of_their_values(self, policy, ctx):
        for knob in self.knobs(policy, ctx):
            assert is_one_line(knob.because)
            assert len(knob.choices) > 1
            assert knob.default in knob.choices
            assert len({type(choice) for choice in knob.choices}) == 1
            if not isinstance(knob.choices[0], str):
                assert list(knob.choices) == sorted(set(knob.choices))
            if knob.kind == "log2":
                assert all(choice & (choice - 1) == 0 for choice in knob.choices)
                assert (knob.low, knob.high) == (knob.choices[0], knob.choices[-1])
            if knob.kind == "bool":
                assert knob.choices == (False, True)

    def test_defaults_set_nothing(self, policy, ctx):
        if policy.supports(ctx).ok:
            choice = policy.choice({}, ctx)
            assert is_one_line(choice.because)
            assert choice.arguments == {}

    def test_every_other_value_sets_its_own_arguments_and_says_why(self, policy, ctx):
        for knob in self.knobs(policy, ctx):
            seen = []
            for value in knob.choices:
                choice = policy.choice({knob.name: value}, ctx)
                assert choice.policy == policy.name
                assert choice.harm is policy.harm_of({knob.name: value})
                assert HARMS.index(choice.harm) >= HARMS.index(policy.harm)
                assert choice.parameters[knob.name] == value
                assert set(choice.arguments) <= set(policy.arguments)
                assert not any(ctx.fixed(argument) for argument in choice.arguments)
                assert is_one_line(choice.because)
                assert Choice.model_validate_json(choice.model_dump_json()) == choice
                assert (choice.arguments == {}) == (value == knob.default)
                for argument in choice.arguments:
                    if argument == knob.argument:
                        assert knob.value_of(choice.arguments[argument]) == value
                seen.append(choice.arguments)
            assert all(seen.count(arguments) == 1 for arguments in seen)

    def test_an_argument_that_the_user_fixed_is_never_set(self, policy, ctx):
        for argument in policy.arguments:
            value = A_FIXED_VALUE.get(argument, 64)
            fixed = replace(ctx, base_arguments={**ctx.base_arguments, argument: value})
            for knob in self.knobs(policy, fixed):
                for choice in knob.choices:
                    assert argument not in policy.choice({knob.name: choice}, fixed).arguments

    def test_a_policy_with_nothing_left_open_is_refused(self, policy, ctx):
        fixed = {argument: A_FIXED_VALUE.get(argument, 64) for argument in policy.arguments}
        support = policy.supports(replace(ctx, base_arguments={**ctx.base_arguments, **fixed}))
        assert not support.ok
        assert "--engine-args" in support.reason

    def test_unknown_names_and_values_are_refused(self, policy, ctx):
        with pytest.raises(BadInput, match="no knob 'nonsense'"):
            policy.choice({"nonsense": 1}, ctx)
        for knob in self.knobs(policy, ctx):
            for wrong in (-7, "nonsense", None, [1]):
                with pytest.raises(BadInput, match="outside its range"):
                    policy.choice({knob.name: wrong}, ctx)

    def test_a_stack_keeps_its_harm(self, policy, ctx):
        for knob in self.knobs(policy, ctx):
            choice = policy.choice({knob.name: knob.choices[-1]}, ctx)
            harm = policy.harm_of({knob.name: knob.choices[-1]})
            assert PolicyStack(choices=(choice,)).harm is harm

    @staticmethod
    def knobs(policy, ctx):
        return policy.knobs(ctx) if policy.supports(ctx).ok else ()
