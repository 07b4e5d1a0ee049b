import asyncio
import time

import pytest

from kvtune.errors import BadInput
from kvtune.profilers.load.client import ClosedLoop, OpenLoop, replay
from kvtune.types import Endpoint


def test_closed_loop_keeps_the_concurrency_and_sends_in_order(http):
    flying, most = 0, 0

    async def handler(exchange):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.01)
        flying -= 1
        await exchange.tokens(3)

    run, server = http.run_replay(handler, http.requests(12), ClosedLoop(3))
    assert most == 3
    assert [r.index for r in run.records] == list(range(12))
    assert sorted(e.body["prompt"] for e in server.answered[:3]) == ["p0", "p1", "p2"]
    assert all(r.ok and r.output_tokens == 3 for r in run.records)
    assert run.warnings == ()


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_open_loop_keeps_the_scaled_schedule_of_the_trace(http, scale):
    requests = http.requests(4, arrivals_s=[100.3, 100.0, 100.1, 100.2])
    run, server = http.run_replay(http.three_tokens, requests, OpenLoop(scale))
    assert [e.body["prompt"] for e in server.answered] == ["p1", "p2", "p3", "p0"]
    assert [r.index for r in run.records] == [0, 1, 2, 3]
    due_s = [0.3 * scale, 0.0, 0.1 * scale, 0.2 * scale]
    assert [r.scheduled_s for r in run.records] == pytest.approx(due_s)
    assert all(0 <= r.sent_s - r.scheduled_s < 0.5 for r in run.records)


def test_open_loop_does_not_wait_for_slow_answers(http):
    async def slow(exchange):
        await asyncio.sleep(1.0)
        await exchange.tokens(3)

    requests = http.requests(4, arrivals_s=[0.0, 0.02, 0.04, 0.06])
    run, _ = http.run_replay(slow, requests, OpenLoop())
    assert max(r.sent_s for r in run.records) < 0.9


def test_open_loop_with_a_limit_waits_and_keeps_when_it_was_due(http):
    async def slow(exchange):
        await asyncio.sleep(0.1)
        await exchange.tokens(3)

    requests = http.requests(3, arrivals_s=[0.0, 0.0, 0.0])
    run, _ = http.run_replay(slow, requests, OpenLoop(max_concurrency=1))
    assert [r.scheduled_s for r in run.records] == [0.0] * 3
    assert run.records[2].sent_s > 0.2
    assert not any("client late" in warning for warning in run.warnings)


def test_a_late_client_says_so(http):
    def block(_):
        time.sleep(0.3)

    async def handler(exchange):
        await exchange.tokens(2, gap_s=0.1)

    requests = http.requests(30, arrivals_s=[i / 25 for i in range(30)])
    run, _ = http.run_replay(handler, requests, OpenLoop(), on_progress=block)
    assert any(warning.startswith("client late: p99") for warning in run.warnings)


def test_nothing_to_send_is_an_empty_run(http):
    run, _ = http.run_replay(http.three_tokens, [], ClosedLoop(4))
    assert (run.records, run.warnings) == ((), ())
    run, _ = http.run_replay(http.three_tokens, [], OpenLoop())
    assert run.records == ()


@pytest.mark.parametrize(
    ("arrivals", "reason"),
    [
        (ClosedLoop(0), "concurrency has to be at least 1"),
        (OpenLoop(max_concurrency=0), "concurrency has to be at least 1"),
        (OpenLoop(0.0), "time scale has to be above 0"),
        (OpenLoop(), "request 1 has no arrival time"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_is_sent(http, arrivals, reason):
    requests = [http.requests(1, arrivals_s=[0.0])[0], http.requests(1)[0]]
    with pytest.raises(BadInput, match=reason):
        asyncio.run(replay(Endpoint("http://127.0.0.1:9", "m"), requests, arrivals))
