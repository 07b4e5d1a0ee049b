import asyncio
import resource

from kvtune.profilers.load import runtime


async def answer():
    await asyncio.sleep(0)
    return 42


def test_run_returns_what_the_coroutine_returns():
    assert runtime.run(answer()) == 42


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
