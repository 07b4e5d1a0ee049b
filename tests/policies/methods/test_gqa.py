"""Grouped-query attention: shapes read from public configs, bytes, and attention itself."""

import pytest
import torch
from contracts.model_samples import GEMMA_3N, LLAMA_8B, QWEN3_NEXT
from contracts.tiny_models import follow, tiny_engine, tiny_model, tokens

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.errors import BadInput
from kvtune.policies.architecture import attention_rows, kv_heads
from kvtune.policies.method_stack import MethodStack, parse_stack
from kvtune.policies.methods.gqa import GroupedQueryAttention
from kvtune.policies.model_cache import read_model_cache

METHOD = GroupedQueryAttention()
MHA_32 = {**LLAMA_8B, "num_key_value_heads": 32}
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": None,
}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 2304,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}


@pytest.mark.parametrize(
    ("config", "heads", "dim"),
    [
        (LLAMA_8B, 8, 128),
        (QWEN2_7B, 4, 128),
        (MISTRAL_7B, 8, 128),
        # 2304 / 8 is not the stated head size.
        (GEMMA_2_2B, 4, 256),
        (GEMMA_3N, 2, 256),
        (QWEN3_NEXT, 2, 256),
    ],
)
def test_heads_and_their_size_are_read(config, heads, dim):
    cache = read_model_cache(config)
    assert METHOD.detect(config)
    assert kv_heads(cache) == {heads}
    assert {(rows.key_dim, rows.value_dim) for rows in attention_rows(cache)} == {(dim, dim)}


def test_8_of_32_heads_take_a_quarter_of_the_bytes():
    whole = read_model_cache(MHA_32).bytes_per_token()
    assert METHOD.bytes_per_token(LLAMA_8B) / whole == 0.25


def test_advice_names_the_costs_of_other_attention_and_the_limits():
    lines = METHOD.advise(LLAMA_8B)
    assert "4 query heads read each KV head" in lines[0]
    assert "4 bits rather than 2" in lines[0]
    assert any("over 16 devices each holds 16,384 B" in x for x in lines)
    # 524,288 and 16,384 B a token at 131,072 tokens; MLA: 32 x 576 x 2.
    assert any(x.startswith("MHA") and "64.00 GiB at 131,072 tokens, 4 times" in x for x in lines)
    assert any(x.startswith("MQA") and "2.00 GiB" in x and "0.125 times" in x for x in lines)
    assert any(x.startswith("MLA (rows of 576)") and "4.50 GiB" in x for x in lines)
    assert not any(x.startswith("GQA") for x in lines)


def test_advice_for_a_model_without_it_says_why_it_stays_so():
    lacks, would = METHOD.advise(MHA_32)
    assert "32 KV heads for 32 query heads" in lacks
    assert would.startswith("GQA (8 KV heads)")
    assert "0.25 times" in would


def test_attention_is_that_of_a_model_with_repeated_heads():
    prompt, continuation = tokens(20), tokens(3, 1)
    grouped = tiny_engine()
    state = grouped.model.state_dict()
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            heads = weight.reshape(2, 32, -1)
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    repeated = tiny_model(num_key_value_heads=4)
    repeated.load_state_dict(state)
    found, small = follow(grouped, parse_stack("gqa"), prompt, continuation)
    expected, large = follow(ReferenceEngine(repeated), MethodStack(), prompt, continuation)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert 2 * small.measured().resident_bytes == large.measured().resident_bytes
    assert small.measured().resident_bytes == 23 * METHOD.bytes_per_token(
        grouped.config, element_bytes=4
    )


def test_the_engine_refuses_it_on_a_model_without_it():
    with pytest.raises(BadInput, match="4 KV heads for 4 query heads"):
        ReferenceEngine(tiny_model(num_key_value_heads=4)).start(parse_stack("gqa"))
