"""What prompts have in common stays where policies drop tokens."""

import pytest
from contracts.policy_samples import WITH_PLUGIN, on_cpu, workload

from kvtune.policies import page_eviction, streaming_window
from kvtune.policies.page_eviction import PageEviction
from kvtune.policies.plugin_arguments import PROTECTED_TOKENS, asked_by
from kvtune.policies.settings import settings_of
from kvtune.policies.shared_prefix import protection
from kvtune.policies.stack import compose, describe
from kvtune.policies.streaming_window import StreamingWindow


def sharing(shared, prompt=5000.0, **base):
    lengths = workload(input_p95=prompt, output_p50=60.0, shared=shared)
    arguments = {"block-size": 32, **base}
    return on_cpu(engine=WITH_PLUGIN, fingerprint=lengths, base_arguments=arguments)


@pytest.mark.parametrize(
    ("shared", "most", "kept"),
    [
        (200, 512, 200),
        (512, 512, 512),
        (513, 512, None),
        # The first page stays in any case.
        (32, 512, None),
        (0, 512, None),
        (None, 512, None),
    ],
)
def test_it_is_kept_as_far_as_a_budget_has_room(shared, most, kept):
    expected = {} if kept is None else {PROTECTED_TOKENS: kept}
    assert protection(most, sharing(shared)) == expected


def test_what_the_user_protects_stays_as_it_is_and_closes_no_lever():
    ctx = sharing(200, **{PROTECTED_TOKENS: 64})
    assert StreamingWindow().supports(ctx).ok
    choice = StreamingWindow().choice({streaming_window.KNOB: 512}, ctx)
    assert PROTECTED_TOKENS not in choice.arguments
    whole = {**ctx.base_arguments, **choice.arguments}
    assert asked_by(whole).protect.prefix_tokens == 64


def test_a_window_keeps_it_and_the_arithmetic_of_pages_follows():
    ctx = sharing(300)
    choice = StreamingWindow().choice({streaming_window.KNOB: 512}, ctx)
    assert choice.arguments[PROTECTED_TOKENS] == 300
    assert "the first 300, which prompts have in common, stay in any case" in choice.because
    told = describe(compose([choice]))
    assert told == "streaming_llm.window_tokens 512, protect.prefix_tokens 300"
    now = settings_of({**ctx.base_arguments, **choice.arguments}, ctx)
    assert now.sink_window.sink_blocks == 10
    without = settings_of({**ctx.base_arguments, **{choice_argument(): 512}}, ctx)
    assert now.blocks_of(5000) - without.blocks_of(5000) == 10 - 1


def choice_argument():
    return StreamingWindow().arguments[0]


def test_a_window_that_is_shorter_than_it_protects_nothing():
    choice = StreamingWindow().choice({streaming_window.KNOB: 512}, sharing(600))
    assert PROTECTED_TOKENS not in choice.arguments


@pytest.mark.parametrize(("share", "kept"), [(0.25, False), (0.5, True)])
def test_page_eviction_keeps_it_where_it_is_at_most_half_of_what_stays(share, kept):
    # Of 4,000 tokens 1,000 or 2,000 stay.
    choice = PageEviction().choice({page_eviction.KNOB: share}, sharing(800, prompt=4000.0))
    assert (PROTECTED_TOKENS in choice.arguments) is kept


def test_off_protects_nothing():
    for lever in (StreamingWindow(), PageEviction()):
        assert lever.choice({}, sharing(200)).arguments == {}
