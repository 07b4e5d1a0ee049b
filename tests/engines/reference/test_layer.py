"""What a layer holds besides its cache goes as soon as it has served."""

import pytest
from contracts.held_tensors import uncounted
from contracts.tiny_models import follow, tiny_engine, tiny_model, tokens

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.policies.method_stack import parse_stack


@pytest.mark.parametrize(
    "text",
    [
        "snapkv:budget_tokens=24,window_tokens=6 + minicache",
        "h2o:heavy_tokens=12,recent_tokens=12 + minicache:per_head=true",
        "chunkkv:budget_tokens=24,window_tokens=6,chunk_tokens=4,reuse_layers=3",
        "kvzip:mode=pair-uniform + r-kv:budget_tokens=3,buffer_tokens=2,window_tokens=2",
        "kvzip",
        "scissorhands:budget_tokens=30,window_tokens=8,recent_tokens=4",
        "streaming-llm:sink_tokens=4,window_tokens=20 + quest:page_tokens=4,budget_tokens=8",
    ],
)
@pytest.mark.parametrize("decoded", [0, 4])
def test_no_tensor_lives_with_a_sequence_without_being_counted(text, decoded):
    _, sequence = follow(tiny_engine(), parse_stack(text), tokens(50), tokens(decoded, 1))
    assert uncounted(sequence) == {}


def test_a_layer_whose_follower_has_a_trained_window_leaves_no_choice_behind():
    model = tiny_model(
        "Gemma3TextConfig",
        sliding_window=12,
        query_pre_attn_scalar=32,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )
    stack = parse_stack("snapkv:budget_tokens=24,window_tokens=6 + minicache:per_head=true")
    _, sequence = follow(ReferenceEngine(model), stack, tokens(50), tokens(2, 1))
    assert uncounted(sequence) == {}


@pytest.mark.parametrize("text", ["h2o", "kvzip", "quest:page_tokens=4,budget_tokens=8 + paging"])
def test_a_freed_sequence_holds_nothing(text):
    _, sequence = follow(tiny_engine(), parse_stack(text), tokens(40), tokens(2, 1))
    sequence.free()
    assert sequence.resident_bytes == 0


@pytest.mark.parametrize("exact_prefill", [True, False])
@pytest.mark.parametrize("text", ["full", "quest:page_tokens=4,budget_tokens=8", "h2o"])
def test_a_row_does_not_keep_the_vectors_of_its_batch_alive(text, exact_prefill):
    engine = ReferenceEngine(tiny_model(num_key_value_heads=1, num_hidden_layers=2))
    stack = parse_stack(text)
    sequences = [engine.start(stack, exact_prefill=exact_prefill) for _ in range(2)]
    engine.prefill(sequences, [tokens(20), tokens(20, 1)])
    for tensor in sequences[0].tensors().values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
