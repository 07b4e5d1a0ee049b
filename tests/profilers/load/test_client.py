import asyncio
import gc
import time
from itertools import pairwise

import pytest

from kvtune.profilers.load.client import ClosedLoop, KeptText, OpenLoop, replay
from kvtune.types import Endpoint, Failure, FailureClass

DEAD = Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="the server died")


async def hang(exchange):
    await exchange.client_is_gone()


async def one_token_then_hang(exchange):
    exchange.head()
    await exchange.message({"choices": [{"text": "a", "finish_reason": None}]})
    await exchange.client_is_gone()


def test_connections_are_reused_between_requests(http):
    _, server = http.run_replay(http.three_tokens, http.requests(20), ClosedLoop(2))
    assert len({exchange.connection for exchange in server.answered}) == 2


def test_times_are_those_of_the_server(http):
    sent = []

    async def handler(exchange):
        exchange.head()
        for gap_s in (0.08, 0.04, 0.12):
            await asyncio.sleep(gap_s)
            sent.append(time.perf_counter())
            await exchange.message(http.token())
        await exchange.message(http.usage(3))
        await exchange.done()

    run, _ = http.run_replay(handler, http.requests(1), ClosedLoop(1))
    (record,) = run.records
    assert record.first_token_s - record.sent_s >= 0.08
    assert record.gaps_s == pytest.approx([sent[1] - sent[0], sent[2] - sent[1]], abs=0.05)
    assert record.end_s == pytest.approx(record.first_token_s + sum(record.gaps_s))
    assert record.end_s <= run.duration_s
    assert 0 < run.client_cpu_s < run.duration_s


def test_warmup_comes_first_and_is_not_counted(http):
    seen = []

    async def handler(exchange):
        seen.append(exchange.body["prompt"])
        await exchange.tokens(3)

    pages = iter([f"vllm:prompt_tokens_total {n}\n" for n in (40, 50)])
    counted = []

    def metrics():
        counted.append(len(seen))
        return next(pages, "vllm:prompt_tokens_total 70\n")

    warmup = http.requests(2)
    run, _ = http.run_replay(
        handler, http.requests(5)[2:], ClosedLoop(1), metrics=metrics, warmup=warmup
    )
    assert seen == ["p0", "p1", "p2", "p3", "p4"]
    assert len(run.records) == 3
    assert counted[0] == 2


def test_a_failing_warmup_is_told_but_does_not_end_the_run(http):
    async def handler(exchange):
        if exchange.body["prompt"] == "p0":
            exchange.head(503)
            exchange.end()
        else:
            await exchange.tokens(3)

    run, _ = http.run_replay(handler, http.requests(3)[1:], ClosedLoop(1), warmup=http.requests(1))
    assert run.warnings == ("1 of 1 warm-up requests failed: HTTP 503: no body",)
    assert len(run.records) == 2


def test_failures_are_records_and_named_in_a_warning(http):
    async def handler(exchange):
        if exchange.body["prompt"] == "p1":
            exchange.head(503)
            await exchange.send(b'{"error":{"message":"overloaded"}}')
            exchange.end()
        else:
            await exchange.tokens(3)

    run, _ = http.run_replay(handler, http.requests(3), ClosedLoop(3))
    assert [r.error for r in run.records] == [None, "HTTP 503: overloaded", None]
    assert run.warnings == (
        "1 of 3 requests failed, and no latency counts them: HTTP 503: overloaded (1)",
    )


def test_a_dead_server_gives_failed_records_not_an_exception(http, unused_port):
    endpoint = Endpoint(f"http://127.0.0.1:{unused_port}", "m")
    run = asyncio.run(replay(endpoint, http.requests(3), ClosedLoop(2)))
    assert [r.error for r in run.records] == [f"connection refused (127.0.0.1:{unused_port})"] * 3
    assert any("counters are incomplete" in warning for warning in run.warnings)


def test_should_stop_ends_the_run_at_once(http):
    asked = []

    def should_stop():
        asked.append(time.perf_counter())
        return DEAD if len(asked) == 3 else None

    began_s = time.perf_counter()
    run, _ = http.run_replay(
        one_token_then_hang, http.requests(9), ClosedLoop(2), should_stop=should_stop
    )
    assert time.perf_counter() - began_s < 5
    assert [r.error for r in run.records] == ["stopped: the server died"] * 2
    assert all(r.first_token_s is not None and not r.ok for r in run.records)
    assert "stopped: the server died; 7 of 9 were not sent" in run.warnings
    assert 0.2 < asked[1] - asked[0] < 1


class Cutter:
    """Ends a run once `count` requests of it ended."""

    def __init__(self, count):
        self.count = count
        self.seen = []

    def saw(self, record):
        self.seen.append(record)

    def verdict(self, elapsed_s):
        return "hopeless" if len(self.seen) >= self.count else None


def test_a_run_that_is_cut_keeps_what_ended_and_drops_what_is_in_flight(http):
    async def two_then_hang(exchange):
        await (http.three_tokens if len(cutter.seen) < 2 else one_token_then_hang)(exchange)

    cutter = Cutter(2)
    run, _ = http.run_replay(two_then_hang, http.requests(9), ClosedLoop(1), watch=cutter)
    assert run.cut == "hopeless"
    assert [record.index for record in run.records] == [0, 1]
    assert all(record.ok for record in run.records)
    assert run.records == tuple(cutter.seen)
    assert run.warnings == ()
    assert run.counted_s is None, "the server is fine: it was read at the end too"


def test_a_run_that_nobody_cuts_is_whole(http):
    run, _ = http.run_replay(http.three_tokens, http.requests(3), ClosedLoop(1), watch=Cutter(4))
    assert (len(run.records), run.cut) == (3, "")


def test_should_stop_also_ends_a_wait_for_the_next_arrival(http):
    requests = http.requests(2, arrivals_s=[0.0, 3600.0])
    run, _ = http.run_replay(http.three_tokens, requests, OpenLoop(), should_stop=lambda: DEAD)
    assert [r.error for r in run.records] == [None]
    assert "stopped: the server died; 1 of 2 were not sent" in run.warnings


def test_a_stop_during_the_warmup_measures_nothing(http):
    run, _ = http.run_replay(
        hang,
        http.requests(2),
        ClosedLoop(1),
        warmup=http.requests(1),
        should_stop=lambda: DEAD,
    )
    assert run.records == ()
    assert run.warnings == ("stopped: the server died; during the warm-up, nothing was measured",)


def test_a_server_that_goes_silent_ends_the_run_as_stalled(http):
    run, _ = http.run_replay(
        one_token_then_hang, http.requests(5), ClosedLoop(2), stall_timeout_s=0.4
    )
    assert [r.error for r in run.records] == ["stalled: the server sent nothing for 0.4 s"] * 2
    assert any("3 of 5 were not sent" in warning for warning in run.warnings)


def test_a_request_that_waits_while_others_are_served_is_not_a_stall(http):
    async def handler(exchange):
        if exchange.body["prompt"] == "p0":
            await asyncio.sleep(1.2)
        await exchange.tokens(3, gap_s=0.1)

    run, _ = http.run_replay(handler, http.requests(12), ClosedLoop(2), stall_timeout_s=0.8)
    assert all(r.ok for r in run.records)


def test_a_request_that_takes_too_long_times_out_alone(http):
    async def handler(exchange):
        await (hang(exchange) if exchange.body["prompt"] == "p0" else exchange.tokens(3))

    run, _ = http.run_replay(handler, http.requests(3), ClosedLoop(2), request_timeout_s=0.3)
    assert [r.error for r in run.records] == ["timeout: not complete after 0.3 s", None, None]


def test_cancelling_closes_every_connection(http):
    async def main():
        async with http.serve(one_token_then_hang) as server:
            task = asyncio.create_task(replay(server.endpoint, http.requests(4), ClosedLoop(4)))
            await http.until(lambda: len(server.answered) == 4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await http.until(lambda: server.lost == server.connections)

    asyncio.run(main())


def test_progress_is_told_at_most_five_times_a_second_and_at_the_end(http):
    told = []

    def on_progress(progress):
        told.append((time.perf_counter(), progress))

    async def handler(exchange):
        await exchange.tokens(3, gap_s=0.2)

    http.run_replay(handler, http.requests(4), ClosedLoop(2), on_progress=on_progress)
    running = [at for at, _ in told[:-1]]
    assert len(running) >= 2
    assert all(b - a >= 0.2 for a, b in pairwise(running))
    first, last = told[0][1], told[-1][1]
    assert (first.done, first.in_flight, first.total) == (0, 2, 4)
    assert (last.done, last.failed, last.in_flight) == (4, 0, 0)
    assert last.output_tokens_per_s == pytest.approx(12 / last.elapsed_s)


def page(prompt_tokens, running, usage):
    return (
        "# TYPE vllm:prompt_tokens_total counter\n"
        f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompt_tokens}\n'
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}\n'
    )


def test_counters_are_deltas_and_gauges_are_sampled(http):
    readings = []

    def metrics():
        readings.append(1)
        return page(100 * len(readings), len(readings), 0.25)

    async def handler(exchange):
        await exchange.tokens(3, gap_s=0.15)

    run, _ = http.run_replay(
        handler, http.requests(1), ClosedLoop(1), metrics=metrics, scrape_interval_s=0.1
    )
    assert run.counters == {"vllm:prompt_tokens_total": 100.0 * (len(readings) - 1)}
    samples = run.gauges["vllm:num_requests_running"]
    assert [value for _, value in samples][:2] == [2.0, 3.0]
    assert 0 <= samples[0][0] < samples[1][0] < run.duration_s
    assert run.gauges["vllm:kv_cache_usage_perc"][0][1] == 0.25


def test_no_metrics_page_is_a_warning(http):
    run, _ = http.run_replay(
        http.three_tokens, http.requests(1), ClosedLoop(1), metrics=lambda: None
    )
    assert run.warnings == ("the server's counters are incomplete: /metrics: HTTP 404",)
    assert run.counters == {}
    assert run.records[0].ok


def test_without_scraping_the_metrics_page_is_left_alone(http):
    run, server = http.run_replay(
        http.three_tokens, http.requests(1), ClosedLoop(1), scrape_interval_s=None
    )
    assert len(server.exchanges) == len(server.answered) == 1
    assert (run.counters, run.gauges, run.warnings) == ({}, {}, ())


def test_a_restart_of_the_server_cuts_the_counters_and_is_said(http):
    """What the server counted before or after the restart, never across it."""
    pages = iter([page(500, 0, 0)])
    run, _ = http.run_replay(
        http.three_tokens,
        http.requests(1),
        ClosedLoop(1),
        metrics=lambda: next(pages, page(20, 0, 0)),
    )
    assert run.counters["vllm:prompt_tokens_total"] == 0
    assert 0 <= run.counted_s < run.duration_s + 1
    assert run.lost == ""
    assert any("restarted once meanwhile (by vllm:prompt_tokens_total)" in w for w in run.warnings)


def test_counters_read_before_the_metrics_failed_are_kept(http):
    readings = []

    def metrics():
        readings.append(1)
        return page(100 * len(readings), 1, 0.25) if len(readings) < 4 else None

    async def handler(exchange):
        await exchange.tokens(3, gap_s=0.3)

    run, _ = http.run_replay(
        handler, http.requests(1), ClosedLoop(1), metrics=metrics, scrape_interval_s=0.05
    )
    assert run.counters == {"vllm:prompt_tokens_total": 200.0}
    assert "HTTP 404" in run.lost
    assert run.counted_s < run.duration_s


def test_metrics_that_were_only_read_before_the_start_are_of_no_time(http):
    pages = iter([page(100, 1, 0.25)])
    run, _ = http.run_replay(
        http.three_tokens, http.requests(1), ClosedLoop(1), metrics=lambda: next(pages, None)
    )
    assert "HTTP 404" in run.lost
    assert run.counted_s == 0.0
    assert set(run.counters.values()) == {0.0}


def test_tokens_that_share_a_message_are_counted_and_told(http):
    async def handler(exchange):
        exchange.head()
        await exchange.message(http.token("a b"))
        await exchange.message(http.token("c d", "length"))
        await exchange.message(http.usage(4))
        await exchange.done()

    run, _ = http.run_replay(handler, http.requests(2), ClosedLoop(2))
    assert [(r.output_tokens, len(r.gaps_s)) for r in run.records] == [(4, 1)] * 2
    assert run.warnings == (
        "in 2 of 2 requests the server counted 8 tokens in 4 messages: "
        "their gaps are between messages, not tokens",
    )


def test_missing_usage_is_told(http):
    async def handler(exchange):
        exchange.head()
        await exchange.message(http.token("a", "length"))
        await exchange.done()

    run, _ = http.run_replay(handler, http.requests(2), ClosedLoop(2))
    assert [r.output_tokens for r in run.records] == [1, 1]
    assert any("reported no usage in 2 of 2" in warning for warning in run.warnings)


def test_text_is_kept_on_request(http):
    def texts(keep_text):
        run, _ = http.run_replay(
            http.three_tokens, http.requests(3), ClosedLoop(2), keep_text=keep_text
        )
        return [record.text for record in run.records]

    assert texts(None) == [None, None, None]
    assert texts(KeptText()) == ["xxx", "xxx", "xxx"]
    assert texts(KeptText({1}, messages=2)) == [None, "xx", None]


def test_the_garbage_collector_rests_during_the_run_only(http):
    seen = []

    async def handler(exchange):
        seen.append(gc.isenabled())
        await exchange.tokens(3)

    http.run_replay(handler, http.requests(1), ClosedLoop(1))
    assert seen == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_error_of_the_caller_is_not_swallowed(http):
    def broken(_):
        raise KeyError("mine")

    async def handler(exchange):
        await exchange.tokens(2, gap_s=0.5)

    with pytest.raises(KeyError, match="mine"):
        http.run_replay(handler, http.requests(1), ClosedLoop(1), on_progress=broken)
    assert gc.isenabled()
