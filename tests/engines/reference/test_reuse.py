"""Prefix caching on a model: fewer tokens computed, the same answers, nothing shared wrongly."""

import gc

import pytest
import torch
from contracts.tiny_models import ready, tiny_model, tokens

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.engines.reference.reuse import prefix_cache, private_because
from kvtune.policies.footprint import footprint
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.paged_plane import BlockPool

SHARED = tokens(40)


@pytest.fixture
def engine():
    return ReferenceEngine(tiny_model())


def cache_of(engine, stack):
    return prefix_cache(engine, stack.methods[0])


@pytest.mark.parametrize("rest", ["", " + paging", " + vllm-int8-per-token-head"])
def test_a_shared_prefix_is_computed_once_and_answers_stay(engine, rest):
    stack = parse_stack("prefix-caching" + rest)
    prompts = [[*SHARED, *tokens(9, seed)] for seed in (1, 2)]
    without = parse_stack(rest.removeprefix(" + ") or "full")
    for number, prompt in enumerate(prompts):
        (expected,) = engine.generate([prompt], without, new_tokens=8)
        (found,) = engine.generate([prompt], stack, new_tokens=8)
        assert found.token_ids == expected.token_ids
        assert found.sequence.reused_tokens == (0, 32)[number]
    cache = cache_of(engine, stack)
    assert (cache.asked_tokens, cache.found_tokens) == (98, 32)
    assert cache.hit_rate == 32 / 98


def test_only_the_tokens_after_the_hit_run_through_the_model(engine):
    stack = parse_stack("prefix-caching")
    seen = []
    engine.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for _ in range(2):
        engine.prefill([engine.start(stack)], [SHARED])
    assert seen == [40, 8]


def test_a_whole_prompt_in_the_cache_still_computes_one_block(engine):
    stack = parse_stack("prefix-caching:block_tokens=8")
    first = engine.prefill([engine.start(stack)], [SHARED])[0]
    again = engine.start(stack)
    torch.testing.assert_close(engine.prefill([again], [SHARED])[0], first, atol=1e-5, rtol=1e-5)
    assert again.reused_tokens == 32


def test_a_second_turn_finds_what_was_generated(engine):
    stack = parse_stack("prefix-caching:block_tokens=8")
    (turn,) = engine.generate([SHARED], stack, new_tokens=20)
    history = [*SHARED, *turn.token_ids, *tokens(5, 3)]
    sequence = engine.start(stack)
    engine.prefill([sequence], [history])
    # The last generated token was never fed back: 59 tokens are stored, 56 in full blocks.
    assert sequence.reused_tokens == 56


def test_pages_are_shared_and_counted_once(engine):
    stack = parse_stack("prefix-caching + paging")
    sequences = [engine.start(stack) for _ in range(2)]
    for sequence in sequences:
        engine.prefill([sequence], [SHARED])
    (pool,) = (value for value in engine.shared.values() if isinstance(value, BlockPool))
    # 4 layers x keys and values x (2 shared full blocks + 2 last ones).
    assert pool.used_blocks == 8 * 4
    sequences.clear()
    del sequence
    gc.collect()
    cache = cache_of(engine, stack)
    assert pool.used_blocks == 8 * 2
    assert cache.nbytes == pool.used_bytes
    cache.blocks.capacity_blocks = 1
    cache.blocks.add({})
    assert pool.used_blocks == 8


def test_pages_of_a_running_sequence_outlive_their_place_in_the_cache(engine):
    stack = parse_stack("prefix-caching:capacity_blocks=1 + paging")
    sequence = engine.start(stack)
    engine.prefill([sequence], [SHARED])
    (pool,) = (value for value in engine.shared.values() if isinstance(value, BlockPool))
    assert len(cache_of(engine, stack).blocks) == 1
    for seed in range(3):
        engine.prefill([engine.start(stack)], [tokens(40, seed + 7)])
    (found,) = engine.decode([sequence], [[3]])
    plain = engine.start()
    engine.prefill([plain], [SHARED])
    (expected,) = engine.decode([plain], [[3]])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    sequence.free()
    gc.collect()
    assert pool.used_blocks == 8
    assert sequence.resident_bytes == 0


def test_formulas_know_what_was_reused(engine):
    stack = parse_stack("prefix-caching:block_tokens=8")
    for _ in range(2):
        sequence = engine.start(stack)
        engine.prefill([sequence], [SHARED])
        expected = footprint(stack, engine.layers, 40, observed=sequence.observed())
        assert sequence.measured() == expected
    assert sequence.reused_tokens == 32


def test_other_formats_and_salts_share_nothing(engine):
    for text in ("", " + vllm-int8-per-token-head", " + vllm-fp8"):
        sequence = engine.start(ready(engine, parse_stack("prefix-caching" + text)))
        engine.prefill([sequence], [SHARED])
        assert sequence.reused_tokens == 0, text
    sequence = engine.start(parse_stack("prefix-caching:salt=b"))
    engine.prefill([sequence], [SHARED])
    assert sequence.reused_tokens == 0


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("streaming-llm", "later tokens"),
        ("kivi", "in groups"),
        ("kvquant", "in two forms"),
        ("ojakv", "later tokens"),
    ],
)
def test_stacks_whose_blocks_depend_on_other_tokens_stay_private(engine, rest, reason):
    stack = ready(engine, parse_stack(f"prefix-caching + {rest}"))
    for _ in range(2):
        sequence = engine.start(stack)
        assert reason in private_because(sequence)
        engine.prefill([sequence], [SHARED])
        assert sequence.reused_tokens == 0
    assert len(cache_of(engine, stack).blocks) == 0


@pytest.mark.parametrize("rest", ["kvquant:exact_tokens=0", "palu", "turboquant"])
def test_formats_that_store_each_token_alike_are_shared(engine, rest):
    stack = ready(engine, parse_stack(f"prefix-caching + {rest}"))
    for reused in (0, 32):
        sequence = engine.start(stack)
        engine.prefill([sequence], [SHARED])
        assert sequence.reused_tokens == reused


def test_logits_of_every_token_need_every_token(engine):
    stack = parse_stack("prefix-caching")
    for _ in range(2):
        sequence = engine.start(stack)
        (logits,) = engine.prefill([sequence], [SHARED], every=True)
        assert len(logits) == 40


def test_tokens_at_other_positions_are_not_a_prefix(engine):
    stack = parse_stack("prefix-caching")
    engine.prefill([engine.start(stack)], [SHARED], positions=[range(5, 45)])
    assert len(cache_of(engine, stack).blocks) == 0


def test_layers_with_a_trained_window_are_shared_before_they_slide():
    model = tiny_model("Gemma3TextConfig", sliding_window=12, query_pre_attn_scalar=32)
    engine = ReferenceEngine(model)
    stack = parse_stack("prefix-caching")
    prompts = [[*SHARED, *tokens(9, seed)] for seed in (1, 2)]
    for prompt in prompts:
        (expected,) = engine.generate([prompt], new_tokens=6)
        (found,) = engine.generate([prompt], stack, new_tokens=6)
        assert found.token_ids == expected.token_ids
    assert found.sequence.reused_tokens == 32
