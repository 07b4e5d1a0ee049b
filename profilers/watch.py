"""Watch a server that others use: read its counters for a while, and send nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvtune.address import without_query
from kvtune.errors import EngineError
from kvtune.kernels.nvml import GpuSampler, gpu_uses
from kvtune.profilers.follow import Follower
from kvtune.profilers.scrape import Scraper
from kvtune.types import Endpoint, FailureClass, LoadRun

INTERVAL_S = 1.0
"""Between two readings. One takes vLLM 0.32 with one engine 2.85 ms of CPU (614 lines, on a busy
machine; benchmarks/watching.py): two a second would be over half a per cent of a core."""

INTERVAL_MOST_S = 5.0
"""Half a minute of watching has half a dozen samples then, and a loss is noticed in time."""

COST_SHARE = 0.005
"""The most that readings may take of one core; they come less often to keep it."""

GIVE_UP_S = 20.0
"""A server that cannot be read for so long is not waited for."""


async def watch(
    endpoint: Endpoint,
    duration_s: float,
    *,
    interval_s: float | None = None,
    give_up_s: float = GIVE_UP_S,
    on_start: Callable[[], None] | None = None,
    on_second: Callable[[float], None] | None = None,
) -> LoadRun:
    """Watch for `duration_s`, or until the server cannot be read for `give_up_s`.

    The metrics are read every `interval_s`; `None` is as often as what a reading takes allows.
    `on_start` is called when they have been read once: what happens from then on is seen.
    Where it restarts or goes away, the run is that of its longest life; `lost` is set if it was
    gone at the end.

    Raises:
        EngineError: the metrics cannot be read at all.
    """
    async with Scraper(endpoint) as scraper:
        follower = Follower(scraper)
        # NVML may take long to start: what is watched begins after it.
        with GpuSampler() as sampled:
            if not await follower.read():
                where = without_query(endpoint.metrics_url or endpoint.url)
                raise EngineError(
                    FailureClass.REQUEST_ERRORS,
                    f"the metrics of {where} cannot be read: {'; '.join(scraper.problems)}",
                    fix="check the address; vLLM serves its metrics on the port of its API, and "
                    "--metrics-url names another place",
                )
            start_s = follower.heard_s
            if on_start is not None:
                on_start()
            sampler = asyncio.create_task(_sample(follower, interval_s))
            try:
                while (elapsed_s := time.perf_counter() - start_s) < duration_s:
                    if on_second is not None:
                        on_second(elapsed_s)
                    if time.perf_counter() - follower.heard_s > give_up_s:
                        break
                    await asyncio.sleep(min(1.0, duration_s - elapsed_s))
            finally:
                sampler.cancel()
        await asyncio.wait((sampler,))
        await follower.read()
        seen = follower.seen(start_s)
    return LoadRun(
        records=(),
        duration_s=seen.to_s - seen.from_s,
        client_cpu_s=0.0,
        counters=seen.counters,
        gauges=seen.gauges,
        warnings=seen.notes,
        lost=seen.lost,
        gpus=gpu_uses(sampled.samples),
    )


def interval_between(reading_s: float) -> float:
    """Seconds between readings that take `reading_s` each."""
    return min(max(INTERVAL_S, reading_s / COST_SHARE), INTERVAL_MOST_S)


async def _sample(follower: Follower, interval_s: float | None) -> None:
    """Take samples until cancelled.

    What a reading costs the server is not known; it is at most what the quickest one took. Slower
    ones waited for the network, or for a server busy with its requests.
    """
    while True:
        await follower.read(is_sample=True)
        pause_s = interval_between(follower.quickest_s) if interval_s is None else interval_s
        await asyncio.sleep(pause_s)
