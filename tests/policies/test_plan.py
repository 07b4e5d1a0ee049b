"""A plan's figures follow from bytes, memory and bandwidth by hand."""

import pytest

from kvtune.errors import BadInput
from kvtune.policies.devices import DeviceSpec, find_device
from kvtune.policies.method import History
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.model_cache import read_model_cache
from kvtune.policies.plan import PlanInput, default_stacks, method_layers, plan, stack_bytes
from kvtune.types import Harm

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "sliding_window": 4096,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
}
YOCO = {
    "architectures": ["YOCOForCausalLM"],
    "model_type": "yoco",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_self_decoder_layers": 2,
    "num_cross_decoder_layers": 2,
    "n_self_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_kv_cache_layers": 1,
    "sliding_window": 1024,
    "vocab_size": 1000,
}
MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "hidden_size": 5120,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
}
DEVICE = DeviceSpec("test", 40 * 2**30, 1e12, 0.0, "made up")
WEIGHTS = 16 * 2**30
SEEN = History(900, 100)


def given(config=LLAMA_8B, seen=SEEN, **changes):
    cache = read_model_cache(config, "test")
    fields = {"device": DEVICE, "seen": seen, "weight_bytes": WEIGHTS, "memory_share": 0.9}
    return PlanInput(cache, **{**fields, **changes})


def rows(*stacks, **changes):
    return plan(given(**changes), [parse_stack(stack) for stack in stacks])


def test_full_cache_by_hand():
    (row,) = rows("full")
    # 128 KiB a token; 0.9 x 40 GiB - 16 GiB = 20 GiB hold 163,840 tokens: 163 sequences of 1,000.
    assert row.bytes_per_token == 131072
    assert row.tokens == 163840
    assert row.sequences == 163
    assert row.read_bytes_per_step == 1000 * 131072
    assert row.step_bytes == WEIGHTS + 163 * 1000 * 131072
    assert row.step_roof_s == pytest.approx((17179869184 + 163 * 131072000) / 1e12)
    assert row.tokens_per_s_roof == pytest.approx(163 / row.step_roof_s)
    assert row.harm is Harm.LOSSLESS


def test_fp8_halves_the_bytes_and_doubles_the_tokens():
    full, fp8 = rows("full", "vllm-fp8")
    assert fp8.bytes_per_token * 2 == full.bytes_per_token
    assert fp8.tokens == 2 * full.tokens
    assert fp8.harm is Harm.NEAR_LOSSLESS


def test_a_budget_is_what_a_long_sequence_holds():
    budget = "snapkv:budget_tokens=256"
    (row,) = rows(budget, seen=History(8000, 100))
    # 256 kept and 100 generated tokens, each with a position of 4 bytes for each of 8 heads.
    assert row.resident_bytes == 356 * (131072 + 32 * 8 * 4)
    assert row.peak_bytes > row.resident_bytes


def test_quest_reads_less_and_holds_more():
    full, quest = rows("full", "quest:budget_tokens=256", seen=History(8000, 100))
    assert quest.read_bytes_per_step < 0.3 * full.read_bytes_per_step
    assert quest.bytes_per_token > full.bytes_per_token
    assert quest.sequences < full.sequences


def test_tensor_parallel_shares_heads_until_there_is_one_on_each():
    two = method_layers(read_model_cache(LLAMA_8B, "test"), 2)[0]
    assert (two.query_heads, two.kv_heads) == (16, 4)
    sixteen = method_layers(read_model_cache(LLAMA_8B, "test"), 16)[0]
    assert (sixteen.query_heads, sixteen.kv_heads) == (2, 1)
    with pytest.raises(BadInput, match="divide"):
        method_layers(read_model_cache(LLAMA_8B, "test"), 3)


def test_methods_leave_windowed_layers_alone():
    cache = read_model_cache(GEMMA_2, "test")
    seen = History(6000, 0)
    full = stack_bytes(cache, parse_stack("full"), seen).resident_bytes
    fp8 = stack_bytes(cache, parse_stack("vllm-fp8"), seen).resident_bytes
    slot = 4 * (256 + 256) * 2
    assert full == 2 * slot * 6000 + 2 * slot * 4096
    assert fp8 == slot * 6000 + 2 * slot * 4096


def test_layers_that_read_anothers_cache_read_what_a_method_left_there():
    cache = read_model_cache(YOCO, "test")
    seen = History(6000, 1)
    full, fp8 = (stack_bytes(cache, parse_stack(text), seen) for text in ("full", "vllm-fp8"))
    slot, window = 2 * 4 * 64 * 2, 2 * 2 * 4 * 64 * 2 * 1024
    # Two windowed layers; two layers read one cache.
    assert full.resident_bytes == slot * 6001 + window
    assert full.read_bytes_per_step == 2 * slot * 6001 + window
    assert fp8.read_bytes_per_step == slot * 6001 + window


def test_a_model_without_full_attention_gets_no_method():
    full, kivi = rows("full", "kivi", config=MLA)
    assert full.bytes_per_token == 69120
    assert "latent" in kivi.refused
    assert kivi.sequences is None


def test_a_stack_that_cannot_work_says_why():
    (row,) = rows("kivi + turboquant")
    assert "two number formats" in row.refused


def test_every_default_stack_gets_a_row_with_figures():
    found = plan(given(seen=History(4000, 300)), default_stacks())
    assert found[0].stack == "full"
    assert len(found) > 15
    for row in found:
        assert row.refused or row.tokens_per_s_roof > 0, row.stack
    assert not [row.stack for row in found if row.refused]


def test_weights_that_do_not_fit_end_the_plan():
    with pytest.raises(BadInput, match="leave no memory"):
        rows("full", weight_bytes=40 * 2**30)


def test_memory_set_aside_is_not_for_caches():
    (less,) = rows("full", reserve_bytes=10 * 2**30)
    assert less.tokens == 81920


def test_devices_are_found_by_name_and_others_are_refused():
    assert find_device("H100").memory_bytes == 80 * 2**30
    with pytest.raises(BadInput, match="h200"):
        raise_with_fix(lambda: find_device("h1000"))


def raise_with_fix(action):
    try:
        action()
    except BadInput as error:
        raise BadInput(error.fix) from error
