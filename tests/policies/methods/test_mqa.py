"""Multi-query attention: one KV head, on configs and in the reference engine."""

import pytest
import torch
from contracts.model_samples import FALCON_7B, LLAMA_8B
from contracts.tiny_models import follow, tiny_model, tokens

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.errors import BadInput
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.methods.mqa import MultiQueryAttention

METHOD = MultiQueryAttention()
ONE_HEAD = {**LLAMA_8B, "num_key_value_heads": 1}


def test_a_token_costs_one_head_a_layer():
    # Falcon-7B: 32 layers x 2 x 64 x 2 bytes, 1/71 of its 71 query heads' own.
    assert METHOD.bytes_per_token(FALCON_7B) == 8192
    assert METHOD.bytes_per_token(ONE_HEAD, element_bytes=1) == 2 * 32 * 128


def test_advice_names_the_costs_of_other_attention_and_the_limits():
    lines = METHOD.advise(ONE_HEAD)
    assert "32 query heads read one KV head" in lines[0]
    assert "4 bits rather than 2" in lines[0]
    assert any("over 2 devices each holds 16,384 B of a token's 16,384 B" in x for x in lines)
    assert any(x.startswith("MHA (32 KV heads)") and "32 times" in x for x in lines)
    assert any(x.startswith("GQA (8 KV heads)") and "8 times" in x for x in lines)


def test_advice_for_a_model_without_it_says_why_it_stays_so():
    lacks, would = METHOD.advise(LLAMA_8B)
    assert "8 KV heads for 32 query heads" in lacks
    assert "averaging" in lacks
    # 2 x 32 x 128 x 2 bytes x 131,072 tokens.
    assert would.startswith("MQA (1 KV head) of the same size would hold 2.00 GiB at 131,072")


def test_the_engine_runs_it_only_on_a_model_that_has_it():
    prompt, continuation = tokens(20), tokens(3, 1)
    model = tiny_model(num_key_value_heads=1).eval()
    with torch.no_grad():
        whole = model(torch.tensor([prompt + continuation])).logits[0]
    engine = ReferenceEngine(model)
    found, sequence = follow(engine, parse_stack("mqa"), prompt, continuation)
    torch.testing.assert_close(found, whole[19:], atol=1e-4, rtol=1e-4)
    assert sequence.measured().resident_bytes == 23 * METHOD.bytes_per_token(
        engine.config, element_bytes=4
    )
    with pytest.raises(BadInput, match="2 KV heads for 4 query heads"):
        ReferenceEngine(tiny_model()).start(parse_stack("mqa"))
