"""One replay: fresh prompts every time, and nothing sent that cannot fit."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.base import ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.errors import BadInput
from kvtune.profilers.load.client import ClosedLoop, OpenLoop
from kvtune.profilers.load.warmup import Pace
from kvtune.profilers.measure import (
    LoadPlan,
    ask_text,
    prepare_requests,
    replay_workload,
    sent_requests,
    without_text,
)
from kvtune.types import Endpoint, Request

VLLM = Endpoint("http://127.0.0.1:1", "m")
OTHER = Endpoint("http://127.0.0.1:1", "m", is_vllm=False)
PLAN = LoadPlan(ClosedLoop(2), vocab_size=1000)


def bodies(requests, plan=PLAN, endpoint=VLLM, *, salt=1, longest=None):
    prepared, warnings = prepare_requests(
        requests, plan, endpoint, salt=salt, max_model_len_tokens=longest
    )
    return [json.loads(one.body) for one in prepared], warnings


def test_lengths_become_other_tokens_with_another_salt():
    request = Request(input_tokens=64, output_tokens=4)
    (first,), _ = bodies([request], salt=1)
    (again,), _ = bodies([request], salt=1)
    (second,), _ = bodies([request], salt=2)
    assert first == again
    assert len(first["prompt"]) == len(second["prompt"]) == 64
    assert first["prompt"] != second["prompt"]
    assert max(first["prompt"]) < 1000


def test_text_is_kept_apart_from_earlier_replays_by_the_salt_of_the_cache():
    request = Request(prompt="the same words", output_tokens=4)
    (first,), _ = bodies([request], salt=1)
    (second,), _ = bodies([request], salt=2)
    assert first["prompt"] == second["prompt"] == "the same words"
    assert first["cache_salt"] != second["cache_salt"]


def test_requests_of_one_replay_share_their_prefix_and_their_salt():
    shared = Request(input_tokens=64, prefix_blocks=(7,), prefix_block_tokens=32, output_tokens=4)
    (first, second), _ = bodies([shared, shared])
    assert first["prompt"][:32] == second["prompt"][:32]
    assert first["prompt"][32:] != second["prompt"][32:]
    assert first["cache_salt"] == second["cache_salt"]


def test_a_server_that_is_no_vllm_is_not_sent_what_only_vllm_knows():
    (body,), _ = bodies([Request(prompt="words")], endpoint=OTHER)
    assert "cache_salt" not in body


def test_the_length_of_answers_is_fixed_unless_they_may_stop():
    request = Request(prompt="words", output_tokens=7)
    (fixed,), _ = bodies([request])
    assert (fixed["max_tokens"], fixed["min_tokens"], fixed["ignore_eos"]) == (7, 7, True)
    natural = LoadPlan(ClosedLoop(1), fixed_length=False, default_output_tokens=9)
    (free,), _ = bodies([Request(prompt="words")], natural)
    assert free["max_tokens"] == 9
    assert "min_tokens" not in free


def test_what_does_not_fit_the_context_is_cut_or_left_out_and_said():
    requests = [
        Request(input_tokens=10, output_tokens=10),
        Request(input_tokens=200, output_tokens=10),
        Request(input_tokens=1, output_tokens=500),
    ]
    sent, warnings = bodies(requests, longest=100)
    assert [len(body["prompt"]) for body in sent] == [10, 90]
    assert any("1 of 3 prompts were cut" in warning for warning in warnings)
    assert any("1 of 3 requests do not fit" in warning for warning in warnings)


@given(
    st.lists(
        st.builds(
            Request,
            input_tokens=st.integers(1, 300),
            output_tokens=st.one_of(st.none(), st.integers(1, 300)),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(2, 200),
)
def test_nothing_is_sent_that_the_server_would_refuse(requests, longest):
    sent, _ = bodies(requests, LoadPlan(ClosedLoop(1), default_output_tokens=8), longest=longest)
    for body in sent:
        assert len(body["prompt"]) >= 1
        assert len(body["prompt"]) + body["max_tokens"] <= longest


@pytest.mark.parametrize(
    "other",
    [
        LoadPlan(ClosedLoop(3)),
        LoadPlan(OpenLoop()),
        LoadPlan(OpenLoop(time_scale=0.5)),
        LoadPlan(ClosedLoop(2), fixed_length=False),
        LoadPlan(ClosedLoop(2), default_output_tokens=64),
        LoadPlan(ClosedLoop(2), warmup_requests=0),
        LoadPlan(ClosedLoop(2), at_boundary=True),
    ],
    ids=str,
)
def test_plans_that_measure_something_else_have_other_keys(other):
    plan = LoadPlan(ClosedLoop(2))
    assert other.key() != plan.key()
    assert json.loads(json.dumps(plan.key())) == plan.key()


def test_what_was_stored_before_a_setting_was_there_is_still_found():
    assert LoadPlan(ClosedLoop(2), warmup_most=16).key() == {
        "arrivals": "ClosedLoop(concurrency=2)",
        "fixed_length": True,
        "default_output_tokens": 128,
        "warmup_requests": 4,
    }


def test_only_a_closed_loop_has_a_concurrency_and_only_where_it_is_fixed():
    assert LoadPlan(ClosedLoop(3)).concurrency == 3
    assert LoadPlan(ClosedLoop(3), at_boundary=True).concurrency is None
    assert LoadPlan(OpenLoop()).concurrency is None


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    spec = ServerSpec("m", arguments={"simulate-time-scale": 0.01, "max-model-len": 2048})
    with SimulatedEngine().launch(spec, log_path=log) as running:
        yield running.endpoint


def test_a_replay_sends_everything_once_and_leaves_the_warm_up_out(server):
    load = [Request(input_tokens=32, output_tokens=4)] * 6
    plan = LoadPlan(ClosedLoop(2), warmup_requests=3)
    run = asyncio.run(replay_workload(server, load, plan, salt=5, max_model_len_tokens=2048))
    assert [record.output_tokens for record in run.records] == [4] * 6
    assert run.counters["vllm:generation_tokens_total"] == 24
    assert run.counters["vllm:prefix_cache_hits_total"] == 0, "not even what the warm-up sent"


@pytest.mark.parametrize(("most", "warmed"), [(None, 3), (16, 6)])
def test_a_warm_up_that_never_gets_steady_has_a_limit(most, warmed, server, monkeypatch):
    seen = []

    def unsteady(records):
        seen.extend(records)
        return Pace(0.01, 0.02)

    monkeypatch.setattr("kvtune.profilers.load.client.pace_of", unsteady)
    load = [Request(input_tokens=32, output_tokens=4)] * 6
    plan = LoadPlan(ClosedLoop(2), warmup_requests=3, warmup_most=most)
    run = asyncio.run(replay_workload(server, load, plan, salt=5, max_model_len_tokens=2048))
    assert len(run.records) == 6
    assert len(seen) == (0 if most is None else warmed)
    assert any("still unsteady after 6" in said for said in run.warnings) is (most is not None)


def test_the_text_of_each_different_prompt_is_kept_once_and_only_where_it_is_wanted(server):
    text = "The door is green and old. Question: The door is green"
    too_long = Request(input_tokens=8, output_tokens=5000)
    load = [too_long, *[Request(prompt=text, output_tokens=2)] * 2, Request(input_tokens=9)]

    def replayed(**options):
        return asyncio.run(
            replay_workload(server, load, PLAN, salt=5, max_model_len_tokens=2048, **options)
        )

    kept = replayed(keep_text=True)
    said = [record.text for record in kept.records]
    assert said[:2] == [" and old.", None]
    assert len(said[2].split()) == 128
    sent = sent_requests(load, PLAN, max_model_len_tokens=2048)
    assert [sent[record.index].prompt for record in kept.records] == [text, text, None]
    assert [record.text for record in replayed().records] == [None] * 3
    assert [record.text for record in without_text(kept).records] == [None] * 3


def test_a_load_that_cannot_fit_at_all_is_bad_input(server):
    load = [Request(input_tokens=8, output_tokens=5000)]
    with pytest.raises(BadInput, match="none of the 1 requests fits") as refusal:
        asyncio.run(replay_workload(server, load, PLAN, salt=5, max_model_len_tokens=2048))
    assert "--max-model-len" in refusal.value.fix


def test_a_question_is_answered_with_text(server):
    text = "The door is green and old. Question: The door is green"
    answer = asyncio.run(ask_text(server, Request(prompt=text, output_tokens=8)))
    assert answer == " and old."


def test_a_question_to_nobody_is_a_connection_error():
    with pytest.raises(ConnectionError, match="refused"):
        asyncio.run(ask_text(Endpoint("http://127.0.0.1:9", "m"), Request(prompt="words")))
