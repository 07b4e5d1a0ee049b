import json
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.load.answer import Answer, KeptText
from kvtune.profilers.load.request import PreparedRequest

REQUEST = PreparedRequest("/v1/completions", b"{}", None, input_tokens=9, output_tokens=4)


def text(text, finish=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def chat(finish=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(completion, **more):
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": completion, **more}}


def encode(messages, separators=(",", ":"), ensure_ascii=True):
    options = {"separators": separators, "ensure_ascii": ensure_ascii}
    return [
        b"data: %s\n\n" % (m if isinstance(m, bytes) else json.dumps(m, **options).encode())
        for m in messages
    ]


def answer(*messages, done=True, status=200, error=None, kept=0, separators=(",", ":")):
    """Feed one message a second, the first one at second 1; the answer ends a second later.

    The text of the first `kept` messages is kept.
    """
    got = Answer(kept)
    got.sent(0.5)
    got.head(status)
    encoded = encode([*messages, *([b"[DONE]"] if done else [])], separators)
    for second, data in enumerate(encoded, 1):
        got.body(data, float(second))
    got.end(error, float(len(encoded) + 1))
    return got.record(REQUEST, index=3, scheduled_s=0.25, start_s=0.0)


def test_every_message_of_a_completion_is_a_token():
    record = answer(text("a"), text("b"), text("", "length"), usage(3))
    assert record.error is None
    assert (record.scheduled_s, record.sent_s, record.first_token_s) == (0.25, 0.5, 1.0)
    assert record.gaps_s == (1.0, 1.0)
    assert record.end_s == 3.0
    assert (record.input_tokens, record.output_tokens) == (5, 3)
    assert record.requested_output_tokens == 4
    assert record.finish_reason == "length"


def test_text_held_back_until_a_character_is_whole_is_a_token():
    record = answer(text("a"), text(""), text("é", "length"), usage(3))
    assert record.gaps_s == (1.0, 1.0)


def test_announcing_the_role_is_not_the_first_token():
    record = answer(
        chat(role="assistant", content=""), chat(content="a"), chat("stop", content="b")
    )
    assert record.first_token_s == 2.0
    assert record.gaps_s == (1.0,)


@pytest.mark.parametrize(
    "delta",
    [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}],
)
def test_thinking_and_tool_calls_are_tokens(delta):
    announced = chat(role="assistant", content="")
    record = answer(announced, chat(**delta), chat("stop", content="b"))
    assert record.first_token_s == 2.0
    assert record.output_tokens == 2
    at_once = answer(chat(role="assistant", content="", **delta), chat("stop", content="b"))
    assert at_once.first_token_s == 1.0


def test_a_role_beside_content_is_a_token():
    assert (
        answer(chat(role="assistant", content="a"), chat("stop", content="b")).first_token_s == 1.0
    )


def test_a_closing_message_without_a_token_is_left_out_when_the_usage_says_so():
    record = answer(chat(content="a"), chat(content="b"), chat("stop"), usage(2))
    assert record.gaps_s == (1.0,)
    assert record.end_s == 2.0
    assert record.output_tokens == 2


def test_the_end_of_sequence_token_counts_when_the_usage_counts_it():
    record = answer(chat(role="assistant", content=""), chat("stop", content=""), usage(1))
    assert record.ok
    assert record.first_token_s == 2.0
    assert record.output_tokens == 1


def test_usage_alone_is_no_token_and_no_answer():
    record = answer(usage(0))
    assert not record.ok
    assert record.error.startswith("empty answer")


def test_usage_wins_over_the_count_of_messages():
    record = answer(text("a b"), text("c d", "length"), usage(4))
    assert record.output_tokens == 4
    assert len(record.gaps_s) == 1


def test_usage_beside_the_last_choice_is_read():
    record = answer(text("a"), text("b", "stop") | {"usage": {"completion_tokens": 2}})
    assert record.output_tokens == 2
    assert record.input_tokens == 9


def test_cached_tokens_are_read_when_the_server_says():
    assert answer(text("a"), usage(1)).cached_tokens is None
    details = {"prompt_tokens_details": {"cached_tokens": 64}}
    assert answer(text("a"), usage(1, **details)).cached_tokens == 64
    assert answer(text("a"), usage(1, prompt_tokens_details=None)).cached_tokens is None


def test_without_usage_tokens_are_messages():
    assert answer(text("a"), text("b", "stop")).output_tokens == 2


def test_generated_text_cannot_pose_as_structure():
    trap = '"finish_reason":null,"error":{"message":"no"}'
    record = answer(text("a"), text(trap), text(trap, "length"), usage(3), kept=3)
    assert record.error is None
    assert record.finish_reason == "length"
    assert record.text == "a" + trap + trap


def test_spaced_json_is_read_the_same():
    messages = [text("a"), text("b"), text("c", "length"), usage(3)]
    assert answer(*messages, separators=(", ", ": ")) == answer(*messages)


def test_messages_without_a_finish_reason_are_tokens():
    record = answer({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]})
    assert record.output_tokens == 2


def test_text_is_kept_only_on_request():
    assert answer(text("a"), text("b", "stop")).text is None
    assert answer(text("a"), text("b", "stop"), kept=sys.maxsize).text == "ab"
    kept = answer(
        chat(role="assistant", content=""),
        chat(content="a"),
        chat("stop", content=None),
        kept=sys.maxsize,
    )
    assert kept.text == "a"


def test_text_is_kept_from_the_start_as_far_as_there_is_room():
    messages = [text("a"), text("b"), text("c"), text("d", "length"), usage(4)]
    for room, kept in enumerate(["a", "ab", "abc", "abcd", "abcd"], 1):
        record = answer(*messages, kept=room)
        assert record.text == kept
        assert replace(record, text=None) == answer(*messages), "nothing else changes"


def test_what_a_model_thought_is_text_before_what_it_said():
    thought = [chat(reasoning_content="a"), chat(reasoning="b"), chat(content="c")]
    assert answer(*thought, chat("stop", content="d"), kept=9).text == "abcd"


def test_halves_of_a_character_in_two_messages_are_put_together():
    # An emoji beyond the first plane is two escapes in JSON, and servers may cut between them.
    assert answer(text("a\ud83d"), text("\ude00b", "stop"), kept=9).text == "a\U0001f600b"
    assert answer(text("a\ud83d"), text("b", "stop"), kept=9).text == "a\ufffdb"


@pytest.mark.parametrize(
    "odd", [b'{"choices":[7]', b'{"choices":{}', b'{"choices":[]', b'{"choices":[{"delta":7}]']
)
def test_a_message_of_another_shape_has_no_text(odd):
    message = odd + b',"finish_reason":null}'
    assert answer(text("a"), message, text("b", "stop"), kept=9).text == "ab"


def test_text_is_kept_of_the_requests_that_are_named():
    some = KeptText(frozenset({2, 5}), messages=7)
    assert [some.messages_of(index) for index in (1, 2, 5)] == [0, 7, 7]
    assert KeptText().messages_of(3) == sys.maxsize


def test_tokens_that_arrive_together_have_no_gap():
    got = Answer()
    got.sent(0.0)
    got.head(200)
    got.body(b"".join(encode([text("a"), text("b"), text("c")])), 1.0)
    got.body(b"".join(encode([text("d", "stop"), b"[DONE]"])), 3.0)
    got.end(None, 3.0)
    record = got.record(REQUEST, index=0, scheduled_s=0.0, start_s=0.0)
    assert record.gaps_s == (0.0, 0.0, 2.0)


def test_a_stream_without_done_is_incomplete():
    record = answer(text("a"), text("b", "stop"), done=False)
    assert record.error == "incomplete: the stream ended without [DONE]"
    assert record.end_s == 3.0
    assert record.output_tokens == 2


def test_a_lost_connection_after_done_does_no_harm():
    assert answer(text("a", "stop"), error="connection reset").error is None


def test_a_lost_connection_before_done_is_the_error():
    assert answer(text("a"), done=False, error="connection reset").error == "connection reset"


def test_a_message_cut_by_a_lost_connection_does_not_hide_why():
    got = Answer()
    got.head(200)
    got.body(b'data: {"choices":[{"te', 1.0)
    got.end("connection reset", 2.0)
    assert got.error == "connection reset"


def test_a_message_cut_by_the_end_of_the_body_is_malformed():
    got = Answer()
    got.head(200)
    got.body(b'data: {"choices":[{"te', 1.0)
    got.end(None, 2.0)
    assert got.error == 'malformed stream: {"choices":[{"te'


def test_an_error_in_the_stream_is_the_error():
    record = answer(text("a"), {"error": {"message": "engine died", "code": 500}})
    assert record.error == "server error: engine died"
    assert not record.ok


@pytest.mark.parametrize(
    "garbage", [b"{not json", b"[1]", b'{"choices":[{"text":"a","finish_reason":null']
)
def test_garbage_in_the_stream_is_an_error(garbage):
    record = answer(text("a"), garbage, text("b", "stop"))
    assert record.error.startswith("malformed stream: ")
    assert garbage.decode() in record.error


def test_a_page_that_is_no_stream_is_an_error():
    got = Answer()
    got.head(200)
    got.body(b"<html>welcome</html>", 1.0)
    got.end(None, 1.0)
    assert got.error == "incomplete: the stream ended without [DONE]"


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error":{"message":"too  long"}}', "HTTP 400: too long"),
        (b'{"detail":"not here"}', "HTTP 400: not here"),
        (b"plain\ntext", "HTTP 400: plain text"),
        (b"", "HTTP 400: no body"),
        (b'{"error":{"code":7}}', 'HTTP 400: {"code": 7}'),
        (b"x" * 1000, "HTTP 400: " + "x" * 300 + "..."),
    ],
)
def test_a_refusal_is_told_with_its_reason(body, shown):
    got = Answer()
    got.head(400)
    got.body(body, 1.0)
    got.end(None, 1.0)
    assert got.error == shown


def test_what_ended_stays_ended():
    got = Answer()
    got.end("stopped: server died", 1.0)
    got.end("connection reset", 2.0)
    assert (got.error, got.end_s) == ("stopped: server died", 1.0)


@given(st.lists(st.integers(0, 5000), max_size=20), st.booleans())
def test_the_record_is_the_same_wherever_the_network_cuts(places, escaped):
    messages = [chat(role="assistant", content=""), chat(content="é日😀\r\n"), chat(content="")]
    messages += [chat("stop", content="b"), usage(3), b"[DONE]"]
    stream = b"".join(encode(messages, ensure_ascii=escaped))
    bounds = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    got = Answer(kept_messages=9)
    got.sent(0.0)
    got.head(200)
    for a, b in pairwise(bounds):
        got.body(stream[a:b], 1.0)
    got.end(None, 1.0)
    record = got.record(REQUEST, index=0, scheduled_s=0.0, start_s=0.0)
    assert record.error is None
    assert record.gaps_s == (0.0, 0.0)
    assert (record.input_tokens, record.output_tokens, record.finish_reason) == (5, 3, "stop")
    assert record.text == "é日😀\r\nb"
