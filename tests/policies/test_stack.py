import pytest
from contracts.policy_samples import MIB, on_cpu

from kvtune.errors import BadInput
from kvtune.policies.plugin_arguments import HOST_BYTES, QUEST_TOKENS, WINDOW_TOKENS
from kvtune.policies.stack import ORDER, broken_rules, compose, describe
from kvtune.types import Choice, Harm, PolicyStack


def choice(policy, arguments, harm=Harm.LOSSLESS):
    return Choice(policy=policy, parameters={}, arguments=arguments, harm=harm, because="x")


def broken(arguments, **facts):
    ctx = on_cpu(base_arguments=arguments, **facts)
    return [rule.reason for rule in broken_rules(PolicyStack(), ctx)]


def test_choices_come_in_one_order_and_unknown_policies_follow_by_name():
    given = [choice(name, {name: 1}) for name in ("zeta", "watermark", "alpha", "kv_memory")]
    names = [item.policy for item in compose(given).choices]
    assert names == ["kv_memory", "watermark", "alpha", "zeta"]
    assert compose(reversed(given)) == compose(given)


def test_a_choice_that_sets_nothing_is_left_out():
    assert compose([choice("block_size", {})]) == PolicyStack()


def test_two_choices_may_not_set_one_argument_differently():
    one, other = choice("block_size", {"block-size": 32}), choice("mine", {"block-size": 64})
    with pytest.raises(BadInput, match="block_size and mine both set block-size, to 32 and 64"):
        compose([other, one])
    same = choice("mine", {"block-size": 32})
    assert len(compose([one, same]).choices) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max-num-seqs": 256, "max-num-batched-tokens": 128}, "max-num-batched-tokens below"),
        ({"max-num-seqs": 4, "max-num-active-seqs": 5}, "max-num-active-seqs above"),
        (
            {
                "enable-chunked-prefill": False,
                "max-model-len": 4096,
                "max-num-batched-tokens": 2048,
            },
            "without chunked prefill",
        ),
        ({"long-prefill-token-threshold": 1025, "max-model-len": 1024}, "above max-model-len"),
        (
            {"long-prefill-token-threshold": 512, "max-num-batched-tokens": 512},
            "caps nothing",
        ),
        (
            {"enable-prefix-caching": False, "prefix-caching-hash-algo": "sha256_cbor"},
            "does nothing while prefix caching is off",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_named(arguments, words):
    (reason,) = broken(arguments)
    assert words in reason


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max-num-seqs": 128, "max-num-batched-tokens": 128},
        {"max-num-seqs": 4, "max-num-active-seqs": 4},
        {"max-num-batched-tokens": 64},
        {"enable-chunked-prefill": False, "max-model-len": 4096},
        {"long-prefill-token-threshold": 511, "max-num-batched-tokens": 512},
        {"long-prefill-token-threshold": 1024, "max-model-len": 1024},
        {"enable-prefix-caching": False},
    ],
)
def test_settings_at_the_edge_of_a_rule_are_fine(arguments):
    assert broken(arguments) == []


def test_a_stack_is_judged_on_top_of_the_users_arguments():
    stack = compose([choice("max_num_batched_tokens", {"max-num-batched-tokens": 256})])
    assert not broken_rules(stack, on_cpu())
    assert broken_rules(stack, on_cpu(base_arguments={"max-num-seqs": 300}))


def test_a_stack_is_described_in_one_line():
    stack = compose(
        [
            choice("max_num_seqs", {"max-num-seqs": 6}),
            choice("block_size", {"block-size": 32}),
            choice("prefix_caching", {"enable-prefix-caching": False}),
            choice("kv_memory", {"kv-cache-memory-bytes": 64 * MIB}),
            choice("kv_dtype", {"kv-cache-dtype": "fp8"}, Harm.NEAR_LOSSLESS),
        ]
    )
    assert describe(stack) == (
        "kv-cache-memory-bytes 64 MiB, kv-cache-dtype fp8, block-size 32, "
        "enable-prefix-caching off, max-num-seqs 6"
    )
    odd = compose([choice("kv_memory", {"kv-cache-memory-bytes": 1000})])
    assert describe(odd) == "kv-cache-memory-bytes 1000"
    listed = compose([choice("kv_skip_layers", {"kv-cache-dtype-skip-layers": ["0", "29"]})])
    assert describe(listed) == "kv-cache-dtype-skip-layers 0 29"
    assert describe(PolicyStack()) == "stock defaults"


def test_memory_comes_first_in_the_order():
    assert ORDER[0] == "kv_memory"


def test_the_plugin_goes_with_no_layers_in_formats_of_their_own():
    both = {"kv-cache-dtype-skip-layers": ["0"], QUEST_TOKENS: 512}
    assert any("formats of their own" in reason for reason in broken(both))
    assert not broken({QUEST_TOKENS: 512})
    assert not broken({"kv-cache-dtype-skip-layers": ["0"]})


@pytest.mark.parametrize(
    ("budget", "is_dead"),
    # Of 128 tokens: a page with the sinks, eight of the window, and the one that is written.
    [(1152, False), (1153, True), (2048, True)],
)
def test_quest_has_nothing_to_choose_from_within_what_a_window_keeps(budget, is_dead):
    reasons = broken({QUEST_TOKENS: budget, WINDOW_TOKENS: 1024})
    assert any("Quest reads everything" in reason for reason in reasons) is is_dead


def test_settings_of_the_plugin_are_told_by_their_short_names():
    stack = compose([choice("page_selection", {QUEST_TOKENS: 512}, Harm.LOSSY)])
    assert describe(stack) == "quest.budget_tokens 512"
    tier = compose([choice("host_tier", {HOST_BYTES: 96 * MIB})])
    assert describe(tier) == "tiers.host_bytes 96 MiB"


@pytest.mark.parametrize(
    ("asked", "dtype", "is_refused"),
    [
        ({"store": {"format": "int8"}}, "fp8", True),
        ({"store": {"format": "int8"}}, "auto", False),
        ({"page_eviction": {"share": 0.5}}, "fp8_e5m2", True),
        ({"page_eviction": {"share": 0.5}}, "auto", False),
        ({"quest": {"pages": 8}}, "fp8", False),
    ],
)
def test_formats_that_the_plugin_refuses_beside_what_the_user_asks_of_it(asked, dtype, is_refused):
    reasons = broken({"additional-config": {"kvtune": asked}, "kv-cache-dtype": dtype})
    assert any("kvtune's plugin refuses this: " in reason for reason in reasons) is is_refused


def test_tiers_keep_what_a_prefix_cache_publishes():
    tiers = {"additional-config.kvtune.tiers.host_bytes": 1 << 30}
    assert not broken(tiers)
    (reason,) = broken({**tiers, "enable-prefix-caching": False})
    assert "what the prefix cache publishes, and it is off" in reason
