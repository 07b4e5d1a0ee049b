import pytest
from contracts.policy_samples import WITH_PLUGIN, engine, on_cpu, on_gpu

from kvtune.policies.plugin_arguments import STORE_FORMAT, asked_by
from kvtune.policies.store_format import KNOB, StoreFormat
from kvtune.types import Harm


def on(**base):
    return on_cpu(engine=WITH_PLUGIN, base_arguments=base)


def choices(ctx):
    (knob,) = StoreFormat().knobs(ctx)
    assert knob.default == "none"
    return knob.choices


@pytest.mark.parametrize("name", ["int8", "int4", "turboquant", "kivi"])
def test_a_format_becomes_the_option_that_the_plugin_reads(name):
    choice = StoreFormat().choice({KNOB: name}, on())
    assert choice.arguments == {STORE_FORMAT: name}
    assert asked_by(choice.arguments).store.format == name
    assert "reads back to full precision" in choice.because


def test_eight_bits_are_milder_than_four():
    harms = {name: StoreFormat().harm_of({KNOB: name}) for name in choices(on())}
    assert harms == {
        "none": Harm.NEAR_LOSSLESS,
        "int8": Harm.NEAR_LOSSLESS,
        "int4": Harm.LOSSY,
        "turboquant": Harm.LOSSY,
        "kivi": Harm.LOSSY,
    }


def test_it_is_for_capacity_alone_as_reading_back_takes_time():
    assert StoreFormat().relieves(on()) == {"capacity"}


def test_it_says_what_a_token_takes():
    (knob,) = StoreFormat().knobs(on())
    # 64 channels: see test_store_bytes.
    assert "int8 136, int4 72, turboquant 68, kivi 80 bytes a token and head" in knob.because


@pytest.mark.parametrize(
    ("base", "why"),
    [
        ({"kv-cache-dtype": "fp8"}, "a format of its own"),
        ({"additional-config.kvtune.page_eviction.share": 0.5}, "reads keys back"),
        ({"additional-config.kvtune.tiers.host_bytes": 1 << 30}, "never tried with a store"),
        ({"additional-config": {"kvtune": {"store": {"format": "int8"}}}}, "store is fixed by"),
    ],
)
def test_what_the_user_fixed_may_rule_all_of_it_out(base, why):
    support = StoreFormat().supports(on(**base))
    assert not support.ok
    assert why in support.reason


def test_quest_of_the_user_rules_out_one_format_with_the_reason():
    ctx = on(**{"additional-config.kvtune.quest.budget_tokens": 512})
    assert StoreFormat().supports(ctx).ok
    assert choices(ctx) == ("none", "int8", "int4", "turboquant")
    (what, why), *others = StoreFormat().refused_values(ctx).items()
    assert (what, others) == ("store_format=kivi", [])
    assert "open pages" in why


def test_it_is_served_on_a_cpu_with_the_plugin():
    assert "not known whether" in StoreFormat().supports(on_cpu()).reason
    beside_a_gpu = on_gpu(engine=engine("cuda", plugin=WITH_PLUGIN.plugin))
    assert "on CPUs only" in StoreFormat().supports(beside_a_gpu).reason
