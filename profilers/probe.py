"""Measure what decode steps cost by sending a server small batches of known size.

Only an idle server is probed: other requests would be measured with it, and slowed down. Prompts
are random and carry a salt of their own. A longer prompt of a sequence begins with its shorter
ones, so that later cells find most of it in the prefix cache and cost little more than their steps.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from kvtune.profilers.load.cache import reset_prefix_cache
from kvtune.profilers.load.client import ClosedLoop, replay
from kvtune.profilers.load.progress import Progress
from kvtune.profilers.load.request import PreparedRequest, prepare
from kvtune.profilers.materialize import materialize
from kvtune.profilers.probe_plan import PILOT, ProbeCell, ProbePlan, Speed, plan_probe
from kvtune.profilers.scrape import ENGINES, LOAD_GAUGES, Scraper
from kvtune.profilers.step_gaps import Observations, join, observations
from kvtune.types import (
    EffectiveConfig,
    Endpoint,
    Failure,
    FailureClass,
    LoadRun,
    Request,
)

IDLE_WAIT_S = 3.0
"""How long a server may take to be idle, after a cell as well as before the first one."""

IDLE_POLL_S = 0.1

SENDING_SHARE = 0.95
"""Share of the time in which requests are sent; the rest is for leaving the server idle."""

SHORTEST_STEP_S = 1e-4
"""A message that comes with the one before it says nothing of a step."""

ONCE_S = 3600.0
"""Between two samples of the gauges: the one at the start is enough."""

_FINISHED = "vllm:request_success_total"
_REQUESTS = "vllm:num_requests"
_PREEMPTED = "vllm:num_preemptions_total"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe saw and what it cost. `notes` say what was left out and what it left behind."""

    observations: Observations
    cells: int
    requests: int
    input_tokens: int
    generated_tokens: int
    wall_s: float
    notes: tuple[str, ...] = ()


async def probe(
    endpoint: Endpoint,
    effective: EffectiveConfig | None,
    *,
    budget_s: float,
    salt: int,
    vocab_size: int,
    resets_cache: bool,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], Failure | None] | None = None,
) -> ProbeResult:
    """Probe an idle server for at most `budget_s` and leave it idle.

    `resets_cache` empties the prefix cache afterwards, through the address that vLLM has in its
    development mode; for servers of others leave it off, as it drops their blocks too. Whatever
    ends the probe early (no time left, a server that dies or is busy, Ctrl-C), what was seen until
    then is returned with a note.
    """
    run = _Probe(endpoint, budget_s, salt, on_progress, should_stop)
    plan = plan_probe(effective, budget_s=budget_s)
    run.notes += plan.notes
    try:
        if plan.problem:
            raise _Over(plan.problem)
        prompts = _prompts(plan, vocab_size, salt)
        speed = await run.pilot(prompts[-1])
        plan = plan_probe(effective, budget_s=budget_s, speed=speed)
        await run.rounds(plan, prompts)
    except _TimeUp as reason:
        if run.cells < len(plan.cells):
            run.notes.append(f"the probe saw {run.cells} of {len(plan.cells)} cells: {reason}")
    except _Over as reason:
        run.notes.append(f"the probe ended after {run.cells} cells: {reason}")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        run.notes.append(f"the probe was interrupted after {run.cells} cells")
    if run.requests:
        is_cached = effective is None or effective.enable_prefix_caching is not False
        await run.leave(resets_cache=resets_cache and is_cached, is_cached=is_cached)
    return run.result()


class _Over(Exception):
    """The probe has to end, and why."""


class _TimeUp(_Over):
    """The time of the probe is over, as happens in the middle of a round."""


@dataclass(slots=True)
class _Probe:
    """A probe under way: what it saw and what it cost so far."""

    endpoint: Endpoint
    budget_s: float
    salt: int
    on_progress: Callable[[Progress], None] | None
    should_stop: Callable[[], Failure | None] | None
    notes: list[str] = field(default_factory=list)
    seen: list[Observations] = field(default_factory=list)
    cells: int = 0
    requests: int = 0
    input_tokens: int = 0
    generated_tokens: int = 0
    start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.start_s = time.perf_counter()

    async def pilot(self, prompt: tuple[int, ...]) -> Speed:
        """Find out how fast the server is with one request."""
        if self.endpoint.is_vllm:
            async with Scraper(self.endpoint) as scraper:
                samples = await scraper.read(LOAD_GAUGES)
            if samples is not None and ENGINES in samples.gauges:
                raise _Over("requests are spread over several engines, so that no batch is known")
        for input_tokens, output_tokens in PILOT:
            run = await self._send([prompt[:input_tokens]], output_tokens, f"pilot-{self.requests}")
            self._check(run)
        record = run.records[0]
        if record.first_token_s is None:
            raise _Over("the request that was to show its speed brought no token")
        first_s = record.first_token_s - record.sent_s
        return Speed(
            prefill_tokens_per_s=input_tokens / max(first_s, SHORTEST_STEP_S),
            step_s=max(fmean(record.gaps_s or (first_s,)), SHORTEST_STEP_S),
        )

    async def rounds(self, plan: ProbePlan, prompts: list[tuple[int, ...]]) -> None:
        """Send every cell of the plan once a round, in another order each time."""
        order = random.Random(self.salt)
        for _ in range(plan.rounds):
            for cell in order.sample(plan.cells, len(plan.cells)):
                await self._cell(cell, plan, prompts)

    async def leave(self, *, resets_cache: bool, is_cached: bool) -> None:
        """Wait until nothing of the probe runs, and drop its blocks if that is wanted."""
        if (is_idle := await self._is_idle()) is None and self.endpoint.is_vllm:
            return  # nobody is there any more
        if is_idle is False:
            self.notes.append("the server still works on requests after the probe")
        if resets_cache and not await reset_prefix_cache(self.endpoint):
            self.notes.append("the prefix cache could not be reset: blocks of the probe age out")
        elif is_cached and not resets_cache:
            self.notes.append(
                "blocks of the probe age out of the prefix cache: resetting it would drop those of "
                "others too"
            )

    def result(self) -> ProbeResult:
        """What was seen until now."""
        return ProbeResult(
            observations=join(self.seen),
            cells=self.cells,
            requests=self.requests,
            input_tokens=self.input_tokens,
            generated_tokens=self.generated_tokens,
            wall_s=time.perf_counter() - self.start_s,
            notes=tuple(self.notes),
        )

    async def _cell(self, cell: ProbeCell, plan: ProbePlan, prompts: list[tuple[int, ...]]) -> None:
        chosen = [prompt[: cell.input_tokens] for prompt in prompts[: cell.sequences]]
        run = await self._send(chosen, plan.output_tokens, "cells")
        finished = sum(
            value for series, value in run.counters.items() if series.startswith(_FINISHED)
        )
        if finished > len(run.records):
            raise _Over("others used the server meanwhile")
        if run.counters.get(_PREEMPTED):
            self.notes.append(f"{cell.sequences} sequences of a cell were preempted: left out")
        else:
            self.seen.append(observations(run.records, blocks=1))
        self._check(run)
        self.cells += 1

    async def _send(self, prompts: list[tuple[int, ...]], output_tokens: int, salt: str) -> LoadRun:
        """Send prompts at once, to a server that nobody else uses."""
        if self._out_of_time() is not None:
            raise _TimeUp(f"its {self.budget_s:g} s are over")
        if await self._is_idle() is False:
            raise _Over("others use the server, and would be measured and slowed down")
        sent = [self._prepared(prompt, output_tokens, salt) for prompt in prompts]
        self.requests += len(sent)
        run = await replay(
            self.endpoint,
            sent,
            ClosedLoop(len(sent)),
            request_timeout_s=self.budget_s,
            stall_timeout_s=self.budget_s,
            on_progress=self.on_progress,
            should_stop=self._stop,
            scrape_interval_s=ONCE_S if self.endpoint.is_vllm else None,
        )
        self.input_tokens += sum(record.input_tokens or 0 for record in run.records)
        self.generated_tokens += sum(record.output_tokens for record in run.records)
        return run

    def _prepared(self, prompt: tuple[int, ...], output_tokens: int, salt: str) -> PreparedRequest:
        return prepare(
            Request(token_ids=prompt),
            model=self.endpoint.model,
            index=0,
            fixed_length=True,
            output_tokens=output_tokens,
            cache_salt=f"kvtune-{self.salt}-{salt}" if self.endpoint.is_vllm else None,
        )

    def _check(self, run: LoadRun) -> None:
        """End the probe if a request failed."""
        if self.should_stop is not None and (failure := self.should_stop()) is not None:
            raise _Over(failure.message)
        if self._out_of_time() is not None:
            raise _TimeUp(f"its {self.budget_s:g} s are over")
        if failed := [record.error for record in run.records if record.error is not None]:
            raise _Over(f"{len(failed)} of {len(run.records)} requests failed: {failed[0]}")

    def _stop(self) -> Failure | None:
        failure = None if self.should_stop is None else self.should_stop()
        return failure or self._out_of_time()

    def _out_of_time(self) -> Failure | None:
        if time.perf_counter() - self.start_s < SENDING_SHARE * self.budget_s:
            return None
        return Failure(failure=FailureClass.UNKNOWN, message="the time of the probe is over")

    async def _is_idle(self) -> bool | None:
        """Whether the server works on nothing, now or in a moment; `None` where it cannot tell."""
        if not self.endpoint.is_vllm:
            return None
        until_s = time.perf_counter() + IDLE_WAIT_S
        async with Scraper(self.endpoint) as scraper:
            while (samples := await scraper.read(LOAD_GAUGES)) is not None:
                if not any(value for key, value in samples.gauges.items() if _REQUESTS in key):
                    return True
                if time.perf_counter() > until_s:
                    return False
                await asyncio.sleep(IDLE_POLL_S)
        return None


def _prompts(plan: ProbePlan, vocab_size: int, salt: int) -> list[tuple[int, ...]]:
    """A prompt a sequence, as long as its longest cell needs, and one for the pilot."""
    lengths = [
        max(cell.input_tokens for cell in plan.cells if cell.sequences > sequence)
        for sequence in range(max(cell.sequences for cell in plan.cells))
    ]
    lengths.append(max(inputs for inputs, _ in PILOT))
    made = materialize(
        [Request(input_tokens=length, output_tokens=plan.output_tokens) for length in lengths],
        vocab_size=vocab_size,
        max_model_len_tokens=None,
        salt=salt,
        default_output_tokens=plan.output_tokens,
    )
    return [request.token_ids or () for request in made.requests]
