"""From a workload and what a run saw of it to requests that can be simulated."""

from __future__ import annotations

import pytest

from kvtune.autotune.forecast.requests import SimulatedRequest, shuffled, simulated_requests
from kvtune.profilers.load.arrivals import ClosedLoop, OpenLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import Request, RequestRecord

CLOSED = LoadPlan(ClosedLoop(2))


def seen(index, input_tokens, output_tokens, error=None):
    first_s = None if error else 1.0
    return RequestRecord(
        index, 0.0, 0.0, first_s, 2.0, (), input_tokens, output_tokens, None, error=error
    )


def test_lengths_are_those_that_were_seen_and_failed_requests_are_left_out():
    requests = [Request(input_tokens=20, output_tokens=5)] * 3
    records = [seen(0, 20, 5), seen(1, None, 0, error="timeout"), seen(2, 21, 4)]
    found = simulated_requests(requests, CLOSED, records, max_model_len_tokens=None)
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [(20, 5), (21, 4)]


def test_blocks_of_equal_id_are_shared_and_what_follows_is_not():
    requests = [
        Request(input_tokens=40, output_tokens=1, prefix_blocks=(7, 8), prefix_block_tokens=16),
        Request(input_tokens=40, output_tokens=1, prefix_blocks=(7, 9), prefix_block_tokens=16),
    ]
    records = [seen(0, 40, 1), seen(1, 40, 1)]
    first, second = simulated_requests(requests, CLOSED, records, max_model_len_tokens=None)
    alike = [a == b for a, b in zip(first.hashes(8), second.hashes(8), strict=True)]
    assert alike == [True, True, False, False, False]


def test_texts_that_begin_alike_share_a_prefix():
    system = "You are a terse assistant. " * 10  # 270 characters
    requests = [Request(prompt=system + "a" * 30), Request(prompt=system + "b" * 30)]
    # 300 characters in 100 tokens: three characters a token, 90 tokens alike, 5 blocks of 16.
    records = [seen(0, 100, 1), seen(1, 100, 1)]
    first, second = simulated_requests(requests, CLOSED, records, max_model_len_tokens=None)
    alike = [a == b for a, b in zip(first.hashes(16), second.hashes(16), strict=True)]
    assert alike == [True] * 5 + [False]


def test_chats_of_one_conversation_share_its_past():
    past = ({"role": "user", "content": "long " * 40},)
    requests = [
        Request(messages=past),
        Request(messages=(*past, {"role": "assistant", "content": "yes"})),
    ]
    records = [seen(0, 60, 1), seen(1, 70, 1)]
    first, second = simulated_requests(requests, CLOSED, records, max_model_len_tokens=None)
    assert first.hashes(16)[:3] == second.hashes(16)[:3]


def test_times_are_those_of_the_trace_in_its_order():
    requests = [Request(arrival_s=at, input_tokens=8, output_tokens=1) for at in (9.0, 4.0, 5.0)]
    records = [seen(index, 8, 1) for index in range(3)]
    plan = LoadPlan(OpenLoop(time_scale=2.0))
    found = simulated_requests(requests, plan, records, max_model_len_tokens=None)
    assert [request.due_s for request in found] == [0.0, 2.0, 10.0]
    closed = simulated_requests(requests, CLOSED, records, max_model_len_tokens=None)
    assert [request.due_s for request in closed] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", [1, 2])
def test_another_order_keeps_the_times_and_moves_nobody_far(seed):
    requests = [SimulatedRequest(at + 1, 1, (), due_s=float(at)) for at in range(50)]
    other = shuffled(requests, 5, seed)
    assert [request.due_s for request in other] == [request.due_s for request in requests]
    places = [request.prompt_tokens - 1 for request in other]
    assert sorted(places) == list(range(50)) != places
    assert max(abs(place - at) for at, place in enumerate(places)) <= 5
    assert shuffled(requests, 5, 0) == requests
