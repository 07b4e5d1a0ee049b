"""A scripted HTTP server: a handler says, byte by byte, what a client gets to see."""

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from kvtune.profilers.load.client import replay
from kvtune.profilers.load.request import prepare
from kvtune.types import Endpoint, Request

EMPTY_PAGE = "# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total 0\n"


def token(text="x", finish=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(completion, prompt=3, cached=None):
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
        },
    }


@dataclass
class Exchange:
    """One request as the server sees it, and the means to answer it."""

    path: str
    headers: dict
    content: bytes
    connection: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    chunked: bool = field(default=False, init=False)

    @property
    def body(self):
        return json.loads(self.content)

    def head(self, status=200, *fields, chunked=True):
        self.chunked = chunked
        lines = [f"HTTP/1.1 {status} Whatever", *fields]
        if chunked:
            lines.append("Transfer-Encoding: chunked")
        self.writer.write("\r\n".join([*lines, "", ""]).encode())

    async def send(self, data):
        if self.chunked:
            data = b"%x\r\n%s\r\n" % (len(data), data)
        self.writer.write(data)
        await self.writer.drain()

    async def message(self, payload):
        await self.send(b"data: %s\n\n" % json.dumps(payload, separators=(",", ":")).encode())

    async def done(self):
        await self.send(b"data: [DONE]\n\n")
        self.end()

    def end(self):
        if self.chunked:
            self.writer.write(b"0\r\n\r\n")

    async def client_is_gone(self):
        """Say nothing (more) until the client closes its end."""
        await self.reader.read()

    async def tokens(self, count, gap_s=0.0):
        """Answer completely: `count` tokens, `gap_s` apart."""
        self.head()
        for i in range(count):
            if i and gap_s:
                await asyncio.sleep(gap_s)
            await self.message(token(finish="length" if i == count - 1 else None))
        await self.message(usage(count))
        await self.done()


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass
class Server:
    """What a test can see of the scripted server."""

    endpoint: Endpoint
    connections: int = 0
    lost: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    metrics: Callable[[], str | None] = lambda: EMPTY_PAGE

    @property
    def answered(self):
        return [exchange for exchange in self.exchanges if exchange.path != "/metrics"]


@asynccontextmanager
async def serve(handler: Handler, tls: ssl.SSLContext | None = None, host="127.0.0.1"):
    server = Server(Endpoint("", "m"))
    answering = []

    async def read(reader):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        return head[0].split()[1], headers, content

    async def answer(exchange):
        if exchange.path != "/metrics":
            await handler(exchange)
            return
        page = server.metrics()
        data = (page or "").encode()
        exchange.head(404 if page is None else 200, f"Content-Length: {len(data)}", chunked=False)
        await exchange.send(data)

    async def connected(reader, writer):
        answering.append(asyncio.current_task())
        number = server.connections
        server.connections += 1
        try:
            while True:
                exchange = Exchange(*await read(reader), number, reader, writer)
                server.exchanges.append(exchange)
                await answer(exchange)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            server.lost += 1
            writer.close()

    listener = await asyncio.start_server(connected, host, 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    server.endpoint = Endpoint(f"http{'s' if tls else ''}://{host}:{port}", "m")
    try:
        yield server
    finally:
        listener.close()
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)


def requests(count, arrivals_s=None, output_tokens=3):
    return [
        prepare(
            Request(prompt=f"p{i}", arrival_s=None if arrivals_s is None else arrivals_s[i]),
            model="m",
            index=i,
            fixed_length=True,
            output_tokens=output_tokens,
            cache_salt=None,
        )
        for i in range(count)
    ]


async def until(condition, timeout_s=60.0):
    """Wait for what has to happen soon; a busy machine may take its time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def three_tokens(exchange):
    await exchange.tokens(3)


def run_replay(handler, prepared, arrivals, metrics=None, **options):
    """Replay against a scripted server; returns the run and the server."""

    async def main():
        async with serve(handler) as server:
            if metrics is not None:
                server.metrics = metrics
            run = await asyncio.wait_for(replay(server.endpoint, prepared, arrivals, **options), 60)
            await until(lambda: server.lost == server.connections)
            return run, server

    return asyncio.run(main())


@pytest.fixture
def http():
    """The scripted server, what it can say, and requests to send to it."""
    return SimpleNamespace(
        requests=requests,
        run_replay=run_replay,
        serve=serve,
        three_tokens=three_tokens,
        token=token,
        until=until,
        usage=usage,
    )


@pytest.fixture
def unused_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
