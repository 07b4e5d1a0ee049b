import pytest
from contracts.policy_samples import WITH_PLUGIN, on_cpu, workload

from kvtune.engines.vllm.arguments import to_argv
from kvtune.policies.page_selection import KNOB, PageSelection
from kvtune.policies.plugin_arguments import asked_by
from kvtune.types import Harm


def on(**base):
    lengths = workload(input_p95=5000.0, output_p50=60.0)
    return on_cpu(engine=WITH_PLUGIN, fingerprint=lengths, base_arguments=base)


def test_a_budget_becomes_the_option_that_the_plugin_reads():
    choice = PageSelection().choice({KNOB: 1024}, on())
    assert to_argv(choice.arguments) == [
        "--additional-config.kvtune.quest.budget_tokens",
        "1024",
    ]
    asked = asked_by(choice.arguments)
    assert (asked.quest.budget_tokens, asked.quest.dense_layers) == (1024, 2)
    assert asked.streaming_llm is None
    assert choice.harm is Harm.LOSSY


def test_it_is_for_bandwidth_alone():
    assert PageSelection().relieves(on()) == {"bandwidth"}


@pytest.mark.parametrize(
    "base",
    [
        {"additional-config": {"kvtune": {"quest": {"pages": 8}}}},
        {"additional-config.kvtune.quest.share": 0.5},
    ],
)
def test_quest_of_the_user_in_any_form_is_left_alone(base):
    assert PageSelection().supports(on(**base)).reason == "Quest is fixed by --engine-args"


def test_it_goes_beside_what_the_user_asks_of_others():
    ctx = on(**{"additional-config": {"other": 1, "kvtune": {"protect": {"prefix_tokens": 4}}}})
    assert PageSelection().supports(ctx).ok


def test_short_contexts_are_read_whole_anyway():
    ctx = on_cpu(engine=WITH_PLUGIN, fingerprint=workload(input_p95=100.0, output_p50=20.0))
    assert "too short" in PageSelection().supports(ctx).reason
    assert PageSelection().knobs(ctx) == ()


def test_pages_that_tiers_bring_back_have_no_summaries():
    ctx = on(**{"additional-config.kvtune.tiers.host_bytes": 1 << 30})
    assert "have no summaries" in PageSelection().supports(ctx).reason


@pytest.mark.parametrize(("format_", "is_offered"), [("kivi", False), ("int8", True)])
def test_it_goes_with_stores_whose_tokens_can_be_told_apart(format_, is_offered):
    ctx = on(**{"additional-config": {"kvtune": {"store": {"format": format_}}}})
    assert PageSelection().supports(ctx).ok is is_offered
