"""What cannot be asked for together, on both sides: what ends a start, and what is never tried."""

import pytest
from contracts.policy_samples import WITH_PLUGIN, on_cpu

from kvtune.engines.vllm.plugin.refusals import Facts, refusals
from kvtune.policies.plugin_clashes import CLASHES, Beside, clashes
from kvtune.policies.plugin_config import PluginConfig
from kvtune.policies.settings import settings_of
from kvtune.policies.stack import RULES

QUEST = {"quest": {"budget_tokens": 512}}
WINDOW = {"streaming_llm": {"window_tokens": 1024}}
EVICTION = {"page_eviction": {"share": 0.5}}
INT8 = {"store": {"format": "int8"}}
KIVI = {"store": {"format": "kivi"}}
TIERS = {"tiers": {"host_bytes": 1 << 30}}

TOGETHER = [
    (KIVI | QUEST, {}, "open pages"),
    (TIERS | QUEST, {}, "summaries"),
    (TIERS | EVICTION, {}, "never tried with page_eviction"),
    (TIERS | INT8, {}, "never tried with a store"),
    (TIERS, {"kv-cache-dtype": "fp8"}, "never tried with an fp8 cache"),
    (TIERS, {"kv-cache-dtype": "fp8_e5m2"}, "never tried with an fp8 cache"),
    (EVICTION | INT8, {}, "reads keys back"),
    (EVICTION | WINDOW, {}, "both say which pages stay"),
    (INT8, {"kv-cache-dtype": "fp8"}, "a format of its own"),
    (EVICTION, {"kv-cache-dtype": "fp8_e5m2"}, "reads keys back"),
    (TIERS, {"enable-prefix-caching": False}, "it is off"),
    (TIERS, {"prefix-caching-hash-algo": "xxhash"}, "a hash of tokens"),
    (QUEST, {"kv-cache-dtype-skip-layers": ["0"]}, "pages of their own"),
]
SERVED = [
    (INT8 | QUEST, {}),
    (INT8 | WINDOW, {}),
    (KIVI | WINDOW, {}),
    (EVICTION | QUEST, {}),
    (TIERS | WINDOW, {"prefix-caching-hash-algo": "sha256_cbor"}),
    (TIERS, {"kv-cache-dtype": "bfloat16"}),
    (QUEST | WINDOW, {"kv-cache-dtype": "fp8"}),
    ({}, {"kv-cache-dtype-skip-layers": ["0"], "enable-prefix-caching": False}),
]


def found(asked, options):
    """The clashes of a server with such arguments, as a search sees it."""
    arguments = {"additional-config": {"kvtune": asked}, **options}
    return clashes(settings_of(arguments, on_cpu(engine=WITH_PLUGIN)).beside)


@pytest.mark.parametrize(("asked", "options", "why"), TOGETHER)
def test_what_does_not_go_together_is_known_before_anything_starts(asked, options, why):
    (clash,) = found(asked, options)
    assert why in clash.why
    assert clash.fix


@pytest.mark.parametrize(("asked", "options"), SERVED)
def test_what_the_plugin_serves_together_is_not_refused(asked, options):
    assert found(asked, options) == ()


@pytest.mark.parametrize(("asked", "options", "why"), TOGETHER)
def test_the_plugin_ends_a_start_for_the_same_reason(asked, options, why):
    facts = Facts(
        vllm_version="0.32.0",
        platform="cpu",
        kv_dtype=options.get("kv-cache-dtype", "auto"),
        has_prefix_cache=options.get("enable-prefix-caching", True),
        prefix_hash=options.get("prefix-caching-hash-algo", "sha256"),
        skips_kv_layers="kv-cache-dtype-skip-layers" in options,
    )
    (refusal,) = refusals(facts, PluginConfig.model_validate(asked))
    assert why in refusal.why


def test_each_is_a_rule_of_a_stack():
    reasons = [rule.reason for rule in RULES if rule.effect == "refused"]
    for clash in CLASHES:
        assert any(reason.endswith(clash.why) for reason in reasons)


def test_a_server_that_asks_for_nothing_is_not_judged():
    plain = Beside(PluginConfig(), "fp8", prefix_caching=False, hash_algo="x", skips_kv_layers=True)
    assert clashes(plain) == ()
