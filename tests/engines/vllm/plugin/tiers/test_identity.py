"""Servers that differ in what their pages hold never meet."""

import importlib
import warnings
from types import SimpleNamespace

import pytest

from kvtune.policies.plugin_config import PluginConfig, StreamingLlmConfig, TiersConfig

# Importing vLLM takes longer than all else here.
pytestmark = pytest.mark.integration
ASKED = PluginConfig(tiers=TiersConfig(host_bytes=1000))


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """vLLM's own imports warn, and a warning is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.attention.backends.cpu_attn")


@pytest.fixture(autouse=True)
def avx512(monkeypatch):
    """Caches in FP8 ask for it."""
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: True)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def told(model, *, asked=ASKED, **changed):
    import torch

    from kvtune.engines.vllm.plugin.tiers.identity import identity

    given = {
        "hash": "of the settings",
        "format": "safetensors",
        "algo": "sha256",
        "kv_dtype": "auto",
        "layers": ("a", "b"),
        "page_bytes": 1024,
        "tokens": 32,
        "layout": "LBHNC",
    } | changed
    spec = SimpleNamespace(
        page_size_bytes=given["page_bytes"],
        block_size=given["tokens"],
        dtype=torch.uint8 if given["kv_dtype"] == "fp8" else torch.bfloat16,
        head_size=64,
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model), dtype=torch.bfloat16, compute_hash=lambda: given["hash"]
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=given["algo"], cache_dtype=given["kv_dtype"]
        ),
        load_config=SimpleNamespace(load_format=given["format"]),
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=given["layers"])
    caches = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout=given["layout"])
    return identity(config, caches, asked)


def test_a_server_that_starts_again_is_the_same_with_more_room_too(model):
    more = PluginConfig(tiers=TiersConfig(host_bytes=9999))
    assert told(model) == told(model, asked=more)


@pytest.mark.parametrize(
    "changed",
    [
        {"hash": "of other settings"},
        {"format": "bitsandbytes"},
        {"algo": "sha256_cbor"},
        {"kv_dtype": "fp8"},
        {"layers": ("a", "c")},
        {"page_bytes": 512},
        {"tokens": 64},
        {"layout": "LBNHC"},
        {"asked": PluginConfig(streaming_llm=StreamingLlmConfig(window_tokens=64))},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_changes_content_or_format_makes_it_another(model, changed):
    assert told(model, **changed) != told(model)


def test_other_weights_under_the_same_path_make_it_another(model):
    before = told(model)
    (model / "model.safetensors").write_bytes(b"retrain")
    assert told(model) != before


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_cpu_with_other_instructions_lays_pages_out_otherwise(model, monkeypatch, kv_dtype):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    before = told(model, kv_dtype=kv_dtype)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    assert told(model, kv_dtype=kv_dtype) != before
