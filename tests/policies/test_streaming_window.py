import pytest
from contracts.policy_samples import WITH_PLUGIN, on_cpu, workload

from kvtune.engines.vllm.arguments import to_argv
from kvtune.policies.page_selection import PageSelection
from kvtune.policies.plugin_arguments import asked_by
from kvtune.policies.stack import compose, describe
from kvtune.policies.streaming_window import KNOB, StreamingWindow
from kvtune.types import Harm


def on(**base):
    lengths = workload(input_p95=5000.0, output_p50=60.0)
    return on_cpu(engine=WITH_PLUGIN, fingerprint=lengths, base_arguments=base)


def test_a_window_becomes_the_option_that_the_plugin_reads():
    choice = StreamingWindow().choice({KNOB: 2048}, on())
    assert to_argv(choice.arguments) == [
        "--additional-config.kvtune.streaming_llm.window_tokens",
        "2048",
    ]
    asked = asked_by(choice.arguments).streaming_llm
    assert (asked.window_tokens, asked.sink_tokens) == (2048, 4)
    assert choice.harm is Harm.LOSSY


def test_what_is_gone_is_not_read_either():
    assert StreamingWindow().relieves(on()) == {"capacity", "bandwidth"}


@pytest.mark.parametrize(
    "base",
    [
        {"additional-config": {"kvtune": {"streaming_llm": {"window_tokens": 8}}}},
        {"additional-config.kvtune.streaming_llm.window_tokens": 8},
    ],
)
def test_a_window_of_the_user_in_any_form_is_left_alone(base):
    assert "fixed by --engine-args" in StreamingWindow().supports(on(**base)).reason


def test_both_policies_of_the_plugin_go_into_one_stack():
    ctx = on()
    stack = compose(
        [
            StreamingWindow().choice({KNOB: 2048}, ctx),
            PageSelection().choice({"quest_budget_tokens": 512}, ctx),
        ]
    )
    asked = asked_by(stack.arguments)
    assert asked.quest.budget_tokens == 512
    assert asked.streaming_llm.window_tokens == 2048
    assert describe(stack) == "quest.budget_tokens 512, streaming_llm.window_tokens 2048"


def test_one_policy_alone_says_which_pages_stay():
    ctx = on(**{"additional-config.kvtune.page_eviction.share": 0.5})
    assert "both say which pages stay" in StreamingWindow().supports(ctx).reason
