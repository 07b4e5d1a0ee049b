"""What scores of given texts cannot show is known, and said."""

import pytest

from kvtune.policies.plugin_config import PluginConfig
from kvtune.policies.unscored import unprovable, why_unscored

QUEST = {"quest": {"budget_tokens": 256}}
EVICTION = {"page_eviction": {"share": 0.5}}


def why(ours, theirs=None):
    return why_unscored(*(PluginConfig.model_validate(one or {}) for one in (ours, theirs)))


@pytest.mark.parametrize(
    ("asked", "names"),
    [(QUEST, "Quest acts"), (EVICTION, "page eviction acts"), (QUEST | EVICTION, "Quest and page")],
)
def test_who_leaves_prompts_as_they_are_is_named(asked, names):
    assert why(asked).startswith(names)
    assert "given texts are scored as prompts" in why(asked)


@pytest.mark.parametrize(
    "asked",
    [{}, {"streaming_llm": {"window_tokens": 256}}, {"store": {"format": "int8"}}],
    ids=["stock", "window", "store"],
)
def test_what_prompts_are_computed_with_shows_in_their_scores(asked):
    assert why(asked) == ""


def test_what_both_sides_do_alike_is_no_difference_between_them():
    assert why(QUEST | {"store": {"format": "int8"}}, QUEST) == ""
    assert why({"quest": {"budget_tokens": 512}}, QUEST).startswith("Quest acts")
    assert why({}, QUEST).startswith("Quest acts")


def test_a_refusal_names_the_limit_and_what_to_limit_instead():
    said = unprovable("fidelity.kl <= 0.02nats", why(QUEST))
    assert said.startswith("'fidelity.kl <= 0.02nats' cannot be proved of it: Quest acts")
    assert "'needle >= -5pt'" in said
