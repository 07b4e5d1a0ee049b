import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import BadTrace
from kvtune.profilers.traces.prompts_jsonl import format_line
from kvtune.profilers.workload import stream_requests
from kvtune.types import Request


def write(path, *records):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_all_four_ways_to_say_what_is_sent_are_read(tmp_path):
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "Hällo", "output_tokens": 7},
        {"messages": [{"role": "user", "content": "Hi"}], "conversation": 12},
        {"token_ids": [3, 1, 2]},
        {"input_tokens": 40, "prefix_blocks": [9, 8], "prefix_block_tokens": 16},
        {"input_tokens": 40},
    )
    assert list(stream_requests(path)) == [
        Request(prompt="Hällo", output_tokens=7),
        Request(messages=({"role": "user", "content": "Hi"},), conversation="12"),
        Request(token_ids=(3, 1, 2)),
        Request(input_tokens=40, prefix_blocks=(9, 8), prefix_block_tokens=16),
        Request(input_tokens=40),
    ]


def test_arrivals_start_at_zero(tmp_path):
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "a", "arrival_s": 12},
        {"prompt": "b", "arrival_s": 13.5},
    )
    assert [r.arrival_s for r in stream_requests(path)] == [0.0, 1.5]


def test_keys_of_other_tools_are_ignored(tmp_path):
    path = write(tmp_path / "prompts.jsonl", {"id": 4, "prompt": "a", "category": "math"})
    assert list(stream_requests(path)) == [Request(prompt="a")]


@pytest.mark.parametrize(
    ("bad", "reason", "fix"),
    [
        ({"output_tokens": 4}, "exactly one of .* got none", ""),
        ({"prompt": "a", "input_tokens": 4}, "got 'prompt' and 'input_tokens'", ""),
        ({"prompt": "a", "output_token": 4}, "no key 'output_token'", "'output_tokens'"),
        ({"prompt": ""}, "'prompt' must be text that is not empty", ""),
        ({"prompt": 4}, "'prompt' must be text", ""),
        ({"prompt": "a", "output_tokens": 0}, "'output_tokens' must be from 1", ""),
        ({"prompt": "a", "prefix_blocks": [1]}, "goes with 'input_tokens', not with 'prompt'", ""),
        ({"prompt": "a", "arrival_s": 4}, "on all lines or on none", ""),
        ({"prompt": "a", "conversation": [4]}, "'conversation' must be text", ""),
        ({"messages": []}, "'messages' must be a list", ""),
        ({"messages": [{"content": "a"}]}, "an object with a 'role'", ""),
        ({"token_ids": []}, "'token_ids' is empty", ""),
        ({"token_ids": [1, -1]}, "negative", ""),
        ({"input_tokens": 0}, "'input_tokens' must be from 1", ""),
        ({"input_tokens": 9, "prefix_blocks": [1]}, "no 'prefix_block_tokens'", ""),
        ({"input_tokens": 9, "prefix_blocks": [1, 2], "prefix_block_tokens": 16}, "2 blocks", ""),
        ('{"prompt": "a"', "not JSON", ""),
        ('"a"', "must be a JSON object", ""),
    ],
)
def test_a_malformed_line_is_named_by_number_and_reason(tmp_path, bad, reason, fix):
    path = write(tmp_path / "prompts.jsonl", {"prompt": "a"}, bad)
    with pytest.raises(BadTrace, match=reason) as caught:
        list(stream_requests(path))
    assert caught.value.line == 2
    assert fix in caught.value.fix


texts = st.text(min_size=1)
ids = st.lists(st.integers(0, 2**64), max_size=5).map(tuple)
contents = st.one_of(
    st.builds(lambda text: {"prompt": text}, texts),
    st.builds(lambda text: {"messages": ({"role": "user", "content": text},)}, st.text()),
    st.builds(lambda ids: {"token_ids": (1, *ids)}, ids),
    st.builds(
        lambda blocks, more: {
            "input_tokens": len(blocks) * 16 + more,
            "prefix_blocks": blocks,
            "prefix_block_tokens": 16,
        },
        ids,
        st.integers(1, 100),
    ),
)
rests = st.fixed_dictionaries(
    {}, optional={"output_tokens": st.integers(1, 9999), "conversation": st.text()}
)


@settings(deadline=None)
@given(st.lists(st.tuples(contents, rests), min_size=1, max_size=5))
def test_what_is_written_reads_back(tmp_path_factory, parts):
    requests = [Request(**content, **rest) for content, rest in parts]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    write(path, *map(format_line, requests))
    assert list(stream_requests(path)) == requests
