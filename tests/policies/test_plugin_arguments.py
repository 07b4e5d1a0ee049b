import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.policies.plugin_arguments import (
    NOTHING,
    QUEST_TOKENS,
    STORE_FORMAT,
    WINDOW_TOKENS,
    asked_by,
    kv_format,
    whole,
)
from kvtune.policies.plugin_config import QuestConfig, StreamingLlmConfig

keys = st.sampled_from(["a", "b", "c"])


def test_parts_of_several_policies_and_of_the_user_come_together():
    asked = asked_by(
        {
            "max-num-seqs": 8,
            QUEST_TOKENS: 512,
            WINDOW_TOKENS: 1024,
            "additional-config": {"other": 1, "kvtune": {"protect": {"prefix_tokens": 7}}},
        }
    )
    assert asked.quest == QuestConfig(budget_tokens=512)
    assert asked.streaming_llm == StreamingLlmConfig(window_tokens=1024)
    assert asked.protect.prefix_tokens == 7


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"additional-configuration.kvtune.quest.pages": 8},
        {"additional-config": {"other": {"kvtune": 1}}},
        {"additional-config": None},
        {QUEST_TOKENS: None},
    ],
)
def test_arguments_that_name_no_policy_ask_for_nothing(arguments):
    assert asked_by(arguments) == NOTHING
    assert not asked_by(arguments).is_asked


def test_what_the_plugin_does_not_have_is_refused_by_its_name():
    with pytest.raises(BadInput, match=r"kvtune\.quest\.budget: Extra inputs"):
        asked_by({QUEST_TOKENS: 512, "additional-config.kvtune.quest.budget": 1})


def test_a_part_wins_over_the_whole_and_leaves_it_as_it_was():
    given = {"x": {"a": {"b": 1, "c": 2}}, "x.a.b": 3}
    assert whole("x", given) == {"a": {"b": 3, "c": 2}}
    assert given["x"] == {"a": {"b": 1, "c": 2}}


def test_an_option_without_parts_is_what_was_given():
    assert whole("x", {"x": [1]}) == [1]
    assert whole("x", {"xy.a": 1}) is None


@given(
    st.recursive(
        st.integers(),
        lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3),
        max_leaves=8,
    ).filter(lambda value: isinstance(value, dict)),
    st.randoms(),
)
def test_a_mapping_taken_apart_in_any_order_is_put_together_again(tree, random):
    def leaves(node, path):
        if not isinstance(node, dict):
            return [(".".join(["x", *path]), node)]
        return [leaf for key, inner in node.items() for leaf in leaves(inner, [*path, key])]

    parts = leaves(tree, [])
    random.shuffle(parts)
    assert whole("x", dict(parts)) == tree


@pytest.mark.parametrize(
    ("arguments", "held"),
    [
        ({}, "auto"),
        ({"kv-cache-dtype": "fp8"}, "fp8"),
        ({STORE_FORMAT: "kivi"}, "store kivi"),
        ({QUEST_TOKENS: 512}, "auto"),
        (
            {"additional-config": {"kvtune": {"store": {"format": "turboquant", "bits_key": 3}}}},
            "store turboquant 3/4",
        ),
    ],
)
def test_formats_are_told_apart_whoever_serves_them(arguments, held):
    assert kv_format(arguments) == held
