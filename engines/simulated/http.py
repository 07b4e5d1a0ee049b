"""HTTP/1.1 for one server: requests with a length, kept connections, streams in chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

_HEAD_LIMIT_BYTES = 64 * 1024
_BODY_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request: `path` without its query, of which `query` has the first value of each name."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes


class Reply:
    """The answer to one request. Call one of `send`, `send_json` or `open_stream`.

    `on_close` is called when the client goes away before the answer is complete.
    """

    __slots__ = ("_connection", "_keep", "on_close")

    def __init__(self, connection: Connection, keep: bool) -> None:
        self._connection = connection
        self._keep = keep
        self.on_close: Callable[[], None] | None = None

    def send(self, status: int, body: bytes = b"", kind: str = "text/plain") -> None:
        """Answer with `body` of the content type `kind`."""
        self._connection.write(self._head(status, kind, f"content-length: {len(body)}") + body)
        self._finish()

    def send_json(self, status: int, payload: Any) -> None:
        """Answer with JSON."""
        body = json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()
        self.send(status, body, "application/json")

    def open_stream(self) -> None:
        """Start a stream of server-sent events."""
        kind = "text/event-stream; charset=utf-8"
        self._connection.write(self._head(200, kind, "transfer-encoding: chunked"))

    def stream(self, data: bytes) -> None:
        """Send a part of the stream."""
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    def close_stream(self) -> None:
        """End the stream."""
        self._connection.write(b"0\r\n\r\n")
        self._finish()

    def _head(self, status: int, kind: str, framing: str) -> bytes:
        keep = "keep-alive" if self._keep else "close"
        return (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {kind}\r\n"
            f"{framing}\r\nconnection: {keep}\r\n\r\n"
        ).encode()

    def _finish(self) -> None:
        self.on_close = None
        self._connection.finish(self._keep)


class Connection(asyncio.Protocol):
    """One client's connection; its requests are answered one after another by `handle`."""

    def __init__(self, handle: Callable[[HttpRequest, Reply], None]) -> None:
        self._handle = handle
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._reply: Reply | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Collect a request and hand it on when it is whole."""
        self._received += data
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell who works on an answer that nobody waits for it any more."""
        self._transport = None
        if self._reply is not None and self._reply.on_close is not None:
            self._reply.on_close()

    def write(self, data: bytes) -> None:
        """Send bytes, if the client is still there."""
        if self._transport is not None:
            self._transport.write(data)

    def finish(self, keep: bool) -> None:
        """Note that the answer is complete, and go on with the next request."""
        self._reply = None
        if not keep and self._transport is not None:
            self._transport.close()
        elif self._received:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if self._reply is not None or self._transport is None:
            return
        try:
            found = _split(self._received)
        except ValueError as error:
            self._reply = Reply(self, keep=False)
            self._reply.send_json(400, {"detail": f"Invalid HTTP request: {error}"})
            return
        if found is None:
            return
        request, keep, length = found
        del self._received[:length]
        self._reply = Reply(self, keep)
        self._handle(request, self._reply)


def _split(received: bytearray) -> tuple[HttpRequest, bool, int] | None:
    """The first request, whether its connection is kept, and its length; `None` if incomplete.

    Raises:
        ValueError: it is not HTTP, too long, or has a body without a length.
    """
    end = received.find(b"\r\n\r\n")
    if end < 0:
        if len(received) > _HEAD_LIMIT_BYTES:
            raise ValueError("the head is too long")
        return None
    first, *lines = bytes(received[:end]).decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise ValueError("malformed request line")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
    }
    if "transfer-encoding" in headers:
        raise ValueError("a body needs a content-length")
    size = headers.get("content-length", "0")
    if not size.isdecimal() or int(size) > _BODY_LIMIT_BYTES:
        raise ValueError("malformed content-length")
    start = end + 4
    if len(received) < start + int(size):
        return None
    wish = headers.get("connection", "").lower()
    keep = wish != "close" and (words[2] != "HTTP/1.0" or wish == "keep-alive")
    target = urlsplit(words[1])
    query = {name: values[0] for name, values in parse_qs(target.query).items()}
    body = bytes(received[start : start + int(size)])
    return HttpRequest(words[0], target.path, query, body), keep, start + int(size)
