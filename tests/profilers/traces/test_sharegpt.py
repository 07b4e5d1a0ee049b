import gzip
import json
import tracemalloc
from collections import Counter

import pytest

from kvtune.errors import BadTrace
from kvtune.profilers.traces import sharegpt
from kvtune.profilers.workload import stream_requests
from kvtune.types import Request


def conversation(*values, name="c", first="human"):
    speakers = ("human", "gpt") if first == "human" else ("gpt", "human")
    turns = [{"from": speakers[i % 2], "value": value} for i, value in enumerate(values)]
    return {"id": name, "conversations": turns}


def write(tmp_path, content):
    path = tmp_path / "sharegpt.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def test_the_first_human_turn_is_the_prompt_and_the_output_is_unknown(tmp_path):
    path = write(
        tmp_path,
        [conversation("Hällo", "Hi", "Why?", "Because"), conversation("So", "What", first="gpt")],
    )
    assert list(stream_requests(path)) == [Request(prompt="Hällo"), Request(prompt="What")]


def test_each_turn_carries_the_history_when_asked_for(tmp_path):
    path = write(tmp_path, [conversation("a", "b", "c", "d", name="x"), conversation("e", "f")])
    requests = list(stream_requests(path, "sharegpt_turns"))
    assert [[m["content"] for m in r.messages] for r in requests] == [["a"], ["a", "b", "c"], ["e"]]
    assert [m["role"] for m in requests[1].messages] == ["user", "assistant", "user"]
    assert [r.conversation for r in requests] == ["x", "x", "c"]


@pytest.mark.parametrize("format", ["sharegpt", "sharegpt_turns"])
def test_conversations_without_a_human_turn_are_skipped_and_counted(tmp_path, format):
    skipped = Counter()
    path = write(tmp_path, [conversation(), conversation("a", first="gpt"), conversation("b")])
    assert len(list(stream_requests(path, format, skipped=skipped))) == 1
    assert skipped == {"conversations without a human turn": 2}


@pytest.mark.parametrize("window", [1, 2, 7, 64])
@pytest.mark.parametrize("indent", [None, 2])
def test_any_window_reads_the_same_as_the_whole_file(tmp_path, monkeypatch, window, indent):
    monkeypatch.setattr(sharegpt, "WINDOW_CHARACTERS", window)
    values = ['quote " and \\ slash', "ü" * 50, "[{]}, \n", "123", "\U0001f600", "x" * 300]
    conversations = [conversation(*values[i:], name=str(i)) for i in range(5)]
    path = write(tmp_path, "\ufeff" + json.dumps(conversations, indent=indent) + "\n\n")
    assert [r.prompt for r in stream_requests(path, "sharegpt")] == values[:5]


def test_a_large_file_is_streamed(tmp_path):
    line = json.dumps(conversation("x" * 1000, "y" * 3000))
    path = tmp_path / "sharegpt.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write("[" + line)
        for _ in range(6000):
            file.write("," + line)
        file.write("]")
    tracemalloc.start()
    try:
        assert sum(1 for _ in stream_requests(path)) == 6001
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ('[{"conversations": []},\n{"conversations": [}]', 2, "not JSON: Expecting value"),
        ('[{"conversations": []},\n{"conversations": [\n', 3, "not JSON"),
        ('[{"conversations": []}\n', 2, "the list is cut off"),
        ('[{"conversations": []}\n{"conversations": []}]', 2, "expected ',', found '{'"),
        ('[{"conversations": []}]\n\n[]', 3, "text after the end"),
        ('[{"conversations": []},\n\n 5]', 3, "each element must be an object, got 5"),
        ('[{"conversations": []},\n{"id": "a"}]', 2, "no 'conversations', only 'id'"),
        ('[{"conversations": 5}]', 1, "must be a list"),
        ('[\n{"conversations": [{"from": "human"}]}]', 2, "a text 'value'"),
        ('[{"conversations": [{"from": "dog", "value": "w"}]}]', 1, "from 'dog', which is none"),
        ('[{"conversations": NaN}]', 1, "NaN is not a number"),
        ('[{"conversations": ' + "[" * 100_000, 1, "not JSON"),
        ('[{"conversations": []}]', 1, "no requests in it: 1 conversations without"),
    ],
)
def test_a_malformed_element_is_named_by_line_and_reason(tmp_path, content, line, reason):
    with pytest.raises(BadTrace, match=reason) as caught:
        list(stream_requests(write(tmp_path, content), "sharegpt"))
    assert caught.value.line == line


def test_a_syntax_error_is_reported_without_reading_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(sharegpt, "WINDOW_CHARACTERS", 100)
    path = tmp_path / "sharegpt.json"
    path.write_bytes(b'[{"conversations": oops, "rest": [' + b"1," * 10_000 + b"\xff")
    with pytest.raises(BadTrace, match="not JSON: Expecting value"):
        list(stream_requests(path, "sharegpt"))


def test_text_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "sharegpt.json"
    path.write_bytes(b'[{"conversations": [{"from": "human", "value": "caf\xe9"}]}]')
    with pytest.raises(BadTrace, match="not UTF-8"):
        list(stream_requests(path))


def test_an_element_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sharegpt, "MAX_RECORD_BYTES", 1 << 20)
    path = write(tmp_path, '[{"conversations": "' + "x" * (4 << 20))
    with pytest.raises(BadTrace, match="longer than 1 MiB"):
        list(stream_requests(path))
