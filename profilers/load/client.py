"""Replay requests against a running server and record what a user of it would have seen.

The client answers for itself: it records how late it sent and how much CPU it used. It stops at
once when the server is known to be dead (`should_stop`) or sends nothing any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kvtune.kernels.nvml import GpuSampler, gpu_uses
from kvtune.profilers.follow import Follower, Seen
from kvtune.profilers.load.answer import Answer, KeptText
from kvtune.profilers.load.arrivals import ClosedLoop, OpenLoop
from kvtune.profilers.load.http import HttpPool
from kvtune.profilers.load.progress import Progress
from kvtune.profilers.load.request import PreparedRequest
from kvtune.profilers.load.runtime import allow_connections, quiet_collector
from kvtune.profilers.load.summary import run_warnings
from kvtune.profilers.load.warmup import pace_of
from kvtune.profilers.scrape import Scraper
from kvtune.types import Endpoint, Failure, LoadRun, RequestRecord

__all__ = ["ClosedLoop", "KeptText", "OpenLoop", "Progress", "Watch", "replay"]

TICK_S = 0.25
_WARMUP_CONCURRENCY = 8

ShouldStop = Callable[[], Failure | None]
OnProgress = Callable[[Progress], None]


class Watch(Protocol):
    """Follows a run and may end it; both methods are called while it is timed, so they are quick.

    What is in flight when it ends is dropped: it neither completed nor failed, and has no record.
    """

    def saw(self, record: RequestRecord) -> None:
        """A request ended, in the order in which they do."""

    def verdict(self, elapsed_s: float) -> str | None:
        """Asked four times a second: why the run is to be ended, or `None`."""


async def replay(
    endpoint: Endpoint,
    requests: Sequence[PreparedRequest],
    arrivals: OpenLoop | ClosedLoop,
    *,
    warmup: Sequence[PreparedRequest] = (),
    warmup_pass: int | None = None,
    request_timeout_s: float = 600.0,
    stall_timeout_s: float = 120.0,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
    scrape_interval_s: float | None = 1.0,
    keep_text: KeptText | None = None,
    watch: Watch | None = None,
) -> LoadRun:
    """Send `requests` to `endpoint` as `arrivals` says and record every token.

    `warmup` is sent first and left out of everything. With `warmup_pass`, so many of it are sent at
    a time, and the rest is not once decode steps are steady. Counters are read before and after the
    run, gauges every `scrape_interval_s` (None: no reading at all; each one costs the server a few
    milliseconds). `should_stop` is asked four times a second; when it returns a failure, requests
    in flight end with the error `stopped: ...` and the rest is not sent. The same happens, with
    `stalled: ...`, when requests are in flight and the server sends no byte on any connection for
    `stall_timeout_s`. A request not complete after `request_timeout_s` ends with `timeout: ...`.
    The answers that `keep_text` names have their text in the record. `watch` may end the run while
    nothing is wrong with the server.

    Failed requests are records with an error, never an exception. Cancelling closes all
    connections, so that the server drops what it was working on.

    Raises:
        BadInput: the endpoint is not an address, or `arrivals` does not fit `requests`.
    """
    arrivals.check(requests)
    allow_connections(arrivals.connections(len(requests)))
    pool = HttpPool.to_api(endpoint)
    limits = (request_timeout_s, stall_timeout_s, should_stop)
    warnings: list[str] = []
    seen: Seen | None = None
    try:
        async with Scraper(endpoint) as scraper:
            follower = Follower(scraper)
            at_once = warmup_pass or len(warmup)
            for first in range(0, len(warmup), at_once or 1):
                warmed = _Replay(pool, warmup[first : first + at_once], *limits)
                await warmed.run(ClosedLoop(_warmup_concurrency(arrivals)))
                warnings += warmed.warmup_warnings()
                if warmed.stop_reason is not None:
                    return LoadRun((), 0.0, 0.0, {}, {}, tuple(warnings))
                pace = None if warmup_pass is None else pace_of(warmed.records())
                if pace is None or pace.is_steady:
                    break
                if first + at_once >= len(warmup):
                    warnings.append(f"still unsteady after {len(warmup)} warm-up requests: {pace}")
            is_followed = scrape_interval_s is not None and await follower.read()
            measured = _Replay(pool, requests, *limits, on_progress, keep_text, watch)
            with quiet_collector(), GpuSampler() as sampled:
                cpu_before_s = time.process_time()
                start_s = time.perf_counter()
                sampler = (
                    asyncio.create_task(follower.follow(scrape_interval_s))
                    if is_followed and scrape_interval_s is not None
                    else None
                )
                try:
                    await measured.run(arrivals)
                finally:
                    if sampler is not None:
                        sampler.cancel()
                cpu_s = time.process_time() - cpu_before_s
            stopped = measured.stop_reason is not None and not measured.is_cut
            if sampler is not None:
                await asyncio.wait((sampler,))
                if not stopped:
                    await follower.read()
                seen = follower.seen(start_s)
            elif scraper.problems:
                warnings.append(f"the server's counters are incomplete: {scraper.problems[0]}")
    finally:
        await pool.close()
    records = measured.records()
    warnings += measured.warnings(records, arrivals)
    cut = measured.stop_reason if measured.is_cut else None
    run = LoadRun(records, measured.duration_s, cpu_s, {}, {}, tuple(warnings), cut=cut or "")
    if seen is None:
        return run
    # The first reading is from before the start, and may be the only one.
    counted_s = max(0.0, seen.to_s) - max(0.0, seen.from_s)
    return replace(
        run,
        counters=seen.counters,
        gauges=seen.gauges,
        warnings=(*run.warnings, *seen.notes),
        counted_s=None if seen.is_whole and not stopped else counted_s,
        lost=seen.lost,
        gpus=gpu_uses(sampled.samples),
    )


class _Replay:
    """One pass over requests: the answers so far, and the checks four times a second."""

    def __init__(
        self,
        pool: HttpPool,
        requests: Sequence[PreparedRequest],
        request_timeout_s: float,
        stall_timeout_s: float,
        should_stop: ShouldStop | None,
        on_progress: OnProgress | None = None,
        keep_text: KeptText | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._request_timeout_s = request_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._should_stop = should_stop
        self._on_progress = on_progress
        self._keep_text = keep_text
        self._watch = watch
        self._start_s = 0.0
        self._answers: dict[int, tuple[Answer, float]] = {}
        self._active: dict[int, Answer] = {}
        self._ended_tokens = 0
        self._failed = 0
        self.duration_s = 0.0
        self.stop_reason: str | None = None
        self.is_cut = False

    async def run(self, arrivals: OpenLoop | ClosedLoop) -> None:
        """Send everything, or as much as can be before the run has to stop."""
        self._start_s = time.perf_counter()
        driver = asyncio.create_task(arrivals.drive(self._requests, self._start_s, self._send))
        try:
            while self.stop_reason is None:
                await asyncio.wait((driver,), timeout=TICK_S)
                if driver.done():
                    break
                self._tick()
            self._end_active()
        finally:
            driver.cancel()
            await asyncio.wait((driver,))
        if not driver.cancelled():
            driver.result()
        now_s = time.perf_counter()
        self.duration_s = now_s - self._start_s
        self._report(now_s)

    def records(self) -> tuple[RequestRecord, ...]:
        """Return a record of every request that was sent, in the order of the workload."""
        return tuple(self._record(index) for index in sorted(self._answers))

    def _record(self, index: int) -> RequestRecord:
        answer, scheduled_s = self._answers[index]
        return answer.record(
            self._requests[index],
            index=index,
            scheduled_s=scheduled_s - self._start_s,
            start_s=self._start_s,
        )

    def warnings(
        self, records: Sequence[RequestRecord], arrivals: OpenLoop | ClosedLoop
    ) -> list[str]:
        """Return what is off about this pass and its `records`."""
        answers = [answer for answer, _ in self._answers.values()]
        found = run_warnings(
            records,
            without_usage=sum(a.error is None and a.output_tokens is None for a in answers),
            keeps_schedule=isinstance(arrivals, OpenLoop) and arrivals.max_concurrency is None,
        )
        if self.stop_reason is not None and not self.is_cut:
            unsent = len(self._requests) - len(answers)
            found.append(f"{self.stop_reason}; {unsent} of {len(self._requests)} were not sent")
        return found

    def warmup_warnings(self) -> list[str]:
        """Return what is off about this pass if it was the warm-up."""
        if self.stop_reason is not None:
            return [f"{self.stop_reason}; during the warm-up, nothing was measured"]
        errors = [answer.error for answer, _ in self._answers.values() if answer.error is not None]
        if not errors:
            return []
        return [f"{len(errors)} of {len(self._requests)} warm-up requests failed: {errors[0]}"]

    async def _send(self, index: int, due_s: float) -> None:
        if self.stop_reason is not None:
            return
        request = self._requests[index]
        kept = self._keep_text
        answer = Answer(0 if kept is None else kept.messages_of(index))
        self._answers[index] = (answer, due_s)
        self._active[index] = answer
        await self._pool.exchange(self._pool.post_json(request.path, request.body), answer)
        if self._active.pop(index, None) is not None:
            self._count(answer)
            if self._watch is not None:
                self._watch.saw(self._record(index))

    def _end_active(self) -> None:
        """End what is in flight with the reason of the stop; its sending is cancelled next."""
        now_s = time.perf_counter()
        for index, answer in self._active.items():
            if self.is_cut:
                del self._answers[index]
            else:
                answer.end(self.stop_reason, now_s)
                self._count(answer)
        self._active.clear()

    def _count(self, answer: Answer) -> None:
        self._ended_tokens += len(answer.token_times_s)
        self._failed += answer.error is not None

    def _tick(self) -> None:
        now_s = time.perf_counter()
        failure = self._should_stop() if self._should_stop is not None else None
        if failure is not None:
            self.stop_reason = f"stopped: {failure.message}"
            return
        sent = [(answer.sent_s, answer) for answer in self._active.values() if answer.sent_s]
        if sent:
            quiet_since_s = max(min(sent_s for sent_s, _ in sent), self._pool.last_bytes_s)
            if now_s - quiet_since_s > self._stall_timeout_s:
                self.stop_reason = (
                    f"stalled: the server sent nothing for {self._stall_timeout_s:g} s"
                )
                return
        for sent_s, answer in sent:
            if now_s - sent_s > self._request_timeout_s:
                self._pool.abort(
                    answer, f"timeout: not complete after {self._request_timeout_s:g} s"
                )
        if self._watch is not None:
            self.stop_reason = self._watch.verdict(now_s - self._start_s)
            self.is_cut = self.stop_reason is not None
        self._report(now_s)

    def _report(self, now_s: float) -> None:
        if self._on_progress is None:
            return
        elapsed_s = now_s - self._start_s
        tokens = self._ended_tokens + sum(len(a.token_times_s) for a in self._active.values())
        self._on_progress(
            Progress(
                done=len(self._answers) - len(self._active),
                failed=self._failed,
                total=len(self._requests),
                in_flight=len(self._active),
                elapsed_s=elapsed_s,
                output_tokens_per_s=tokens / elapsed_s,
            )
        )


def _warmup_concurrency(arrivals: OpenLoop | ClosedLoop) -> int:
    if isinstance(arrivals, ClosedLoop):
        return arrivals.concurrency
    return arrivals.max_concurrency or _WARMUP_CONCURRENCY
