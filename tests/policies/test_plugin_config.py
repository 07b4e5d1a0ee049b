"""What the plugin can be asked to do, and tells that it was asked."""

import pytest

from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig, TiersConfig, plugin_config

TIERS = TiersConfig(host_bytes=1000)


@pytest.mark.parametrize(
    "half", [{"disk_bytes": 1}, {"disk_path": "/pages"}], ids=["no folder", "no size"]
)
def test_a_disk_tier_has_a_folder_and_a_size(half):
    with pytest.raises(BadInput, match="give disk_bytes and disk_path, or neither"):
        plugin_config({"kvtune": {"tiers": {"host_bytes": 1000, **half}}})


def test_tiers_alone_are_something_to_do_and_leave_the_models_layers_as_they_are():
    asked = PluginConfig(tiers=TIERS)
    assert asked.is_asked
    assert not asked.changes_attention


def test_where_pages_are_kept_does_not_change_what_they_are():
    assert PluginConfig(tiers=TIERS).fingerprint == PluginConfig().fingerprint


@pytest.mark.parametrize(
    "asked",
    [
        {"store": {"format": "int8"}},
        {"store": {"format": "int4"}},
        {"store": {"format": "kivi", "bits_key": 2}},
        {"page_eviction": {"share": 0.5}},
        {"page_eviction": {"budget_tokens": 512, "method": "h2o", "scored_tokens": 64}},
        {"quest": {"pages": 4}, "streaming_llm": {"window_tokens": 64}},
        {"tiers": {"host_bytes": 1000}, "protect": {"prefix_tokens": 9}},
    ],
)
def test_what_a_server_tells_that_it_was_asked_can_be_asked_again(asked):
    config = plugin_config({"kvtune": asked})
    told = config.model_dump(mode="json", exclude_none=True)
    assert plugin_config({"kvtune": told}) == config
    for part, fields in asked.items():
        assert told[part] | fields == told[part]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"quest": {"pages": 8}}, 0),
        ({"quest": {"budget_tokens": 512}}, 512),
        ({"streaming_llm": {"window_tokens": 256}}, 256),
        ({"streaming_llm": {"window_tokens": 1024}, "quest": {"budget_tokens": 512}}, 512),
        ({"page_eviction": {"share": 0.5}}, 0),
        ({"page_eviction": {"budget_tokens": 300}}, 300),
        ({"store": {"format": "int4"}}, None),
        ({"tiers": {"host_bytes": 8}}, None),
        ({}, None),
    ],
)
def test_how_long_a_request_may_be_and_still_be_read_whole_is_known(parts, expected):
    assert PluginConfig.model_validate(parts).whole_context_tokens == expected
