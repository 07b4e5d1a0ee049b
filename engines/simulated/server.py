"""The process of a simulated server: `python -m kvtune.engines.simulated.server --port 8000`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from kvtune import __version__
from kvtune.engines.simulated.api import Api
from kvtune.engines.simulated.costs import (
    BLOCK_MULTIPLE_TOKENS,
    Capacity,
    plan_capacity,
    refusal,
)
from kvtune.engines.simulated.http import Connection
from kvtune.engines.simulated.loop import EngineLoop
from kvtune.engines.simulated.options import Settings, parse, usage

_LISTEN_BACKLOG = 2048


def main(words: list[str]) -> int:
    """Serve until a signal ends it; return the exit code otherwise."""
    if "--help" in words:
        _say(usage())
        return 0
    settings, problems = parse(words)
    if problems:
        return _fail(f"server.py: error: {problems[0]}", code=2)
    if why := refusal(settings):
        return _fail(f"1 validation error for SchedulerConfig\n  Value error, {why}")
    if settings.block_size % BLOCK_MULTIPLE_TOKENS:
        return _fail(
            f"ValueError: No common block size for {settings.block_size} "
            f"(CPU_ATTN: [MultipleOf({BLOCK_MULTIPLE_TOKENS})])."
        )
    try:
        capacity = plan_capacity(settings)
    except ValueError as error:
        return _fail(f"ValueError: {error}")
    _announce(settings, capacity)
    time.sleep(settings.simulate_slow_start)
    while settings.simulate_never_ready:
        time.sleep(1.0)
    return asyncio.run(_serve(settings, capacity))


async def _serve(settings: Settings, capacity: Capacity) -> int:
    engine = EngineLoop(settings, capacity)
    api = Api(settings, capacity, engine)
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(
            lambda: Connection(api.handle),
            settings.host,
            settings.port,
            backlog=_LISTEN_BACKLOG,
        )
    except OSError as error:
        return _fail(f"OSError: {error}")
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    port = server.sockets[0].getsockname()[1]
    _say(f"INFO: Application startup complete, listening on http://{settings.host}:{port}")
    steps = loop.create_task(engine.run())
    ended = loop.create_task(stopped.wait())
    await asyncio.wait((steps, ended), return_when=asyncio.FIRST_COMPLETED)
    if steps.done():
        steps.result()
    _say("INFO: Shutting down")
    # Connections in flight are cut, as clients of a server that is stopped must expect.
    os._exit(0)


def _announce(settings: Settings, capacity: Capacity) -> None:
    _say(f"INFO: Initializing a V1 LLM engine (v{__version__}), simulated")
    _say(
        f"INFO: CPU KV cache size: {capacity.tokens:,} tokens, Maximum concurrency for "
        f"{settings.max_model_len:,} tokens per request: {capacity.concurrency:.2f}x"
    )


def _fail(message: str, code: int = 1) -> int:
    _say(message)
    return code


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
