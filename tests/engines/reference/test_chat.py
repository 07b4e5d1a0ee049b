"""Spans of a chat are where its messages stand among the tokens."""

import pytest
from contracts.tiny_models import tiny_engine
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtune.engines.reference.chat import chat_prompt
from kvtune.errors import BadInput
from kvtune.policies.eviction import Span
from kvtune.policies.method_stack import parse_stack

WORDS = (
    *("<s>", "system", "user", "assistant", "You", "are", "kind", ".", "Who", "you", "?"),
    *("Say", "it", "twice"),
)
TEMPLATE = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant{% endif %}"
)
CHAT = [
    {"role": "system", "content": "You are kind ."},
    {"role": "user", "content": "Who are you ?"},
]


@pytest.fixture
def tokenizer():
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.chat_template = TEMPLATE
    return made


def test_each_message_is_a_span_and_the_system_prompt_is_protected(tokenizer):
    prompt = chat_prompt(tokenizer, CHAT)
    # <s> system [You are kind .] <s> user [Who are you ?] <s> assistant
    assert len(prompt.token_ids) == 14
    assert prompt.spans == (Span(2, 6, "system", True), Span(8, 12, "user", False))


def test_marked_texts_come_first_and_are_protected(tokenizer):
    prompt = chat_prompt(tokenizer, CHAT, protected_roles=(), protected_texts=["are you"])
    assert prompt.spans[0] == Span(9, 11, "marked", True)
    assert not any(span.protected for span in prompt.spans[1:])


def test_an_evictor_keeps_the_system_prompt_of_a_chat(tokenizer):
    prompt = chat_prompt(tokenizer, CHAT)
    engine = tiny_engine()
    sequence = engine.start(parse_stack("snapkv:budget_tokens=6,window_tokens=1"), prompt.spans)
    engine.prefill([sequence], [prompt.token_ids])
    for layer in sequence.layers:
        group = layer.groups[0]
        for row in group.positions(group.keys).tolist():
            assert set(range(2, 6)) <= set(row)


def test_a_text_that_is_not_in_the_chat_is_refused(tokenizer):
    with pytest.raises(BadInput, match="not in the chat"):
        chat_prompt(tokenizer, CHAT, protected_texts=["Who am I"])


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="chat template"):
        chat_prompt(tokenizer, CHAT)
