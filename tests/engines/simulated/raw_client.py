"""A client that takes nothing for granted about HTTP, and requests for it to send."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from kvtune.engines.base import RunningServer
from kvtune.profilers.scrape import Samples, parse_metrics

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Response = tuple[int, dict[str, str], bytes]


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
