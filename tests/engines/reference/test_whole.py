"""Scoring passes see the prompt and leave no trace, in any batch, chunking and kind of layer."""

import pytest
import torch
from contracts.tiny_models import follow, tiny_engine, tiny_model, tokens

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.methods.kvzip import KVzip

STACK = parse_stack("kvzip:kept_ratio=0.4,chunk_tokens=16")


def kept(sequence):
    return [
        row
        for layer in sequence.layers
        for group in layer.groups
        for row in group.positions(group.keys).tolist()
    ]


def test_a_scoring_pass_sees_what_a_longer_prompt_would(monkeypatch):
    engine, prompt, extra = tiny_engine(), tokens(30), tokens(9, 1)
    seen = []
    monkeypatch.setattr(KVzip, "scoring_passes", lambda *_: [extra])
    monkeypatch.setattr(KVzip, "select_all", lambda self, evictors: [None for _ in evictors])
    evictors = engine.start(STACK).layers[0].evictors
    monkeypatch.setattr(
        type(evictors[0]), "observe", lambda self, x, phase: seen.append((phase, x))
    )
    sequence = engine.start(STACK)
    engine.prefill([sequence], [prompt])
    shown = [x for phase, x in seen if phase == "scoring"]
    seen.clear()
    engine.prefill([engine.start(STACK)], [prompt + extra])
    whole = [x for phase, x in seen if phase == "prefill"]
    assert len(shown) == len(whole) == 4
    for one, two in zip(shown, whole, strict=True):
        torch.testing.assert_close(one.queries, two.queries[:, 30:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.keys, two.keys, atol=1e-4, rtol=1e-4)
        assert torch.equal(one.key_positions, two.key_positions)
        assert torch.equal(one.query_positions, two.query_positions[30:])
    assert sequence.seen_tokens == sequence.prompt_tokens == 30
    assert all(layer.tokens == 30 for layer in sequence.layers)


def test_the_choice_is_the_same_in_a_batch_and_in_chunks():
    engine = tiny_engine()
    prompts = [tokens(50), tokens(33, 1), tokens(3, 2)]
    alone = [kept(follow(engine, STACK, prompt, [])[1]) for prompt in prompts]
    for options in ({}, {"chunk_tokens": 7}, {"padding": "left"}):
        sequences = [engine.start(STACK) for _ in prompts]
        engine.prefill(sequences, prompts, **options)
        assert [kept(sequence) for sequence in sequences] == alone


@pytest.mark.parametrize("mode", ["pair", "pair-uniform"])
def test_layers_with_a_trained_window_are_left_alone(mode):
    engine = ReferenceEngine(
        tiny_model(
            "Gemma3TextConfig",
            sliding_window=12,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    )
    stack = parse_stack(f"kvzip:kept_ratio=0.5,mode={mode},sink_tokens=1")
    _, sequence = follow(engine, stack, tokens(40), tokens(2, 1))
    windowed, full = sequence.layers[::2], sequence.layers[1::2]
    assert all(layer.tokens == 12 for layer in windowed)
    total = sum(
        group.tokens - 2
        for layer in full
        for group in layer.groups
        for _ in range(layer.setup.shape.kv_heads // len(layer.groups))
    )
    assert total == 0.5 * 40 * 4


class Tokenizer:
    """Numbers each character, and wraps a user's text in 1 and 2."""

    chat_template = "present"

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return type("Encoded", (), {"input_ids": [ord(c) % 97 for c in text]})()

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "\x01" + messages[0]["content"] + "\x02"


def test_a_tokenizer_gives_the_order_to_repeat_and_the_chat_format(monkeypatch):
    asked = []
    original = KVzip.scoring_passes

    def spy(self, prompt_ids, encode, answer_ids):
        asked.append((encode("ab"), answer_ids))
        return original(self, prompt_ids, encode, answer_ids)

    monkeypatch.setattr(KVzip, "scoring_passes", spy)
    engine = ReferenceEngine(tiny_model(), Tokenizer())
    _, sequence = follow(engine, STACK, tokens(40), [])
    assert asked == [([0, 1], [2])]
    assert sum(map(len, kept(sequence))) == 0.4 * 40 * 8


def test_the_peak_holds_the_whole_prompt_until_all_is_chosen():
    engine = tiny_engine()
    _, sequence = follow(engine, STACK, tokens(100), [])
    staged, scores = 100 * 2 * 2 * 32 * 4, 100 * 2 * 4
    own = [
        sum(group.tokens * (2 * 32 * 4 + 4) for group in layer.groups) for layer in sequence.layers
    ]
    expected = 4 * (staged + scores)
    for number in range(4):
        expected = max(expected, (4 - number) * staged + sum(own[: number + 1]))
    assert sequence.measured().peak_bytes == expected
