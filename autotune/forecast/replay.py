"""Replay requests against a model of the engine, in virtual time.

The scheduler and the block pool are those of the simulated engine, which follow vLLM's V1
scheduler; a step takes what a `StepCost` says. Nothing sleeps: a run of minutes takes a fraction of
a second.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvtune.autotune.forecast.evicting import EvictingScheduler
from kvtune.autotune.forecast.offloading import OffloadingScheduler
from kvtune.autotune.forecast.page_evicting import PageEvictingScheduler, lost_pages
from kvtune.autotune.forecast.requests import SimulatedRequest
from kvtune.autotune.forecast.sparse_reads import SparseReads
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.autotune.forecast.windowed import WindowedScheduler
from kvtune.engines.simulated import scheduler as engine
from kvtune.engines.simulated.blocks import BlockPool
from kvtune.errors import BadInput
from kvtune.policies.method import History
from kvtune.policies.page_budget import PageBudget
from kvtune.policies.sink_window import SinkWindow
from kvtune.profilers.load.arrivals import ClosedLoop, OpenLoop
from kvtune.types import LoadRun, RequestRecord

TURNAROUND_S = 0.001
"""From a client's sending to the engine's queue, one request after the other. Above 0, so that who
answers the end of a request with the next one misses the step that starts at that end, and that of
many sent at once the first is computed alone, as with a real server."""


@dataclass(frozen=True, slots=True)
class System:
    """An engine as the scheduler sees it: `blocks` blocks, one of them never used, and limits.

    `kept_ratio` is the share of its tokens that a sequence holds once its prompt is computed. With
    `tier_blocks` there is a second tier, from which a token comes back in `load_token_s`. `reads`
    are those under kvtune's plugin, of which `saved_ratio` of the time that they spare is saved.
    `longest_tokens` is the length of the longest request served, where it is known, and
    `in_flight_tokens` the most that are scheduled and not yet settled.
    """

    blocks: int
    block_tokens: int
    limits: engine.Limits
    kept_ratio: float = 1.0
    tier_blocks: int = 0
    load_token_s: float = 0.0
    reads: SparseReads | None = None
    saved_ratio: float = 1.0
    longest_tokens: int | None = None
    in_flight_tokens: int = 0

    @property
    def sink_window(self) -> SinkWindow | None:
        """What of a sequence StreamingLLM keeps; None where that is everything."""
        return None if self.reads is None else self.reads.sink_window

    @property
    def page_budget(self) -> PageBudget | None:
        """What of a prompt page eviction keeps; None where that is everything."""
        return None if self.reads is None else self.reads.page_budget

    @property
    def capacity_tokens(self) -> int:
        """Tokens of sequences that decode for which there is room, as engines report it.

        Of sequences that keep a part: those of as many of the longest ones as run at once.
        """
        if self.sink_window is not None and self.longest_tokens is not None:
            return int(self.blocks / self.blocks_of(self.longest_tokens) * self.longest_tokens)
        return int(self.blocks * self.block_tokens / self.kept_ratio)

    def blocks_of(self, tokens: int) -> int:
        """The most blocks that a sequence holds at a time until it has `tokens` tokens."""
        if self.sink_window is None:
            return math.ceil(tokens / self.block_tokens)
        return self.sink_window.blocks_per_request(self.in_flight_tokens, tokens)

    def blocks_at_end(self, request: History) -> int:
        """The blocks that a request holds when its last token is decoded."""
        if self.page_budget is None:
            return self.blocks_of(math.ceil(request.tokens * self.kept_ratio))
        lost = lost_pages(self.page_budget, request.at_once, request.tokens)
        return self.blocks_of(request.tokens) - lost


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What came of a simulation: `run` as a client would have recorded it, and what it can't see.

    `peak_usage` is the largest share of the usable blocks held after a step was planned,
    `peak_running` the most sequences that ran at once. Means are over steps that only decode (0
    without one): sequences, and tokens in their caches together. `prefill_s` is the mean time from
    a request's first step to its first token.
    """

    run: LoadRun
    steps: int
    preemptions: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    peak_usage: float
    peak_running: int
    mean_sequences: float
    mean_resident_tokens: float
    prefill_s: float


def simulate(
    requests: Sequence[SimulatedRequest],
    arrivals: OpenLoop | ClosedLoop,
    system: System,
    cost: StepCost,
    *,
    until_ended: int | None = None,
    together: bool = False,
) -> SimulatedRun:
    """Serve `requests`, which stand in the order in which they are sent, from an empty cache.

    Those that are sent at once arrive one after the other, so that an idle engine computes the
    first one alone, or all in one step (`together`): a server does now this, now that. With
    `until_ended` the run is over when so many requests have ended; the others leave no record.

    Raises:
        BadInput: a request does not fit into the pool alone.
    """
    for request in requests:
        held_tokens = request.prompt_tokens + request.output_tokens - 1
        if system.blocks_of(held_tokens) > system.blocks - 1:
            raise BadInput(
                f"a request of {held_tokens:,} tokens does not fit into "
                f"{max(system.blocks - 1, 0) * system.block_tokens:,} tokens",
                fix="give the cache more memory",
            )
    return _Replay(requests, arrivals, system, cost, together).run(until_ended or len(requests))


def _scheduler(pool: BlockPool, system: System) -> engine.Scheduler:
    if system.kept_ratio < 1.0:
        return EvictingScheduler(pool, system.block_tokens, system.limits, system.kept_ratio)
    if system.tier_blocks:
        return OffloadingScheduler(pool, system.block_tokens, system.limits, system.tier_blocks)
    if system.sink_window is not None:
        return WindowedScheduler(
            pool, system.block_tokens, system.limits, system.sink_window, system.in_flight_tokens
        )
    if system.page_budget is not None:
        return PageEvictingScheduler(pool, system.block_tokens, system.limits, system.page_budget)
    return engine.Scheduler(pool, system.block_tokens, system.limits)


class _Replay:
    """One simulation: the client, the engine and the clock."""

    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        arrivals: OpenLoop | ClosedLoop,
        system: System,
        cost: StepCost,
        together: bool,
    ) -> None:
        self._requests = requests
        self._together = together
        self._width = arrivals.connections(len(requests))
        self._system = system
        self._cost = cost
        self._pool = BlockPool(system.blocks, caching=system.limits.prefix_caching)
        self._scheduler = _scheduler(self._pool, system)
        self._now_s = 0.0
        self._sent = self._in_flight = 0
        self._slot_free_s = self._arrived_s = 0.0
        self._on_its_way: deque[engine.Sequence] = deque()
        self._sent_s: list[float] = []
        self._gaps_s: list[list[float]] = []
        self._prefills_s: list[float] = []
        self._records: list[RequestRecord] = []
        self._peak_usage = 0.0
        self._peak_running = self._steps = 0
        self._decoding: list[tuple[int, int]] = []

    def run(self, ended: int) -> SimulatedRun:
        while len(self._records) < ended:
            self._receive()
            before_tokens = self._loaded_tokens
            step = self._scheduler.schedule(self._now_s)
            loaded_tokens = self._loaded_tokens - before_tokens
            self._peak_usage = max(self._peak_usage, self._pool.usage)
            if not step.chunks:
                # Whoever was thrown out starts over in the next round, where everyone fits alone.
                continue
            self._note(step)
            duration_s = self._cost.duration_s(step, self._system.reads, self._system.saved_ratio)
            self._now_s += duration_s + loaded_tokens * self._system.load_token_s
            for sequence in self._scheduler.complete(step, self._now_s):
                self._serve(sequence)
        steps = self._decoding
        return SimulatedRun(
            run=LoadRun(tuple(self._records), self._now_s, 0.0, {}, {}),
            steps=self._steps,
            preemptions=self._scheduler.preemptions,
            prefix_queries_tokens=self._scheduler.prefix_queries_tokens,
            prefix_hits_tokens=self._scheduler.prefix_hits_tokens,
            peak_usage=self._peak_usage,
            peak_running=self._peak_running,
            mean_sequences=fmean(sequences for sequences, _ in steps) if steps else 0.0,
            mean_resident_tokens=fmean(tokens for _, tokens in steps) if steps else 0.0,
            prefill_s=fmean(self._prefills_s) if self._prefills_s else 0.0,
        )

    @property
    def _loaded_tokens(self) -> int:
        scheduler = self._scheduler
        return scheduler.loaded_tokens if isinstance(scheduler, OffloadingScheduler) else 0

    def _receive(self) -> None:
        """Send what is due, and queue what has arrived; an idle engine waits for the next one."""
        self._send()
        if self._scheduler.is_idle:
            if not self._on_its_way:
                self._now_s = self._requests[self._sent].due_s
                self._send()
            self._now_s = max(self._now_s, self._on_its_way[0].arrived_s)
        while self._on_its_way and self._on_its_way[0].arrived_s <= self._now_s:
            self._scheduler.add(self._on_its_way.popleft())

    def _send(self) -> None:
        while self._sent < len(self._requests) and self._in_flight < self._width:
            request = self._requests[self._sent]
            if request.due_s > self._now_s:
                return
            sent_s = max(request.due_s, self._slot_free_s)
            before_s = sent_s if self._together else max(sent_s, self._arrived_s)
            self._on_its_way.append(
                engine.Sequence(
                    number=self._sent,
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.output_tokens,
                    hashes=request.hashes(self._system.block_tokens),
                    arrived_s=before_s + TURNAROUND_S,
                )
            )
            self._arrived_s = self._on_its_way[-1].arrived_s
            self._sent_s.append(sent_s)
            self._gaps_s.append([])
            self._sent += 1
            self._in_flight += 1

    def _note(self, step: engine.Step) -> None:
        self._steps += 1
        self._peak_running = max(self._peak_running, len(self._scheduler.running))
        if step.tokens == len(step.chunks):
            self._decoding.append((len(step.chunks), step.context_tokens))

    def _serve(self, sequence: engine.Sequence) -> None:
        if sequence.gap_s is not None:
            self._gaps_s[sequence.number].append(sequence.gap_s)
        elif sequence.scheduled_s is not None:
            self._prefills_s.append(self._now_s - sequence.scheduled_s)
        if not sequence.done:
            return
        if self._in_flight == self._width:
            self._slot_free_s = self._now_s
        self._in_flight -= 1
        request, number = self._requests[sequence.number], sequence.number
        self._records.append(
            RequestRecord(
                index=number,
                scheduled_s=self._sent_s[number],
                sent_s=self._sent_s[number],
                first_token_s=sequence.first_token_s,
                end_s=self._now_s,
                gaps_s=tuple(self._gaps_s[number]),
                input_tokens=sequence.prompt_tokens,
                output_tokens=sequence.generated_tokens,
                requested_output_tokens=request.output_tokens,
                cached_tokens=sequence.cached_tokens,
                finish_reason="length",
            )
        )
