"""A fake completions endpoint that sends tokens at the times its clients ask for.

The prompt of a request is `<first> <interval>`: token k is due at first + k * interval seconds of
`time.perf_counter`, which on Linux is one clock for all processes. The server sends messages of
the size vLLM sends, remembers when it really sent each token, and answers `GET /sent` with all of
those times as raw doubles, requests one after the other in the order of their first token.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import time
from array import array
from typing import cast

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunk(message: str) -> bytes:
    data = f"data: {message}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def token_message(text: str, finish: str | None) -> str:
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    return json.dumps(
        {
            "id": "cmpl-0123456789abcdef0123456789abcdef",
            "object": "text_completion",
            "created": 1760000000,
            "model": "fake",
            "choices": [choice],
        },
        separators=(",", ":"),
    )


TOKEN = chunk(token_message(" token", None))
LAST_TOKEN = chunk(token_message(" token", "length"))


class Stream(asyncio.Protocol):
    """One connection; emits the tokens of one request at a time."""

    def __init__(self, server: StreamServer) -> None:
        self.server = server
        self.received = b""
        self.tokens = 0
        self.sent_s: array[float] = array("d")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer a request once it is complete."""
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self.received = b""
            self.transport.write(self.server.sent_page())
            self.transport.close()
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        self.received = b""
        request = json.loads(body)
        first_s, interval_s = map(float, request["prompt"].split())
        self.tokens = request["max_tokens"]
        self.transport.write(HEAD)
        self.server.add(first_s, interval_s, self)

    def emit(self) -> bool:
        """Send one token; whether more follow."""
        self.sent_s.append(time.perf_counter())
        if len(self.sent_s) < self.tokens:
            self.transport.write(TOKEN)
            return True
        usage = {"prompt_tokens": 1, "completion_tokens": self.tokens}
        closing = chunk(json.dumps({"choices": [], "usage": usage})) + chunk("[DONE]")
        self.transport.write(LAST_TOKEN + closing + b"0\r\n\r\n")
        return False


class StreamServer:
    """Emits the tokens of all connections when they are due."""

    def __init__(self) -> None:
        self.due: list[tuple[float, int, float, Stream]] = []
        self.streams: list[tuple[float, Stream]] = []
        self.emitting = False

    def add(self, first_s: float, interval_s: float, stream: Stream) -> None:
        """Emit the tokens of `stream` every `interval_s` from `first_s` on."""
        self.streams.append((first_s, stream))
        heapq.heappush(self.due, (first_s, len(self.streams), interval_s, stream))
        if not self.emitting:
            self.emitting = True
            self.emit_due()

    def emit_due(self) -> None:
        """Emit what is due, then come back for the next one (timers are good to a millisecond)."""
        due = self.due
        now_s = time.perf_counter()
        while due and due[0][0] <= now_s:
            due_s, order, interval_s, stream = due[0]
            if stream.emit():
                heapq.heapreplace(due, (due_s + interval_s, order, interval_s, stream))
            else:
                heapq.heappop(due)
            now_s = time.perf_counter()
        if due:
            asyncio.get_running_loop().call_later(due[0][0] - now_s, self.emit_due)
        else:
            self.emitting = False

    def sent_page(self) -> bytes:
        """Return the answer to `GET /sent`, and forget those times."""
        ordered = sorted(self.streams, key=lambda item: item[0])
        body = b"".join(stream.sent_s.tobytes() for _, stream in ordered)
        self.streams.clear()
        return b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (
            len(body),
            body,
        )


async def serve(port: int) -> None:
    state = StreamServer()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(state), "127.0.0.1", port, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one and prints it")
    parser.add_argument("--core", type=int, default=None, help="the core to run on")
    arguments = parser.parse_args()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    asyncio.run(serve(arguments.port))


if __name__ == "__main__":
    main()
