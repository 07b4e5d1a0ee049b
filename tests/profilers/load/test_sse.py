from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.load import sse
from kvtune.profilers.load.sse import EventSplitter

line = st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b""))
events = st.lists(st.lists(line, min_size=1, max_size=3), max_size=6)
noise = st.sampled_from([b"", b": ping", b"event: message", b"id: 7"])
ending = st.sampled_from([b"\n", b"\r\n", b"\r"])


def cut(data, places):
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


@given(events, noise, st.booleans(), ending, st.lists(st.integers(0, 10_000), max_size=12))
def test_events_are_the_same_wherever_the_network_cuts(events, noise, space, ending, places):
    stream = b""
    for lines in events:
        if noise:
            stream += noise + ending
        for content in lines:
            stream += (b"data: " if space else b"data:") + content + ending
        stream += ending
    expected = [
        b"\n".join(content if space else content.removeprefix(b" ") for content in lines)
        for lines in events
    ]
    splitter = EventSplitter()
    got = [event for piece in cut(stream, places) for event in splitter.feed(piece)]
    assert got == expected
    assert splitter.finish() is None


def test_an_event_is_there_as_soon_as_its_blank_line_is():
    splitter = EventSplitter()
    assert splitter.feed(b'data: {"a":1}\n') == []
    assert splitter.feed(b"\n") == [b'{"a":1}']
    assert splitter.feed(b"data: 1\r\n\r") == [b"1"]
    assert splitter.feed(b"\ndata: 2\n\n") == [b"2"]


def test_line_endings_may_be_mixed():
    assert EventSplitter().feed(b"data: a\rdata: b\n\n") == [b"a\nb"]
    assert EventSplitter().feed(b"data: a\r\n\n") == [b"a"]
    splitter = EventSplitter()
    assert splitter.feed(b"data: 0\r\r") == [b"0"]
    assert splitter.feed(b"data: 1\n\n") == [b"1"]
    assert splitter.feed(b"\ndata: 2\n\n") == [b"2"]


def test_comments_alone_are_no_event():
    assert EventSplitter().feed(b": keep-alive\n\n\n\n: again\n\n") == []


def test_an_unclosed_event_is_handed_out_at_the_end():
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n\ndata: [DONE]") == [b"1"]
    assert splitter.finish() == b"[DONE]"
    assert splitter.finish() is None


def test_an_endless_event_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "EVENT_LIMIT_BYTES", 100)
    splitter = EventSplitter()
    splitter.feed(b"data: " + b"x" * 90)
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        splitter.feed(b"x" * 10)
