import pytest
from contracts.policy_samples import on_cpu, workload

from kvtune.policies.prefix_caching import PrefixCaching
from kvtune.types import EffectiveConfig


def names(ctx):
    return [knob.name for knob in PrefixCaching().knobs(ctx)]


@pytest.mark.parametrize(
    ("reuse", "offered"),
    [
        (None, True),
        ({128: 0.0}, True),
        ({128: 0.04}, True),
        ({128: 0.06}, False),
        ({64: 0.5, 128: 0.01}, True),
        ({32: 0.5}, False),
    ],
)
def test_turning_it_off_is_offered_unless_prompts_share_prefixes(reuse, offered):
    found = names(on_cpu(fingerprint=workload(reuse=reuse)))
    assert ("enable_prefix_caching" in found) == offered
    assert "prefix_caching_hash_algo" in found


def test_off_drops_the_hash():
    values = {"enable_prefix_caching": False, "prefix_caching_hash_algo": "sha256_cbor"}
    choice = PrefixCaching().choice(values, on_cpu())
    assert choice.arguments == {"enable-prefix-caching": False}


def test_what_the_user_fixed_leaves_the_other_open():
    ctx = on_cpu(base_arguments={"enable-prefix-caching": True})
    assert names(ctx) == ["prefix_caching_hash_algo"]
    ctx = on_cpu(base_arguments={"prefix-caching-hash-algo": "sha256"})
    assert names(ctx) == ["enable_prefix_caching"]
    assert PrefixCaching().refused_values(ctx) == {}


def test_a_cache_that_is_off_for_good_is_refused_naming_who_did_it():
    by_user = on_cpu(base_arguments={"enable-prefix-caching": False})
    assert "--engine-args" in PrefixCaching().supports(by_user).reason
    by_engine = on_cpu(baseline=EffectiveConfig(enable_prefix_caching=False))
    assert "the engine for this model" in PrefixCaching().supports(by_engine).reason


def test_hashes_that_need_another_package_are_refused_with_the_reason():
    refused = PrefixCaching().refused_values(on_cpu())
    assert set(refused) == {
        "prefix_caching_hash_algo=xxhash",
        "prefix_caching_hash_algo=xxhash_cbor",
    }
    assert all("xxhash" in reason for reason in refused.values())
