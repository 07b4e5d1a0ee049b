import pytest
from contracts.policy_samples import WITH_PLUGIN, on_cpu, workload

from kvtune.engines.vllm.arguments import to_argv
from kvtune.policies.page_eviction import KNOB, PageEviction
from kvtune.policies.plugin_arguments import EVICTION_SHARE, asked_by
from kvtune.types import Harm


def on(prompt=5000.0, **base):
    lengths = workload(input_p95=prompt, output_p50=60.0)
    return on_cpu(engine=WITH_PLUGIN, fingerprint=lengths, base_arguments=base)


def shares(ctx):
    return [value for knob in PageEviction().knobs(ctx) for value in knob.choices]


def test_a_share_becomes_the_option_that_the_plugin_reads():
    choice = PageEviction().choice({KNOB: 0.25}, on())
    assert to_argv(choice.arguments) == ["--additional-config.kvtune.page_eviction.share", "0.25"]
    asked = asked_by(choice.arguments).page_eviction
    assert (asked.share, asked.method) == (0.25, "chunkkv")
    assert choice.harm is Harm.LOSSY
    assert "25% of a prompt's pages stay" in choice.because


def test_all_of_a_prompt_is_the_default():
    assert shares(on()) == [0.25, 0.5, 1.0]
    assert PageEviction().choice({KNOB: 1.0}, on()).arguments == {}


@pytest.mark.parametrize(
    ("prompt", "block", "offered"),
    [
        # 4 pages: the sinks' and the last one stay in any case, and are a half.
        (500.0, 128, [0.5, 1.0]),
        # 16 pages: a quarter are 128 tokens, less than what a search leaves.
        (500.0, 32, [0.5, 1.0]),
        (1024.0, 32, [0.25, 0.5, 1.0]),
        # 3 pages: two are a half, rounded up, and also those that stay in any case.
        (300.0, 128, [0.5, 1.0]),
        # 2 pages, which both stay.
        (200.0, 128, []),
    ],
)
def test_shares_leave_enough_and_differ_in_what_stays(prompt, block, offered):
    ctx = on(prompt, **{"block-size": block})
    assert shares(ctx) == offered
    assert PageEviction().supports(ctx).ok is bool(offered)


def test_short_prompts_are_a_reason_not_to_try():
    reason = PageEviction().supports(on(100.0)).reason
    assert reason == "prompts of 100 tokens are too short to do without pages of 128"


def test_what_is_gone_is_not_read_either():
    assert PageEviction().relieves(on()) == {"capacity", "bandwidth"}


@pytest.mark.parametrize(
    ("base", "why"),
    [
        ({"kv-cache-dtype": "fp8"}, "reads keys back"),
        ({"additional-config.kvtune.store.format": "int8"}, "reads keys back"),
        ({"additional-config.kvtune.streaming_llm.window_tokens": 512}, "both say which"),
        ({"additional-config.kvtune.tiers.host_bytes": 1 << 30}, "never tried with"),
        (
            {"additional-config": {"kvtune": {"page_eviction": {"budget_tokens": 512}}}},
            "page eviction is fixed by --engine-args",
        ),
    ],
)
def test_it_does_not_go_beside_what_the_user_fixed(base, why):
    support = PageEviction().supports(on(**base))
    assert not support.ok
    assert why in support.reason


def test_the_setting_is_named_as_in_the_plugins_own_page():
    assert EVICTION_SHARE == "additional-config.kvtune.page_eviction.share"
