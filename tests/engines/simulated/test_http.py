"""How the simulated server speaks HTTP, and how cheaply."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest
from raw_client import (
    COMPLETIONS,
    Response,
    completion,
    connect,
    events,
    message,
    read_response,
    streamed,
)

from kvtune.engines.base import RunningServer, ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.profilers.load.client import ClosedLoop, replay
from kvtune.profilers.load.request import prepare
from kvtune.types import Request


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
