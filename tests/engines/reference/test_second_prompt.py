"""A prompt after others is compressed together with what they left."""

import pytest
import torch
from contracts.synthetic_layers import held, layer_cache, random_vectors
from contracts.tiny_models import tiny_engine, tokens

from kvtune.policies.method_stack import parse_stack


def test_a_second_prompt_is_chosen_from_together_with_the_first():
    layer = layer_cache(
        "chunkkv:budget_tokens=12,window_tokens=2,chunk_tokens=1", query_heads=2, kv_heads=1
    )
    vectors = random_vectors(30, query_heads=2, seed=1)
    _, seen = layer.prefill(*(x[:, :20] for x in vectors), torch.arange(20))
    layer.finish_prefill(layer.choose(seen))
    (first,) = held(layer)
    assert len(first) == 12
    out, seen = layer.prefill(*(x[:, 20:] for x in vectors), torch.arange(20, 30))
    layer.finish_prefill(layer.choose(seen))
    (both,) = held(layer)
    assert len(both) == 12
    assert both[-2:] == [28, 29]
    assert set(both) <= {*first, *range(20, 30)}
    assert set(both) & set(first)
    group = layer.groups[0]
    assert torch.equal(group.keys.read()[0], vectors[1][0, both])
    assert torch.equal(group.values.read()[0], vectors[2][0, both])
    assert out.shape == (2, 10, 8)


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_survivors_count_from_zero_for_a_second_prompt_as_they_do_while_decoding(chunk_tokens):
    engine = tiny_engine()
    stack = parse_stack("streaming-llm:sink_tokens=2,window_tokens=14,positions=compact")
    question, answers = tokens(7, 1), []
    for asks in ("prefill", "decode"):
        sequence = engine.start(stack)
        engine.prefill([sequence], [tokens(60)])
        if asks == "prefill":
            (found,) = engine.prefill([sequence], [question], chunk_tokens=chunk_tokens)
        else:
            found = engine.decode([sequence], [question])[0][-1]
        answers.append(found)
    torch.testing.assert_close(answers[0], answers[1], atol=1e-4, rtol=1e-4)


def test_summaries_follow_a_second_prompt_that_is_stored_as_it_comes():
    engine = tiny_engine()
    stack = parse_stack("quest:page_tokens=4,budget_tokens=24,dense_layers=0")
    answers = []
    first, between, second = tokens(18), 9, tokens(24, 1)
    for apart in (False, True):
        sequence = engine.start(stack, exact_prefill=False)
        if apart:
            engine.prefill([sequence], [first])
            engine.decode([sequence], [[between]])
            engine.prefill([sequence], [second])
        else:
            engine.prefill([sequence], [[*first, between, *second]])
        answers.append(torch.cat([engine.decode([sequence], [[token]])[0] for token in (5, 6)]))
    torch.testing.assert_close(answers[0], answers[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [1, 4])
def test_heads_of_different_lengths_take_a_second_prompt_in_chunks_as_in_a_piece(chunk_tokens):
    engine = tiny_engine()
    stack = parse_stack("kvzip + kivi:residual_tokens=16,key_group_tokens=8")
    answers = []
    for size in (None, chunk_tokens):
        sequence = engine.start(stack)
        engine.prefill([sequence], [tokens(40)])
        (asked,) = engine.prefill([sequence], [tokens(30, 1)], chunk_tokens=size)
        (after,) = engine.decode([sequence], [[5]])
        answers.append(torch.stack((asked, after[0])))
        assert all(layer.ragged for layer in sequence.layers)
    torch.testing.assert_close(answers[0], answers[1], atol=1e-4, rtol=1e-4)
