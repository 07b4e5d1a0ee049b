from collections import Counter

import pytest

from kvtune.errors import BadTrace
from kvtune.profilers.workload import stream_requests

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def write(tmp_path, body, header=HEADER):
    path = tmp_path / "burst.csv"
    path.write_text(header + body)
    return path


def test_failed_requests_are_skipped_and_counted(tmp_path):
    path = write(
        tmp_path,
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,GPT-4,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,API log\n",
    )
    skipped = Counter()
    requests = list(stream_requests(path, skipped=skipped))
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in requests] == [
        (0.0, 472, 18),
        (113.0, 417, 276),
    ]
    assert skipped == {"failed requests (0 response tokens)": 1}


def test_a_session_is_the_conversation_of_its_requests(tmp_path):
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\n"
    path = write(tmp_path, "1,8,2.5,GPT-4,10,5\n2,,1.5,GPT-4,20,5\n", header)
    assert [r.conversation for r in stream_requests(path)] == ["8", None]


def test_a_trace_of_failures_only_says_so(tmp_path):
    path = write(tmp_path, "5,ChatGPT,472,0,472,API log\n")
    with pytest.raises(BadTrace, match=r"no requests in it: 1 failed requests"):
        list(stream_requests(path))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("soon,GPT-4,1,1,2,API log", "'Timestamp' must be a finite number, got 'soon'"),
        ("6,GPT-4,1.5,1,2,API log", "'Request tokens' must be a whole number, got 1.5"),
        ("6,GPT-4,1,-1,2,API log", "'Response tokens' must be from 0"),
        ("4,GPT-4,1,1,2,API log", "the time goes back"),
    ],
)
def test_a_malformed_line_is_named_by_number_and_reason(tmp_path, bad, reason):
    with pytest.raises(BadTrace, match=reason) as caught:
        list(stream_requests(write(tmp_path, f"5,GPT-4,1,1,2,API log\n{bad}\n")))
    assert caught.value.line == 3
