import json
from collections import Counter

import pytest

from kvtune.errors import BadTrace
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.workload import stream_requests


def line(**changes):
    record = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    return json.dumps({**record, **changes})


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_hash_ids_become_blocks_of_512_tokens_and_milliseconds_seconds(tmp_path):
    path = write(tmp_path, line(timestamp=27_000), line(timestamp=27_480, hash_ids=[0, 7]))
    first, second = stream_requests(path)
    assert (first.arrival_s, second.arrival_s) == (0.0, 0.48)
    assert (first.input_tokens, first.output_tokens) == (600, 5)
    assert (second.prefix_blocks, second.prefix_block_tokens) == ((0, 7), 512)
    assert first.conversation is None


def test_twelve_shared_hash_ids_are_6144_reusable_tokens(tmp_path):
    shared = list(range(12))
    path = write(
        tmp_path,
        line(input_length=6758, hash_ids=[*shared, 12, 13]),
        line(input_length=7322, hash_ids=[*shared, 14, 15, 16]),
    )
    shares = fingerprint(stream_requests(path)).reusable_prefix_share
    assert shares == pytest.approx(dict.fromkeys((16, 32, 64, 128, 256, 512), 6144 / 14080))


def test_agent_lines_have_blocks_of_16_tokens_and_a_session_but_no_arrival(tmp_path):
    path = write(
        tmp_path,
        line(agent="a", session=3, turn=0, timestamp=0.0, input_length=40, hash_ids=[0, 1]),
        line(agent="a", session=3, turn=1, timestamp=900.5, input_length=60, hash_ids=[0, 1, 2]),
        line(agent="a", session=4, turn=0, timestamp=0.0, input_length=20, hash_ids=[0]),
    )
    requests = list(stream_requests(path))
    assert [request.conversation for request in requests] == ["3", "3", "4"]
    assert [request.arrival_s for request in requests] == [None, None, None]
    assert {request.prefix_block_tokens for request in requests} == {16}
    assert fingerprint(requests).reusable_prefix_share[16] == pytest.approx((32 + 16) / 120)


def test_a_request_without_tokens_is_skipped_and_counted(tmp_path):
    skipped = Counter()
    path = write(tmp_path, line(), line(output_length=0), line(input_length=0, hash_ids=[]))
    assert len(list(stream_requests(path, skipped=skipped))) == 1
    assert skipped == {"requests without input or output tokens": 2}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (line(input_length=-600), "'input_length' must be from 0"),
        (line(output_length=2.5), "'output_length' must be a whole number"),
        (line(hash_ids="0 1"), "'hash_ids' must be a list"),
        (line(hash_ids=[0, 1, 2]), "'hash_ids' names 3 blocks"),
        (line(timestamp=-1), "the time goes back"),
        (line(timestamp=None), "'timestamp' must be a finite number"),
        ('{"timestamp": 0, "input_length": 6', "not JSON"),
        ('{"timestamp": 5}', "there is no 'input_length'"),
    ],
)
def test_a_malformed_line_is_named_by_number_and_reason(tmp_path, bad, reason):
    with pytest.raises(BadTrace, match=reason) as caught:
        list(stream_requests(write(tmp_path, line(), bad, line())))
    assert caught.value.line == 2
