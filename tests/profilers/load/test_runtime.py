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
