import json

import pytest

from kvtune.errors import BadInput
from kvtune.profilers.load.request import CHAT_PATH, COMPLETIONS_PATH, prepare
from kvtune.types import Request


def body_of(request, **changes):
    settings = {
        "model": "m",
        "index": 0,
        "fixed_length": True,
        "output_tokens": 7,
        "cache_salt": None,
    }
    prepared = prepare(request, **settings | changes)
    return prepared, json.loads(prepared.body)


def test_fixed_length_pins_the_output_from_both_sides():
    _, body = body_of(Request(prompt="hi"))
    assert body["max_tokens"] == body["min_tokens"] == 7
    assert body["ignore_eos"] is True


def test_natural_stop_only_limits_the_output():
    _, body = body_of(Request(prompt="hi"), fixed_length=False)
    assert body["max_tokens"] == 7
    assert "min_tokens" not in body
    assert "ignore_eos" not in body


def test_every_body_asks_for_a_stream_with_usage():
    _, body = body_of(Request(prompt="hi"), temperature=0.5)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["temperature"] == 0.5
    assert body["model"] == "m"


def test_text_and_token_ids_go_to_completions():
    text, text_body = body_of(Request(prompt="hi", input_tokens=5, arrival_s=1.5))
    ids, ids_body = body_of(Request(token_ids=(5, 6, 7)))
    assert text.path == ids.path == COMPLETIONS_PATH
    assert text_body["prompt"] == "hi"
    assert ids_body["prompt"] == [5, 6, 7]
    assert (text.input_tokens, text.arrival_s, text.output_tokens) == (5, 1.5, 7)
    assert ids.input_tokens == 3


def test_messages_go_to_chat():
    messages = ({"role": "user", "content": "hi"},)
    prepared, body = body_of(Request(messages=messages))
    assert prepared.path == CHAT_PATH
    assert body["messages"] == [{"role": "user", "content": "hi"}]


def test_cache_salt_is_sent_only_when_given():
    assert "cache_salt" not in body_of(Request(prompt="hi"))[1]
    assert body_of(Request(prompt="hi"), cache_salt="run-1")[1]["cache_salt"] == "run-1"


def test_text_that_is_not_valid_unicode_survives():
    assert body_of(Request(prompt="a\ud800é"))[1]["prompt"] == "a\ud800é"


def test_a_bare_length_is_refused_by_number():
    with pytest.raises(BadInput, match="request 4 ") as caught:
        body_of(Request(input_tokens=10), index=4)
    assert "materialize" in caught.value.fix


def test_no_output_is_refused():
    with pytest.raises(BadInput, match="0 output tokens"):
        body_of(Request(prompt="hi"), output_tokens=0)
