"""What the simulated server says over HTTP, seen by a raw client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from kvtune.engines.base import RunningServer, ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.profilers.load.client import ClosedLoop, replay
from kvtune.profilers.load.request import prepare
from kvtune.profilers.scrape import Samples, info_labels, parse_metrics
from kvtune.types import Request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Response = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    arguments = {
        "simulate-time-scale": 0.02,
        "kv-cache-memory-bytes": "64M",
        "max-model-len": 2048,
        "enable-prompt-tokens-details": True,
    }
    log_path = tmp_path_factory.mktemp("simulated") / "server.log"
    with (
        SimulatedEngine() as engine,
        engine.launch(ServerSpec("tiny", arguments=arguments), log_path=log_path) as running,
    ):
        yield running


# --- a raw client ---


def message(method: str, path: str, body: Any = None) -> bytes:
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
    )


async def connect(server: RunningServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(server.endpoint.url)
    return await asyncio.open_connection(url.hostname, url.port)


async def read_response(reader: asyncio.StreamReader) -> Response:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        assert headers["transfer-encoding"] == "chunked"
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            assert await reader.readline() == b"\r\n"
        assert await reader.readline() == b"\r\n"
    return int(first.split()[1]), headers, body


def ask(server: RunningServer, method: str, path: str, body: Any = None) -> Response:
    async def exchange() -> Response:
        reader, writer = await connect(server)
        writer.write(message(method, path, body))
        response = await asyncio.wait_for(read_response(reader), 10)
        writer.close()
        return response

    return asyncio.run(exchange())


def ask_json(server: RunningServer, path: str, body: Any = None) -> Any:
    status, _, raw = ask(server, "GET" if body is None else "POST", path, body)
    assert status == 200, raw
    return json.loads(raw)


def events(raw: bytes) -> list[Any]:
    """The messages of a stream; the last must be the end marker."""
    *messages, last, rest = raw.split(b"\n\n")
    assert (last, rest) == (b"data: [DONE]", b"")
    assert all(text.startswith(b"data: ") for text in messages)
    return [json.loads(text[6:]) for text in messages]


def metrics(server: RunningServer) -> Samples:
    return parse_metrics(ask(server, "GET", "/metrics")[2].decode())


def delta(before: Samples, after: Samples, name: str) -> float:
    return after.counters[f"vllm:{name}"] - before.counters[f"vllm:{name}"]


def completion(prompt: Any, tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}


def streamed(prompt: Any, tokens: int = 5, **more: Any) -> dict[str, Any]:
    options = {"include_usage": True}
    return completion(prompt, tokens, stream=True, stream_options=options, **more)


# --- pages ---


def test_it_describes_itself_as_vllm_does(server: RunningServer) -> None:
    assert ask(server, "GET", "/health")[0] == 200
    (card,) = ask_json(server, "/v1/models")["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 2048)
    config = ask_json(server, "/server_info?config_format=json")["vllm_config"]
    assert config["cache_config"]["kv_cache_size_tokens"] == 2816
    assert config["scheduler_config"]["max_num_seqs"] == 128
    assert isinstance(ask_json(server, "/server_info")["vllm_config"], str)
    assert ask_json(server, "/version")["version"] == server.effective.engine_version
    info = info_labels(ask(server, "GET", "/metrics")[2].decode(), "vllm:cache_config_info")
    assert (info["num_gpu_blocks"], info["block_size"]) == ("22", "128")


def test_what_runs_is_read_back(server: RunningServer) -> None:
    effective = server.effective
    assert effective.kv_cache_size_tokens == 2816
    assert effective.block_size_tokens == 128
    assert effective.kv_cache_memory_bytes == 64 << 20
    assert effective.max_model_len_tokens == 2048
    assert effective.max_num_batched_tokens == 2048
    assert effective.enable_prefix_caching is True
    assert effective.model_dtype == "bfloat16"


def test_text_is_tokenized_four_bytes_at_a_time(server: RunningServer) -> None:
    assert ask_json(server, "/tokenize", {"prompt": "abcdefghij"})["count"] == 3


# --- answers ---


def test_a_stream_has_one_message_a_token_then_usage_then_the_end(server: RunningServer) -> None:
    status, headers, raw = ask(server, "POST", COMPLETIONS, streamed("one two three", 7))
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    *tokens, usage = events(raw)
    assert len(tokens) == 7
    assert all(token["choices"][0]["text"] for token in tokens)
    reasons = [token["choices"][0]["finish_reason"] for token in tokens]
    assert reasons == [None] * 6 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 4
    assert usage["usage"]["completion_tokens"] == 7
    assert usage["usage"]["total_tokens"] == 11


def test_usage_comes_only_when_it_is_asked_for(server: RunningServer) -> None:
    _, _, raw = ask(server, "POST", COMPLETIONS, completion("hello", 3, stream=True))
    assert [len(event["choices"]) for event in events(raw)] == [1, 1, 1]


def test_a_chat_stream_announces_its_role_first(server: RunningServer) -> None:
    body = streamed(None, 4) | {"messages": [{"role": "user", "content": "hi there"}]}
    del body["prompt"]
    role, *tokens, usage = events(ask(server, "POST", CHAT, body)[2])
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(tokens) == 4
    assert all(token["choices"][0]["delta"]["content"] for token in tokens)
    assert usage["usage"]["completion_tokens"] == 4


def test_a_whole_answer_says_what_the_stream_says(server: RunningServer) -> None:
    whole = ask_json(server, COMPLETIONS, completion("same words", 6))
    parts = events(ask(server, "POST", COMPLETIONS, streamed("same words", 6))[2])[:-1]
    assert whole["choices"][0]["text"] == "".join(part["choices"][0]["text"] for part in parts)
    assert whole["usage"]["completion_tokens"] == 6
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    answer = ask_json(server, CHAT, body)["choices"][0]["message"]
    assert answer["role"] == "assistant"
    assert len(answer["content"].split()) == 3


def test_answers_depend_on_the_prompt_alone(server: RunningServer) -> None:
    def text(prompt: Any) -> str:
        answer: str = ask_json(server, COMPLETIONS, completion(prompt, 8))["choices"][0]["text"]
        return answer

    assert text([5, 6, 7]) == text([5, 6, 7]) != text([5, 6, 8])


def test_it_finds_a_fact_that_stands_in_the_prompt(server: RunningServer) -> None:
    fact = "The code of the safe is 5823, they say."
    prompt = f"{fact} And so on. Question: what is the code? Answer: The code of the safe is"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20}
    choice = ask_json(server, COMPLETIONS, body)["choices"][0]
    assert choice["text"] == " 5823, they say."
    assert choice["finish_reason"] == "stop"


def test_an_answer_ends_by_itself_unless_it_is_forced_on(server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "words of no meaning", "max_tokens": 1000}
    natural = ask_json(server, COMPLETIONS, body)
    tokens = natural["usage"]["completion_tokens"]
    assert 16 <= tokens < 1000
    assert natural["choices"][0]["finish_reason"] == "stop"
    least = ask_json(server, COMPLETIONS, body | {"min_tokens": tokens + 9})
    assert least["usage"]["completion_tokens"] == tokens + 9


# --- the cache ---


def test_a_repeated_prompt_is_served_from_the_cache_unless_salt_or_reset_forbid(
    server: RunningServer,
) -> None:
    def cached(**more: Any) -> int:
        body = completion(list(range(300, 700)), 2, **more)
        tokens: int = ask_json(server, COMPLETIONS, body)["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        return tokens

    assert ask_json(server, "/reset_prefix_cache", {})["success"] is True
    assert [cached(), cached()] == [0, 384]
    assert cached(cache_salt="other") == 0
    assert ask_json(server, "/reset_prefix_cache", {})["success"] is True
    assert cached() == 0


def test_counters_add_up(server: RunningServer) -> None:
    ask_json(server, "/reset_prefix_cache", {})
    before = metrics(server)
    prompt = list(range(1000, 1300))
    for _ in range(3):
        ask(server, "POST", COMPLETIONS, streamed(prompt, 10))
    after = metrics(server)
    assert delta(before, after, "prompt_tokens_total") == 900
    assert delta(before, after, "generation_tokens_total") == 30
    assert delta(before, after, "prefix_cache_queries_total") == 900
    assert delta(before, after, "prefix_cache_hits_total") == 2 * 256
    assert delta(before, after, "prompt_tokens_cached_total") == 2 * 256
    source = 'prompt_tokens_by_source_total{source="local_compute"}'
    assert delta(before, after, source) == 900 - 2 * 256
    assert delta(before, after, 'request_success_total{finished_reason="length"}') == 3
    assert delta(before, after, "iteration_tokens_total_count") == 30
    # As in vLLM: tokens that came from the cache are not computed.
    assert delta(before, after, "iteration_tokens_total_sum") == 900 - 2 * 256 + 30
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert delta(before, after, f"{name}_count") == 3
    assert delta(before, after, "inter_token_latency_seconds_count") == 27
    inference_s = delta(before, after, "request_inference_time_seconds_sum")
    parts_s = delta(before, after, "request_prefill_time_seconds_sum") + delta(
        before, after, "request_decode_time_seconds_sum"
    )
    assert inference_s == pytest.approx(parts_s)
    # Ten steps of 20 ms, and the rest of a step's costs, at a fiftieth.
    assert 3 * 0.004 < inference_s < 3 * 0.1
    for name in ("estimated_flops_per_gpu_total", "num_preemptions_total"):
        assert delta(before, after, name) == 0


def test_a_cache_that_is_too_small_shows_as_waiting_and_preemption(server: RunningServer) -> None:
    async def load() -> tuple[Samples, Samples, Samples]:
        requests = [
            prepare(
                Request(token_ids=tuple(range(number * 500, number * 500 + 380))),
                model="tiny",
                index=number,
                fixed_length=True,
                output_tokens=200,
                cache_salt=None,
            )
            for number in range(12)
        ]
        before = await asyncio.to_thread(metrics, server)
        running = asyncio.create_task(replay(server.endpoint, requests, ClosedLoop(12)))
        during = before
        while (
            during.gauges["vllm:num_requests_waiting"] == 0
            or during.gauges["vllm:kv_cache_usage_perc"] <= 0.5
        ):
            assert not running.done()
            during = await asyncio.to_thread(metrics, server)
        assert all(record.ok for record in (await running).records)
        return before, during, await asyncio.to_thread(metrics, server)

    before, during, after = asyncio.run(load())
    assert delta(before, after, "num_preemptions_total") > 0
    assert delta(before, after, "request_num_preemptions_sum") > 0
    assert during.gauges["vllm:num_requests_running"] > 0
    waiting = during.gauges["vllm:num_requests_waiting"]
    assert during.gauges['vllm:num_requests_waiting_by_reason{reason="capacity"}'] == waiting
    assert after.gauges["vllm:kv_cache_usage_perc"] == 0
    assert after.gauges["vllm:num_requests_running"] == 0


def test_a_client_that_goes_away_frees_its_blocks(server: RunningServer) -> None:
    before = metrics(server)

    async def leave() -> None:
        reader, writer = await connect(server)
        writer.write(message("POST", COMPLETIONS, streamed(list(range(400)), 1500)))
        await reader.readuntil(b"data: ")
        assert (await asyncio.to_thread(metrics, server)).gauges["vllm:num_requests_running"] == 1
        writer.transport.abort()

    asyncio.run(leave())
    deadline_s = time.monotonic() + 5
    aborted = 'request_success_total{finished_reason="abort"}'
    while delta(before, (after := metrics(server)), aborted) != 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert after.gauges["vllm:num_requests_running"] == 0
    assert after.gauges["vllm:kv_cache_usage_perc"] == 0


# --- refusals ---


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (COMPLETIONS, b"{", 400, "JSON decode error"),
        (COMPLETIONS, b"[]", 400, "must be a JSON object"),
        (COMPLETIONS, {"model": "tiny"}, 400, "prompt"),
        (COMPLETIONS, completion(""), 400, "prompt"),
        (COMPLETIONS, completion([]), 400, "prompt"),
        (COMPLETIONS, completion(["a", "b"]), 400, "prompt"),
        (COMPLETIONS, completion([1, "b"]), 400, "prompt"),
        (COMPLETIONS, completion([1, 49_152]), 400, "out of vocabulary"),
        (COMPLETIONS, completion(list(range(2045)), 4), 400, "maximum context length is 2048"),
        (COMPLETIONS, completion("a", 0), 400, "max_tokens must be at least 1"),
        (COMPLETIONS, completion("a", 5, min_tokens=6), 400, "min_tokens must be less"),
        (COMPLETIONS, completion("a", 5, n=2), 400, "one answer"),
        (COMPLETIONS, completion("a", stream_options={}), 400, "stream=True"),
        (COMPLETIONS, completion("a") | {"model": "huge"}, 404, "`huge` does not exist"),
        (CHAT, {"model": "tiny", "messages": []}, 400, "messages"),
        (CHAT, {"model": "tiny", "messages": [{"role": "user"}]}, 400, "content"),
        (CHAT, {"model": "tiny", "messages": [3]}, 400, "content"),
    ],
)
def test_bad_requests_get_an_error_in_vllms_form(
    server: RunningServer, path: str, body: Any, status: int, says: str
) -> None:
    got, _, raw = ask(server, "POST", path, body)
    error = json.loads(raw)["error"]
    assert (got, error["code"]) == (status, status)
    assert says in error["message"]
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]


def test_the_longest_request_that_fits_is_served(server: RunningServer) -> None:
    answer = ask_json(server, COMPLETIONS, completion(list(range(2045)), 3))
    assert answer["usage"]["total_tokens"] == 2048


def test_unknown_paths_and_methods_are_told_apart(server: RunningServer) -> None:
    assert ask(server, "GET", "/nowhere")[0] == 404
    assert ask(server, "GET", COMPLETIONS)[0] == 405


# --- HTTP ---


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / SPDY/3\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"a" * 70_000,
    ],
)
def test_what_is_not_http_is_refused_and_hung_up_on(server: RunningServer, raw: bytes) -> None:
    async def exchange() -> Response:
        reader, writer = await connect(server)
        writer.write(raw)
        response = await asyncio.wait_for(read_response(reader), 10)
        assert await reader.read() == b""
        writer.close()
        return response

    status, headers, _ = asyncio.run(exchange())
    assert (status, headers["connection"]) == (400, "close")


def test_a_connection_carries_request_after_request_in_order(server: RunningServer) -> None:
    async def exchange() -> list[Response]:
        reader, writer = await connect(server)
        # The second and third arrive while the first is still being streamed.
        writer.write(message("POST", COMPLETIONS, streamed("first", 20)))
        writer.write(message("GET", "/version") + message("POST", "/tokenize", {"prompt": "x"}))
        responses = [await asyncio.wait_for(read_response(reader), 10) for _ in range(3)]
        writer.write(message("GET", "/health"))
        responses.append(await asyncio.wait_for(read_response(reader), 10))
        writer.close()
        return responses

    stream, version, tokens, health = asyncio.run(exchange())
    assert len(events(stream[2])) == 21
    assert "version" in json.loads(version[2])
    assert json.loads(tokens[2])["count"] == 1
    assert health[0] == 200


def test_a_request_may_arrive_in_pieces(server: RunningServer) -> None:
    async def exchange() -> Response:
        reader, writer = await connect(server)
        raw = message("POST", COMPLETIONS, completion(list(range(600)), 2))
        for at in range(0, len(raw), 700):
            writer.write(raw[at : at + 700])
            await writer.drain()
            await asyncio.sleep(0)
        response = await asyncio.wait_for(read_response(reader), 10)
        writer.close()
        return response

    status, _, body = asyncio.run(exchange())
    assert (status, json.loads(body)["usage"]["prompt_tokens"]) == (200, 600)


@pytest.mark.parametrize(
    ("version", "wish", "kept"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.0", None, False),
        ("1.0", "keep-alive", True),
    ],
)
def test_a_connection_is_kept_as_the_client_wishes(
    server: RunningServer, version: str, wish: str | None, kept: bool
) -> None:
    async def exchange() -> bool:
        reader, writer = await connect(server)
        more = f"Connection: {wish}\r\n" if wish else ""
        writer.write(f"GET /health HTTP/{version}\r\n{more}\r\n".encode())
        await asyncio.wait_for(read_response(reader), 10)
        try:
            return await asyncio.wait_for(reader.read(1), 0.1) != b""
        except TimeoutError:
            return True
        finally:
            writer.close()

    assert asyncio.run(exchange()) is kept


# --- other settings ---


def test_two_hundred_streams_cost_a_fraction_of_a_core(tmp_path: Path) -> None:
    arguments = {
        "max-num-seqs": 256,
        "simulate-memory-bytes": "8G",
        "simulate-time-scale": 0.1,
        "simulate-token-s": 0,
        "simulate-kv-bytes-per-s": 0,
    }
    requests = [
        prepare(
            Request(prompt=f"{number} hello"),
            model="tiny",
            index=number,
            fixed_length=True,
            output_tokens=100,
            cache_salt=None,
        )
        for number in range(200)
    ]
    spec = ServerSpec("tiny", arguments=arguments)
    with SimulatedEngine().launch(spec, log_path=tmp_path / "log") as server:
        process = psutil.Process(server.endpoint.pid)
        before = process.cpu_times()
        run = asyncio.run(replay(server.endpoint, requests, ClosedLoop(200)))
        after = process.cpu_times()
    tokens = sum(record.output_tokens for record in run.records)
    assert tokens == 20_000
    cpu_s = after.user + after.system - before.user - before.system
    assert tokens / cpu_s > 2 * 200 * 50


def test_statistics_can_be_switched_off_and_estimates_on(tmp_path: Path) -> None:
    engine = SimulatedEngine({"simulate-time-scale": 0.01})
    quiet = ServerSpec("tiny", arguments={"disable-log-stats": True})
    with engine.launch(quiet, log_path=tmp_path / "quiet.log") as server:
        assert b"vllm:" not in ask(server, "GET", "/metrics")[2]
    spec = ServerSpec("tiny", arguments={"enable-mfu-metrics": True})
    with engine.launch(spec, log_path=tmp_path / "log") as server:
        ask_json(server, COMPLETIONS, completion(list(range(100)), 3))
        counters = metrics(server).counters
    # Weights once a step, and the contexts of 100, 101 and 102 tokens.
    read_bytes = 3 * 269_000_000 + (100 + 101 + 102) * 23_040
    assert counters["vllm:estimated_read_bytes_per_gpu_total"] == read_bytes
    assert counters["vllm:estimated_flops_per_gpu_total"] == 269_000_000 * 102
    assert counters["vllm:estimated_write_bytes_per_gpu_total"] == 102 * 23_040
