"""A prefix cache is emptied between repeats, and nobody waits for a server that cannot."""

import asyncio
from contextlib import suppress

import pytest

from kvtune.profilers.load.cache import reset_prefix_cache
from kvtune.types import Endpoint


def reset(answers, silent_s=5.0):
    """What comes of it at a server that gives these answers in turn, and how often it was asked."""
    left, gone = list(answers), asyncio.Event()
    wanted = b"POST /reset_prefix_cache?reset_external=true "

    async def serve(reader, writer):
        with suppress(asyncio.IncompleteReadError):
            while (await reader.readuntil(b"\r\n\r\n")).startswith(wanted):
                if (answer := left.pop(0)) is None:
                    await reader.read()
                    break
                status, body = answer
                head = f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
        writer.close()
        gone.set()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            endpoint = Endpoint(url=f"http://127.0.0.1:{port}", model="m")
            found = await reset_prefix_cache(endpoint, silent_s=silent_s)
            await gone.wait()
            return found
        finally:
            server.close()

    return asyncio.run(run()), len(answers) - len(left)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(200, b'{"success": true}')], (True, 1)),
        ([(200, b"")], (True, 1)),
        ([(200, b'{"success": false}'), (200, b'{"success": true}')], (True, 2)),
        ([(404, b"{}")], (False, 1)),
    ],
    ids=["done", "older", "refused-once", "no-such-route"],
)
def test_it_is_emptied_where_the_engine_offers_that(answers, expected):
    assert reset(answers) == expected


def test_a_server_that_hangs_is_not_waited_for():
    assert reset([None], silent_s=0.05) == (False, 1)
