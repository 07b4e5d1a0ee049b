import time
from collections import Counter

import pytest

from kvtune.errors import BadTrace
from kvtune.profilers.workload import stream_requests

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path, body):
    path = tmp_path / "azure.csv"
    path.write_text(HEADER + body)
    return path


def test_timestamps_of_2023_with_seven_digits_are_read(tmp_path):
    path = write(
        tmp_path, "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = stream_requests(path)
    assert (first.arrival_s, second.arrival_s) == (0.0, 4.314579)
    assert (second.input_tokens, second.output_tokens) == (396, 109)
    assert first.prefix_block_tokens == 0


def test_timestamps_of_2024_with_an_offset_and_without_a_fraction_are_read(tmp_path):
    path = write(
        tmp_path,
        "2024-05-10 00:00:00.009930+00:00,2162,5\r\n"
        "2024-05-10 00:00:01+00:00,2399,6\r\n"
        "2024-05-10 02:00:02.5+02:00,10,6\r\n",
    )
    assert [r.arrival_s for r in stream_requests(path)] == [0.0, 0.99007, 2.49007]


def test_a_change_of_the_clock_where_it_is_read_does_not_matter(tmp_path, monkeypatch):
    path = write(tmp_path, "2023-11-05 00:30:00,1,1\n2023-11-05 02:30:00,1,1\n")
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        requests = list(stream_requests(path))
    time.tzset()
    assert requests[1].arrival_s == 7200


def test_rows_without_tokens_are_skipped_and_counted(tmp_path):
    skipped = Counter()
    path = write(tmp_path, "2024-05-10 00:00:00,0,5\n2024-05-10 00:00:01,7,5\n")
    (request,) = stream_requests(path, skipped=skipped)
    assert request.arrival_s == 0.0
    assert skipped.total() == 1


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("yesterday,1,1", "must be a date and time, got 'yesterday'"),
        ("2023-11-16 18:15:47,-4,1", "'ContextTokens' must be from 0"),
        ("2023-11-16 18:15:47,nan,1", "'ContextTokens' must be a whole number, got nan"),
        ("2023-11-16 18:15:47,4,", "'GeneratedTokens' must be a whole number, got ''"),
        ("2023-11-16 18:15:46,4,1", "the time goes back by 0.5 s"),
        ("2023-11-16 18:15:47,4", "2 fields"),
    ],
)
def test_a_malformed_line_is_named_by_number_and_reason(tmp_path, bad, reason):
    path = write(tmp_path, f"2023-11-16 18:15:46.5000000,1,1\n{bad}\n")
    with pytest.raises(BadTrace, match=reason) as caught:
        list(stream_requests(path))
    assert caught.value.line == 3
