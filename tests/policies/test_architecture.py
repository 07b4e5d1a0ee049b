"""What the architecture methods share: alternatives by accounting, owners of shared caches."""

import subprocess
import sys

import pytest
from contracts.model_samples import (
    DEEPSEEK_V4,
    FALCON_7B,
    GEMMA_3N,
    GLM_5,
    GPT2,
    LLAMA_4,
    LLAMA_8B,
    NEMOTRON,
    QWEN3_NEXT,
    YOCO_3B,
    ZAMBA2,
)

from kvtune.errors import BadInput
from kvtune.policies.architecture import alternatives, cache_owners, kv_heads, replicated
from kvtune.policies.method import ArchitectureMethod, methods
from kvtune.policies.model_cache import read_model_cache

MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "conv_kernel": 4,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "state_size": 16,
}
ARCHITECTURES = {
    name: cls() for name, cls in methods().items() if issubclass(cls, ArchitectureMethod)
}


def by_name(config, head_dim):
    return {other.method: other.cache for other in alternatives(read_model_cache(config), head_dim)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA_8B, {"gqa"}),
        (LLAMA_4, {"gqa"}),
        ({**LLAMA_8B, "num_key_value_heads": 32}, set()),
        ({**LLAMA_8B, "num_key_value_heads": 1}, {"mqa"}),
        ({**LLAMA_8B, "num_key_value_heads": 1, "num_attention_heads": 1}, set()),
        (GPT2, set()),
        (FALCON_7B, {"mqa"}),
        (GLM_5, {"mla"}),
        # One vector is key and value, and most layers keep one for 4 or 128 tokens.
        (DEEPSEEK_V4, set()),
        (GEMMA_3N, {"gqa", "yoco"}),
        (YOCO_3B, {"gqa", "yoco"}),
        # Hybrids count by the layers that attend.
        (QWEN3_NEXT, {"gqa"}),
        (NEMOTRON, {"gqa"}),
        (ZAMBA2, set()),
        (MAMBA, set()),
    ],
)
def test_architectures_are_found_by_what_layers_keep(config, expected):
    found = {name for name, method in ARCHITECTURES.items() if method.detect(config)}
    assert found == expected
    for name, method in ARCHITECTURES.items():
        lines = method.advise(config)
        if name in expected:
            method.require(config)
            assert method.bytes_per_token(config) == read_model_cache(config).bytes_per_token()
        else:
            assert lines[0].startswith(f"this model has no {method.title}")
            for refused in (method.require, method.bytes_per_token):
                with pytest.raises(BadInput, match=f"has no {method.title}") as refusal:
                    refused(config)
                assert method.retrofit in refusal.value.message
                assert "trained with" in refusal.value.fix


def test_an_unknown_cache_is_refused_not_guessed():
    for method in ARCHITECTURES.values():
        for ask in (method.detect, method.advise, method.require):
            with pytest.raises(BadInput, match="it is not among"):
                ask({"architectures": ["Other"]})


# 2 x 32 layers x heads x 128 x 2 bytes; MLA: 32 x (512 + 64) x 2.
@pytest.mark.parametrize(
    ("method", "expected_bytes"), [("mha", 524_288), ("mqa", 16_384), ("mla", 36_864)]
)
def test_alternatives_cost_what_their_formulas_say(method, expected_bytes):
    other = by_name(LLAMA_8B, 128)[method]
    assert other.bytes_per_token() == expected_bytes
    assert other.bytes_at(1000) == 1000 * expected_bytes


def test_yoco_of_the_same_size_keeps_windows_and_one_cache():
    other = by_name(LLAMA_8B, 128)["yoco"]
    # methods.md 8: 4 GiB for the global cache and 64 MiB for 16 windows of 1,024.
    assert other.bytes_at(1 << 20) == (4 << 30) + (64 << 20)
    assert other.bytes_per_token(1 << 20) == 4096


def test_what_the_model_has_is_no_alternative():
    assert set(by_name(LLAMA_8B, 128)) == {"mha", "mqa", "mla", "yoco"}
    assert set(by_name({**LLAMA_8B, "num_key_value_heads": 32}, 128)) == {
        "gqa",
        "mqa",
        "mla",
        "yoco",
    }
    assert set(by_name(GLM_5, 256)) == {"mha", "gqa", "mqa", "yoco"}
    assert set(by_name(YOCO_3B, 128)) == {"mha", "mqa", "mla"}
    assert by_name(DEEPSEEK_V4, 512) == {}
    assert by_name(MAMBA, 0) == {}


def test_eight_heads_are_offered_only_where_queries_divide_by_them():
    nine = {**LLAMA_8B, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    assert set(by_name(nine, 64)) == {"mha", "mqa", "mla", "yoco"}


def test_windows_states_and_shared_layers_stay_in_alternatives():
    own, other = read_model_cache(GEMMA_3N), by_name(GEMMA_3N, 256)["mha"]
    assert own.layer_kinds == other.layer_kinds
    assert other.bytes_at(3000) == 4 * own.bytes_at(3000)
    hybrid, single = read_model_cache(QWEN3_NEXT), by_name(QWEN3_NEXT, 256)["mqa"]
    states = hybrid.bytes_at(0)
    assert single.bytes_at(0) == states > 0
    assert 2 * (single.bytes_at(3000) - states) == hybrid.bytes_at(3000) - states


def test_an_index_goes_with_the_latents_that_it_picks():
    # GLM-5: 78 layers of 64 heads; 2 x 256 x 2 bytes a head.
    assert by_name(GLM_5, 256)["mha"].bytes_per_token() == 78 * 64 * 1024


@pytest.mark.parametrize(("shared", "period"), [(15, 5), (10, 5), (0, 5)])
def test_readers_take_the_last_layer_of_their_kind_that_keeps_a_cache(shared, period):
    config = {**GEMMA_3N, "num_kv_shared_layers": shared}
    owners = cache_owners(read_model_cache(config))
    first = 35 - shared
    assert owners[:first] == tuple(range(first))
    for layer in range(first, 35):
        full = (layer + 1) % period == 0
        before = [n for n in range(first) if ((n + 1) % period == 0) == full]
        assert owners[layer] == max(before)


def test_owners_times_a_slot_times_tokens_is_what_is_held():
    cache = read_model_cache(GEMMA_3N)
    owners = set(cache_owners(cache))
    full = sum((owner + 1) % 5 == 0 for owner in owners)
    slot_bytes = 2 * 2 * 256 * 2
    tokens = 2000
    assert cache.bytes_at(tokens) == slot_bytes * (full * tokens + (len(owners) - full) * 512)


def test_layers_without_attention_read_nothing():
    owners = cache_owners(read_model_cache(QWEN3_NEXT))
    assert owners == tuple(n if n % 4 == 3 else None for n in range(48))
    assert kv_heads(read_model_cache(MAMBA)) == frozenset()


def test_what_cannot_be_split_is_named():
    assert replicated(read_model_cache(LLAMA_8B), 8) is None
    assert "16,384 B of a token's 131,072 B" in replicated(read_model_cache(LLAMA_8B), 16)
    # 3 does not divide 32 query heads.
    assert replicated(read_model_cache(LLAMA_8B), 3) is None


def test_reading_needs_no_torch():
    code = (
        "import sys; from kvtune.policies.method import methods\n"
        f"methods()['mla']().advise({LLAMA_8B!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
