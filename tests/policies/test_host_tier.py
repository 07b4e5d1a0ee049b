from dataclasses import replace

import pytest
from contracts.policy_samples import GIB, MIB, WITH_PLUGIN, on_cpu, workload

from kvtune.policies.host_tier import KNOB, HostTier
from kvtune.policies.plugin_arguments import HOST_BYTES, asked_by
from kvtune.types import Bottleneck, Harm, Verdict


def on(reuse=0.6, **base):
    """24 GiB of memory, of which the pool has 4, unless `base` says more."""
    return on_cpu(
        engine=WITH_PLUGIN,
        fingerprint=workload(reuse={128: reuse}),
        base_arguments={"kv-cache-memory-bytes": 4 * GIB, **base},
    )


def sizes(ctx):
    return [value for knob in HostTier().knobs(ctx) for value in knob.choices]


def bound(bottleneck, confidence="high"):
    verdict = Verdict(bottleneck=bottleneck, confidence=confidence, evidence=(), summary="")
    return replace(on(), verdict=verdict)


def test_a_size_becomes_the_option_that_the_plugin_reads_and_harms_nothing():
    choice = HostTier().choice({KNOB: 5 * GIB}, on())
    assert choice.arguments == {HOST_BYTES: 5 * GIB}
    assert asked_by(choice.arguments).tiers.host_bytes == 5 * GIB
    assert choice.harm is Harm.LOSSLESS
    assert "5.00 GiB of host memory" in choice.because


def test_it_says_what_it_takes_so_that_the_smaller_of_two_sizes_is_the_simpler_one():
    small = on(**{"kv-cache-memory-bytes": 512 * MIB})
    off, *taken = (HostTier().choice({KNOB: size}, small).takes_bytes for size in sizes(small))
    assert (off, taken) == (0, [3008 * MIB, 6016 * MIB])


def test_sizes_are_shares_of_what_the_pool_leaves_as_far_as_they_are_more_than_it():
    # An eighth and a quarter of 20 GiB; an eighth is less than the pool.
    assert sizes(on()) == [0, 5 * GIB]
    small = on(**{"kv-cache-memory-bytes": 512 * MIB})
    # 23.5 GiB: 2.9375 and 5.875 GiB are multiples of 64 MiB.
    assert sizes(small) == [0, 3008 * MIB, 6016 * MIB]


def test_no_size_is_more_than_several_pools_as_all_of_it_is_taken_at_the_start():
    assert sizes(on(**{"kv-cache-memory-bytes": 128 * MIB})) == [0, 2048 * MIB]


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (16 * GIB, [0, 3008 * MIB, 6016 * MIB]),
        (4 * GIB, [0, 3008 * MIB, 4 * GIB]),
        (2 * GIB + 5, [0, 2 * GIB]),
        (512 * MIB + 1, []),
        (0, []),
    ],
)
def test_no_size_is_more_than_the_user_allows(most, found):
    small = on(**{"kv-cache-memory-bytes": 512 * MIB})
    assert sizes(replace(small, max_host_bytes=most)) == found


def test_a_few_bytes_of_memory_more_make_no_other_size():
    more = on()
    more = replace(more, device=more.device.model_copy(update={"memory_bytes": 24 * GIB + 4096}))
    assert sizes(more) == sizes(on())


@pytest.mark.parametrize(
    ("ctx", "why"),
    [
        (on(reuse=0.01), "1% of prompt tokens could be reused"),
        (replace(on(), fingerprint=workload()), "not known how much prompts share"),
        (on(**{"enable-prefix-caching": False}), "it is off"),
        (on(**{"additional-config.kvtune.store.format": "int8"}), "never tried with a store"),
        (on(**{"additional-config.kvtune.quest.pages": 8}), "summaries"),
        (on(**{"kv-cache-dtype": "fp8"}), "never tried with an fp8 cache"),
        (on(**{"additional-config.kvtune.tiers.host_bytes": GIB}), "tiers.host_bytes is fixed"),
        (on(**{"additional-config": {"kvtune": {"tiers": {"host_bytes": 1}}}}), "tiers are fixed"),
        (on(**{"enable-lora": True}), "enable-lora is fixed"),
        (on(**{"data-parallel-size": 2}), "data parallelism"),
        (on(**{"kv-cache-memory-bytes": 16 * GIB}), "the pool leaves no memory"),
        (replace(on(), max_host_bytes=0), "--max-host-memory 0 lets no setting take"),
        (replace(on(), max_host_bytes=4 * GIB), "lets it take 4.00 GiB, and the pool has as much"),
        (
            replace(on(**{"kv-cache-memory-bytes": 16 * GIB}), max_host_bytes=4 * GIB),
            "the pool leaves no memory",
        ),
        (bound(Bottleneck.COMPUTE), "bound by compute"),
        (bound(Bottleneck.KV_BANDWIDTH), "bound by kv-bandwidth"),
    ],
)
def test_it_is_offered_only_where_lost_prefixes_cost_something(ctx, why):
    support = HostTier().supports(ctx)
    assert not support.ok
    assert why in support.reason


@pytest.mark.parametrize(
    "ctx",
    [
        on(),
        bound(Bottleneck.KV_CAPACITY),
        bound(Bottleneck.PREFIX_THRASH),
        bound(Bottleneck.COMPUTE, confidence="low"),
        on(**{"additional-config.kvtune.streaming_llm.window_tokens": 512}),
    ],
)
def test_it_is_offered_where_prefixes_may_be_lost(ctx):
    assert HostTier().supports(ctx).ok
