from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import BadInput, BadTrace, NotFound
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.synthetic import SyntheticSpec, make_requests
from kvtune.profilers.traces.prompts_jsonl import format_line
from kvtune.profilers.workload import load_workload, split, stream_requests
from kvtune.types import Request

SAMPLES = {
    "prompts_jsonl": '{"output_tokens": 5, "prompt": "about \\"hash_ids\\""}\n',
    "mooncake": (
        '{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [1], "prompt": ""}\n'
    ),
    "sharegpt": '[{"id": "a", "conversations": [{"from": "human", "value": "a"}]}]',
    "azure_csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
    "burstgpt_csv": "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n",
}


def save(tmp_path, requests):
    path = tmp_path / "my-load.v2.jsonl"
    path.write_text("".join(format_line(request) + "\n" for request in requests))
    return path


def synthetic(requests, **fields):
    return list(make_requests(SyntheticSpec(requests=requests, **fields), seed=1))


@pytest.mark.parametrize("name", [n for n in SAMPLES if n != "mooncake"])
def test_a_format_is_recognised_by_content(tmp_path, name):
    path = tmp_path / "trace"
    path.write_text(SAMPLES[name])
    requests = list(stream_requests(str(path)))
    assert requests == list(stream_requests(path, name))
    for other in SAMPLES.keys() - {name}:
        with pytest.raises(BadTrace):
            list(stream_requests(path, other))


def test_a_file_that_fits_two_formats_is_refused(tmp_path):
    path = tmp_path / "trace"
    path.write_text(SAMPLES["mooncake"])
    with pytest.raises(BadInput, match="could be any of mooncake, prompts_jsonl") as caught:
        stream_requests(path)
    assert "--format" in caught.value.fix
    assert len(list(stream_requests(path, "mooncake"))) == 1


def test_a_file_in_no_format_is_refused_naming_what_was_tried(tmp_path):
    path = tmp_path / "trace"
    path.write_text("num_prefill_tokens,num_decode_tokens\n1,2\n")
    with pytest.raises(BadInput, match=r"tried azure_csv, .*prompts_jsonl.*begins with 'num_pref"):
        stream_requests(path)


def test_an_unknown_format_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(BadInput, match="no trace format 'moon-cake'") as caught:
        stream_requests(tmp_path, "moon-cake")
    assert caught.value.fix == "Did you mean 'mooncake'?"


def test_a_missing_file_and_one_without_requests_are_refused(tmp_path):
    with pytest.raises(NotFound):
        load_workload(tmp_path / "absent.jsonl")
    path = tmp_path / "trace"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(BadTrace, match=r"there are no requests in it$"):
        load_workload(path)


def test_a_workload_has_a_name_a_source_and_a_fingerprint_of_all_requests(tmp_path):
    requests = synthetic(100, arrival="poisson:5")
    path = save(tmp_path, requests)
    workload = load_workload(path)
    assert (workload.name, workload.source) == ("my-load", str(path))
    assert (len(workload.requests), len(workload.heldout)) == (75, 25)
    assert workload.fingerprint == fingerprint(requests)
    assert load_workload(path, name="mine").name == "mine"


def test_the_limit_takes_the_first_requests(tmp_path):
    requests = synthetic(100, arrival="poisson:5")
    workload = load_workload(save(tmp_path, requests), limit=10, heldout_share=0)
    assert workload.requests == tuple(requests[:10])
    assert workload.heldout == ()
    assert workload.fingerprint.requests == 10


def test_text_is_counted_when_there_is_a_tokenizer(tmp_path):
    path = save(tmp_path, [Request(prompt="abc"), Request(prompt="abcde")])
    workload = load_workload(path, count_tokens=lambda text: list(text.encode()))
    assert workload.fingerprint.input_tokens.mean == 4


@pytest.mark.parametrize("bad", [{"limit": 0}, {"heldout_share": 1}, {"heldout_share": -0.1}])
def test_impossible_limits_and_shares_are_refused(tmp_path, bad):
    with pytest.raises(BadInput, match="must be at least"):
        load_workload(tmp_path, **bad)


conversations = st.lists(st.sampled_from([None, "a", "b", "c", "d"]), min_size=1, max_size=30)


@settings(deadline=None)
@given(
    conversations,
    st.lists(st.integers(0, 5000), min_size=30, max_size=30),
    st.booleans(),
    st.floats(0, 0.9),
    st.integers(0, 5),
)
def test_a_split_loses_nothing_divides_nothing_and_keeps_the_order(names, gaps, timed, share, seed):
    times_s = [sum(gaps[:i]) / 1000 for i in range(len(names))]
    requests = [
        Request(arrival_s=times_s[i] if timed else None, input_tokens=i + 1, conversation=name)
        for i, name in enumerate(names)
    ]
    tune, heldout = split(requests, share, seed)
    assert split(requests, share, seed) == (tune, heldout)
    whole = [replace(r, arrival_s=None) for r in (*tune, *heldout)]
    assert sorted(whole, key=lambda r: r.input_tokens) == [
        replace(r, arrival_s=None) for r in requests
    ]
    assert {r.conversation for r in tune} & {r.conversation for r in heldout} <= {None}
    units = len({r.conversation or r.input_tokens for r in requests})
    assert tune
    assert bool(heldout) == (share > 0 and units > 1)
    for part in (tune, heldout):
        if timed:
            arrivals = [r.arrival_s for r in part]
            assert arrivals == sorted(arrivals)
            assert not part or part[0].arrival_s == 0
        else:
            assert [r.input_tokens for r in part] == sorted(r.input_tokens for r in part)
        for name in {r.conversation for r in part} - {None}:
            turns = [r for r in part if r.conversation == name]
            assert [r.input_tokens for r in turns] == sorted(r.input_tokens for r in turns)
            if timed:  # the time between turns is as it was
                spacing = [times_s[r.input_tokens - 1] - r.arrival_s for r in turns]
                assert spacing == pytest.approx([spacing[0]] * len(spacing), abs=1e-5)


def test_each_part_keeps_the_rate_and_the_bursts_of_the_whole():
    requests = synthetic(4000, arrival="gamma:8,0.2")
    whole = fingerprint(requests)
    for seed in range(3):
        for part in split(requests, 0.25, seed):
            result = fingerprint(part)
            assert result.request_rate_per_s == pytest.approx(whole.request_rate_per_s, rel=0.25)
            assert result.burstiness == pytest.approx(whole.burstiness, rel=0.25)


def test_the_seed_chooses_what_is_held_out():
    for arrival in ("poisson:5", None):
        requests = synthetic(200, arrival=arrival, input_tokens="uniform:1-100000")
        held = {tuple(r.input_tokens for r in split(requests, 0.25, s)[1]) for s in range(5)}
        assert len(held) > 1


def test_without_arrivals_the_heldout_part_is_spread_over_the_file():
    requests = [Request(input_tokens=i + 1) for i in range(400)]
    _, heldout = split(requests, 0.25, seed=0)
    assert len(heldout) == 100
    halves = sum(r.input_tokens <= 200 for r in heldout)
    assert 30 < halves < 70


def test_a_conversation_longer_than_the_share_still_leaves_some_to_tune():
    requests = [Request(prompt="a", conversation="x")] * 9 + [Request(prompt="b")]
    tune, heldout = split(requests, 0.25, seed=0)
    assert tune
    assert heldout
    assert split(requests[:9], 0.25, seed=0) == (tuple(requests[:9]), ())


def test_a_bad_line_is_found_while_loading(tmp_path):
    path = tmp_path / "trace"
    path.write_text('{"prompt": "a"}\n{"prompt": 5}\n')
    with pytest.raises(BadTrace, match="line 2"):
        load_workload(path)
