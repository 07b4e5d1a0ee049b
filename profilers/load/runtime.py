"""Keep the process from getting in the way of the clock."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any]

_SPARE_FILES = 64


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end, on uvloop where it is installed (a fifth less CPU a message).

    Ctrl-C, or a polite kill where its handler raises KeyboardInterrupt, cancels `main`, lets it
    clean up and raises KeyboardInterrupt.
    """
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    interrupt = _Interrupt()
    with asyncio.Runner(loop_factory=factory) as runner, interrupt.caught():
        try:
            found = runner.run(interrupt.watched(main))
        except BaseException as error:
            # What fails as it is ended does not hide that it was.
            if interrupt.came:
                raise KeyboardInterrupt from error
            raise
        if interrupt.came:
            raise KeyboardInterrupt
        return found


class _Interrupt:
    """Turns a KeyboardInterrupt of a signal's handler into the end of a task.

    Where it is raised while a loop hands data to a protocol, that takes it for a fault of the
    connection: the interrupt is lost, and so is a request. asyncio sees to its own Ctrl-C alone.
    """

    def __init__(self) -> None:
        self.came = False
        self._task: asyncio.Task[Any] | None = None

    async def watched(self, main: Coroutine[Any, Any, T]) -> T:
        """`main`, which is then what an interrupt cancels."""
        self._task = asyncio.current_task()
        return await main

    @contextmanager
    def caught(self) -> Iterator[None]:
        """A block in which interrupts cancel the task; a second, impatient one is raised."""
        replaced = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler) and handler is not signal.default_int_handler:
                    replaced[number] = handler
                    signal.signal(number, partial(self._handle, handler))
        try:
            yield
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)

    def _handle(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            if self.came or self._task is None or self._task.done():
                raise
            self.came = True
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the garbage collector from stopping the clock: a full collection takes tens of ms.

    What becomes garbage meanwhile is still young then, so that no full one is needed for it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def allow_connections(count: int) -> None:
    """Raise the soft limit of open files, within the hard one, so that `count` sockets fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
