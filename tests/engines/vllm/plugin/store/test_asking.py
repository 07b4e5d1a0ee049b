"""What a store may be asked for, and with what else it is served."""

import pytest

from kvtune.engines.vllm.plugin.refusals import Facts, refusals
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig, StoreConfig, plugin_config

CPU = Facts(vllm_version="0.32.0", platform="cpu")
KIVI = {"format": "kivi", "bits_key": 2, "bits_value": 4}


def asked(store, **others):
    return plugin_config({"kvtune": {"store": store, **others}})


@pytest.mark.parametrize("store", [{"format": "int8"}, {"format": "turboquant"}, KIVI])
def test_a_store_is_something_to_do_and_is_served_on_a_cpu(store):
    assert asked(store).is_asked
    assert refusals(CPU, asked(store)) == []
    assert refusals(CPU, asked(store, streaming_llm={"window_tokens": 64})) == []


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ({"format": "int3"}, "format"),
        ({"format": "int8", "bits_key": 4}, "int8 says how many bits"),
        ({"format": "turboquant", "bits_value": 9}, "bits_value"),
        ({"bits_key": 4}, "format"),
    ],
)
def test_what_is_no_format_is_refused_by_name(store, told):
    with pytest.raises(BadInput, match=told):
        asked(store)


@pytest.mark.parametrize(
    ("facts", "others", "why"),
    [
        ({"platform": "cuda"}, {}, "never tried on this platform"),
        ({"kv_dtype": "fp8"}, {}, "asks for another"),
        ({}, {"quest": {"pages": 4}}, "kivi's open pages"),
    ],
)
def test_what_would_be_served_wrong_is_refused(facts, others, why):
    (refusal,) = refusals(
        Facts(**{"vllm_version": "0.32.0", "platform": "cpu"} | facts), asked(KIVI, **others)
    )
    assert why in refusal.why
    assert "store" in refusal.fix


def test_quest_reads_cells():
    assert refusals(CPU, asked({"format": "int8"}, quest={"pages": 4})) == []


def test_a_fingerprint_is_that_of_what_is_stored():
    four, same = (PluginConfig(store=StoreConfig(format="turboquant")) for _ in range(2))
    three = PluginConfig(store=StoreConfig(format="turboquant", bits_key=3))
    assert four.fingerprint == same.fingerprint
    assert len({four.fingerprint, three.fingerprint, PluginConfig().fingerprint}) == 3
