"""Every legal pair of methods, and some deeper stacks, run and take the bytes of their formula.

No tensor lives as long as a sequence without being among those bytes.
"""

import functools
import itertools

import pytest
from contracts.held_tensors import uncounted, unnamed
from contracts.tiny_models import follow, tiny_engine, tiny_model, tokens

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.policies.compose import refusals
from kvtune.policies.footprint import footprint
from kvtune.policies.method_stack import parse_stack

SMALL = (
    "streaming-llm:sink_tokens=4,window_tokens=20",
    "streaming-llm:sink_tokens=4,window_tokens=20,positions=keep",
    "h2o:heavy_tokens=12,recent_tokens=12",
    "scissorhands:budget_tokens=30,window_tokens=8,recent_tokens=4",
    "snapkv:budget_tokens=24,window_tokens=6",
    "chunkkv:budget_tokens=24,window_tokens=6,chunk_tokens=4",
    "kvzip",
    "kvzip:mode=pair-uniform",
    "r-kv:budget_tokens=24,buffer_tokens=8,pin_prompt=false",
    "quest:page_tokens=8,budget_tokens=16,dense_layers=1",
    "kivi:residual_tokens=16,key_group_tokens=8",
    "gear:buffer_tokens=16,group_values=16",
    "kvquant",
    "palu",
    "ojakv:first_tokens=4,recent_tokens=8,update_tokens=8",
    "minicache",
    "minicache:decode_merge=true",
    "paging:block_tokens=8",
    "turboquant",
    "turboquant:outlier_channels=4,center_keys=true",
    "vllm-fp8",
    "vllm-int8-per-token-head",
    "vllm-int4-per-token-head",
    "vllm-turboquant:boundary_layers=1",
)
"""Methods at sizes that bite on a prompt of 50 tokens."""
PAIRS = [
    " + ".join(pair)
    for pair in itertools.combinations(SMALL, 2)
    if not refusals(parse_stack(" + ".join(pair)))
]
DEEP = (
    f"{SMALL[4]} + minicache + palu + turboquant",
    f"{SMALL[4]} + minicache + paging:block_tokens=8 + vllm-int4-per-token-head",
    f"{SMALL[4]} + {SMALL[9]} + palu + vllm-int8-per-token-head",
    f"{SMALL[2]} + {SMALL[9]} + turboquant",
    f"{SMALL[5]} + {SMALL[8]} + paging:block_tokens=8 + turboquant",
)


@pytest.mark.parametrize("text", [*PAIRS, *DEEP])
def test_stack_runs_and_takes_the_bytes_of_its_formula(text):
    engine = tiny_engine()
    stack = parse_stack(text)
    for prompt, decoded in ((50, 4), (1, 1)):
        logits, sequence = follow(engine, stack, tokens(prompt), tokens(decoded, 1))
        assert logits.isfinite().all()
        expected = footprint(stack, engine.layers, prompt, decoded, observed=sequence.observed())
        assert sequence.measured() == expected
        assert uncounted(sequence) == {}
        assert unnamed(sequence) == {}


@functools.cache
def odd_engine():
    """Three KV heads of 20 channels, in 16 bits."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20, "hidden_size": 60}
    return ReferenceEngine(tiny_model(**sizes).bfloat16())


@pytest.mark.parametrize("text", [text for text in SMALL if "vllm-turboquant" not in text])
def test_formulas_hold_for_16_bits_and_sizes_that_are_no_powers_of_two(text):
    engine = odd_engine()
    stack = parse_stack(text)
    logits, sequence = follow(engine, stack, tokens(33), tokens(20, 1))
    assert logits.isfinite().all()
    expected = footprint(stack, engine.layers, 33, 20, observed=sequence.observed())
    assert sequence.measured() == expected
