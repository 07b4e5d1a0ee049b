"""When requests are sent: at the times of a trace (open loop) or as answers come (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvtune.errors import BadInput
from kvtune.profilers.load.request import PreparedRequest

Send = Callable[[int, float], Coroutine[Any, Any, None]]
"""Sends the request of an index that was due at a `time.perf_counter` time; ends with its end."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Send each request when the workload has it arrive, however the server is doing.

    `time_scale` multiplies the arrival times: 2 halves the request rate, 0.5 doubles it. With
    `max_concurrency` a request that is due waits until fewer than that many are in flight.
    """

    time_scale: float = 1.0
    max_concurrency: int | None = None

    def check(self, requests: Sequence[PreparedRequest]) -> None:
        """Refuse what cannot be replayed like this.

        Raises:
            BadInput: a request has no arrival time, or a setting is out of range.
        """
        if not 0 < self.time_scale < float("inf"):
            raise BadInput(
                f"the time scale has to be above 0, not {self.time_scale:g}",
                fix="use 1 for the times of the trace, 2 for half the rate, 0.5 for twice the rate",
            )
        if self.max_concurrency is not None:
            _check_concurrency(self.max_concurrency)
        missing = next((i for i, item in enumerate(requests) if item.arrival_s is None), None)
        if missing is not None:
            raise BadInput(
                f"request {missing} has no arrival time, so it cannot be sent at one",
                fix="give every request an arrival time, or replay with a fixed concurrency",
            )

    def connections(self, requests: int) -> int:
        """Return the most requests that can be in flight."""
        return min(requests, self.max_concurrency or requests)

    async def drive(self, requests: Sequence[PreparedRequest], start_s: float, send: Send) -> None:
        """Send all of `requests`, the first one at `start_s`, and wait for all to end."""
        arrivals = sorted((item.arrival_s or 0.0, i) for i, item in enumerate(requests))
        slots = asyncio.Semaphore(self.connections(len(requests)) or 1)
        async with asyncio.TaskGroup() as group:
            for arrival_s, index in arrivals:
                due_s = start_s + (arrival_s - arrivals[0][0]) * self.time_scale
                if (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                await slots.acquire()
                task = group.create_task(send(index, due_s))
                task.add_done_callback(lambda _: slots.release())


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Keep `concurrency` requests in flight: the next one is sent when one ends."""

    concurrency: int

    def check(self, requests: Sequence[PreparedRequest]) -> None:
        """Refuse what cannot be replayed like this.

        Raises:
            BadInput: the concurrency is below 1.
        """
        _check_concurrency(self.concurrency)

    def connections(self, requests: int) -> int:
        """Return the most requests that can be in flight."""
        return min(requests, self.concurrency)

    async def drive(self, requests: Sequence[PreparedRequest], start_s: float, send: Send) -> None:
        """Send all of `requests` in order and wait for all to end."""
        indexes = iter(range(len(requests)))

        async def work() -> None:
            for index in indexes:
                await send(index, time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(self.connections(len(requests))):
                group.create_task(work())


def _check_concurrency(concurrency: int) -> None:
    if concurrency < 1:
        raise BadInput(
            f"the concurrency has to be at least 1, not {concurrency}",
            fix="give the number of requests to keep in flight",
        )
