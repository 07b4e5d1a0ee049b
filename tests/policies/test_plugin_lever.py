"""What levers of kvtune's plugin have in common, on one that is made up."""

from dataclasses import replace

import pytest
from contracts.policy_samples import WITH_PLUGIN, on_cpu, workload

from kvtune.policies.page_eviction import PageEviction
from kvtune.policies.page_selection import PageSelection
from kvtune.policies.plugin_arguments import STORE_FORMAT
from kvtune.policies.plugin_lever import PluginLever
from kvtune.policies.streaming_window import StreamingWindow
from kvtune.types import Harm


class Bits(PluginLever):
    """A store of a few formats, if there is anything to store."""

    title = "bits"
    harm = Harm.LOSSY
    saves = "capacity"
    arguments = (STORE_FORMAT,)
    part = "store"
    called = "a store is"
    knob_name = "bits"
    unit = ""
    off = "none"

    def __init__(self, *formats):
        self.formats = formats
        self.name = "bits"

    def wanted(self, ctx):
        return self.formats

    def unneeded(self, ctx):
        return "" if self.formats else "there is nothing to store"

    def because(self, ctx):
        return "bits are scarce"

    def says(self, value):
        return f"bits: {value}"


def on(**base):
    return on_cpu(engine=WITH_PLUGIN, base_arguments=base)


QUEST = {"additional-config.kvtune.quest.pages": 8}


def test_its_values_follow_the_one_that_sets_nothing():
    (knob,) = Bits("int8", "kivi").knobs(on())
    assert knob.choices == ("none", "int8", "kivi")
    assert (knob.default, knob.argument) == ("none", STORE_FORMAT)


def test_values_that_do_not_go_with_what_the_user_fixed_are_named():
    lever = Bits("int8", "kivi")
    assert list(lever.refused_values(on(**QUEST))) == ["bits=kivi"]
    (knob,) = lever.knobs(on(**QUEST))
    assert knob.choices == ("none", "int8")
    assert lever.supports(on(**QUEST)).ok


def test_a_lever_of_which_nothing_is_left_says_why():
    support = Bits("kivi").supports(on(**QUEST))
    assert not support.ok
    assert support.reason.startswith("beside what --engine-args fix, quest splits pages")
    assert Bits("kivi").knobs(on(**QUEST)) == ()


@pytest.mark.parametrize(
    ("ctx", "why"),
    [
        (on(), "there is nothing to store"),
        (on_cpu(), "not known whether kvtune's plugin is installed"),
        (
            on(**{"additional-config": {"kvtune": {"store": {"format": "int8"}}}}),
            "a store is fixed",
        ),
        (on(**{STORE_FORMAT: "int8"}), f"{STORE_FORMAT} is fixed"),
    ],
)
def test_it_is_not_offered_where_it_cannot_be_asked_for_or_is_not_needed(ctx, why):
    assert why in Bits().supports(ctx).reason


@pytest.mark.parametrize(
    ("lever", "is_offered"),
    [(PageSelection, False), (PageEviction, False), (StreamingWindow, True)],
)
def test_a_limit_on_scores_closes_what_scores_of_prompts_do_not_show(lever, is_offered):
    lengths = workload(input_p95=5000.0, output_p50=60.0)
    ctx = on_cpu(engine=WITH_PLUGIN, fingerprint=lengths)
    assert lever().supports(ctx).ok
    limited = lever().supports(replace(ctx, scores_limit="fidelity.kl <= 0.02nats"))
    assert limited.ok is is_offered
    if not is_offered:
        assert limited.reason.startswith("'fidelity.kl <= 0.02nats' cannot be proved of it")
