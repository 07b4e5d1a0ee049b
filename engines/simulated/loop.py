"""Runs the scheduler against the clock and tells clients of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvtune.engines.simulated.blocks import BlockPool
from kvtune.engines.simulated.costs import Capacity, StepClock, limits_of
from kvtune.engines.simulated.metrics import Metrics
from kvtune.engines.simulated.options import Settings
from kvtune.engines.simulated.scheduler import Scheduler, Sequence

LAG_LIMIT_S = 0.25
"""How far the engine's clock may fall behind when the machine can't keep up. Short of it the steps
catch up, so that time stays proportional although sleeping is no finer than a millisecond."""


@dataclass(slots=True)
class Job:
    """A sequence and who waits for it. `on_token` is called after each token, last when `done`."""

    sequence: Sequence
    on_token: Callable[[Sequence], None]
    finish_reason: str
    max_tokens: int


class EngineLoop:
    """The engine of a server. Everything happens on the event loop that `run` is awaited in."""

    def __init__(self, settings: Settings, capacity: Capacity) -> None:
        self._settings = settings
        self._pool = BlockPool(capacity.blocks, caching=settings.enable_prefix_caching)
        self._scheduler = Scheduler(self._pool, capacity.block_tokens, limits_of(settings))
        self._clock = StepClock(settings)
        self._jobs: dict[int, Job] = {}
        self._submitted = 0
        self._work = asyncio.Event()
        self.metrics = Metrics(settings.model_name)
        self.is_hung = False

    def submit(
        self,
        prompt_tokens: int,
        hashes: list[int],
        output_tokens: int,
        on_token: Callable[[Sequence], None],
        *,
        finish_reason: str,
        max_tokens: int,
    ) -> Sequence:
        """Queue a request for `output_tokens` tokens, after which it ends for `finish_reason`."""
        self._submitted += 1
        sequence = Sequence(
            number=self._submitted,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            hashes=hashes,
            arrived_s=asyncio.get_running_loop().time(),
        )
        self._jobs[sequence.number] = Job(sequence, on_token, finish_reason, max_tokens)
        self._scheduler.add(sequence)
        self._work.set()
        return sequence

    def drop(self, sequence: Sequence) -> None:
        """Stop working on a request whose client is gone."""
        job = self._jobs.pop(sequence.number, None)
        if job is not None:
            self._scheduler.drop(sequence)
            self.metrics.finished(sequence, "abort", job.max_tokens)
            self._set_gauges()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; refused (False) while requests hold blocks."""
        return self._pool.reset_cache()

    def change(self, settings: Settings) -> bool:
        """Go by the limits of other settings, with an empty cache; refused (False) while at work.

        Nothing else of `settings` counts.
        """
        if not self._scheduler.is_idle or not self._pool.reset_cache():
            return False
        self._scheduler.set_limits(limits_of(settings))
        return True

    async def run(self) -> None:
        """Run steps for ever; one that would end in the future is waited for."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while True:
            if self._scheduler.is_idle or self.is_hung:
                self._work.clear()
                await self._work.wait()
                now_s = loop.time()
            step = self._scheduler.schedule(now_s)
            now_s = max(now_s, loop.time() - LAG_LIMIT_S) + self._clock.duration_s(step)
            if self._settings.enable_mfu_metrics:
                self.metrics.estimated(
                    step, self._settings.simulate_weight_bytes, self._settings.kv_bytes_per_token
                )
            await asyncio.sleep(max(0.0, now_s - loop.time()))
            if not self.is_hung:
                self._deliver(self._scheduler.complete(step, now_s))

    def _deliver(self, served: list[Sequence]) -> None:
        self.metrics.served(served)
        for sequence in served:
            job = self._jobs[sequence.number]
            if sequence.done:
                del self._jobs[sequence.number]
                self.metrics.finished(sequence, job.finish_reason, job.max_tokens)
            job.on_token(sequence)
        self._set_gauges()

    def _set_gauges(self) -> None:
        gauges, counters = self.metrics.gauges, self.metrics.counters
        waiting = len(self._scheduler.waiting)
        gauges["num_requests_running"] = len(self._scheduler.running)
        gauges["num_requests_waiting"] = waiting
        gauges['num_requests_waiting_by_reason{reason="capacity"}'] = waiting
        gauges["kv_cache_usage_perc"] = self._pool.usage
        counters["num_preemptions"] = self._scheduler.preemptions
        counters["prefix_cache_queries"] = self._scheduler.prefix_queries_tokens
        counters["prefix_cache_hits"] = self._scheduler.prefix_hits_tokens
