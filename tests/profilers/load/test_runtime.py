import asyncio
import os
import resource
import signal

import pytest

from kvtune.profilers.load import runtime


async def answer():
    await asyncio.sleep(0)
    return 42


def test_run_returns_what_the_coroutine_returns():
    assert runtime.run(answer()) == 42


def test_ctrl_c_lets_the_coroutine_clean_up():
    cleaned = []

    async def interrupted():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        runtime.run(interrupted())
    assert cleaned == [True]


class KillsItself(asyncio.Protocol):
    """A polite kill arrives while what a server said is being looked at."""

    def data_received(self, data):
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(10))  # Python calls the handler between two steps of this.


@pytest.fixture
def raising():
    """How kvtune takes a polite kill."""

    def handler(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handler)
    yield handler
    signal.signal(signal.SIGTERM, before)


def test_a_polite_kill_amid_an_answer_ends_the_run_and_not_its_connection(raising):
    cleaned = []

    async def reading():
        loop = asyncio.get_running_loop()

        async def hello(_, writer):
            writer.write(b"hello")
            writer.close()

        server = await asyncio.start_server(hello, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        try:
            transport, _ = await loop.create_connection(KillsItself, *address)
            await asyncio.sleep(5)
        finally:
            cleaned.append(True)
            transport.close()
            server.close()
            await asyncio.sleep(0.1)

    with pytest.raises(KeyboardInterrupt):
        runtime.run(reading())
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) is raising


def test_what_fails_as_it_is_ended_does_not_hide_the_kill(raising):
    async def failing():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            raise OSError("the server is gone")

    with pytest.raises(KeyboardInterrupt):
        runtime.run(failing())


def test_a_signal_that_is_put_off_lets_the_run_go_on():
    noted = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:

        async def killed():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
            return 42

        assert runtime.run(killed()) == 42
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == [signal.SIGTERM]


def test_open_file_limit_is_raised_within_the_hard_one(monkeypatch):
    limits = [(100, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    runtime.allow_connections(10)
    assert limits == [(100, 1000)]
    runtime.allow_connections(500)
    assert limits[-1] == (564, 1000)
    runtime.allow_connections(5000)
    assert limits[-1] == (1000, 1000)
    runtime.allow_connections(10)
    assert limits[-1] == (1000, 1000)
