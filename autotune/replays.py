"""Replay loads on the server of one trial, and tell whether what came back is a measurement.

Every replay has fresh prompts and finds an empty prefix cache, so that none profits from another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvtune.autotune.contamination import contamination
from kvtune.profilers.load import runtime
from kvtune.profilers.load.cache import reset_prefix_cache
from kvtune.profilers.load.client import Watch
from kvtune.profilers.measure import LoadPlan, replay_workload, sent_requests, without_text
from kvtune.profilers.quality.traffic import health
from kvtune.types import (
    Failure,
    FailureClass,
    LoadRun,
    OutputHealth,
    Request,
    Status,
    Trial,
    fingerprint_of,
)

if TYPE_CHECKING:
    from kvtune.autotune.trial import Bench
    from kvtune.engines.base import RunningServer

TOLERATED_ERROR_SHARE = 0.01
"""A replay with more failed requests than this is a failure. Latencies leave failed requests out,
and the slowest are the first to fail: a p99 is about one request in a hundred, so with more than
that missing it would describe a load that the server did not carry."""

DYING_S = 2.0
"""How long a crash may take from the first connection that is cut to the end of the process."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of the load of a trial: the runs that its figures are of, one a repeat, or why
    there are none. `metrics` are figures beside theirs, and `known` is what else the measurement is
    to say.
    """

    runs: tuple[LoadRun, ...] = ()
    failure: Failure | None = None
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    known: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Replays:
    """Replays loads on the server of a trial. `outputs` is what answers looked like at first.

    `load_s` is how long all replays took together, `warmup_s` what came before them.
    """

    trial: Trial
    bench: Bench
    server: RunningServer
    count: int = field(default=0, init=False)
    load_s: float = field(default=0.0, init=False)
    warmup_s: float = field(default=0.0, init=False)
    outputs: OutputHealth | None = field(default=None, init=False)

    def replay(
        self, requests: Sequence[Request], plan: LoadPlan, *, watch: Watch | None = None
    ) -> tuple[LoadRun, Failure | None]:
        """Send every request once; the run, and why it is no measurement if it is none.

        Raises:
            BadInput: no request is left that fits the model's context.
        """
        server, is_first = self.server, self.count == 0
        if not is_first:
            runtime.run(reset_prefix_cache(server.endpoint))
        began = self.bench.clock()
        run = runtime.run(
            replay_workload(
                server.endpoint,
                requests,
                plan,
                salt=salt_of(self.trial, self.count),
                max_model_len_tokens=server.effective.max_model_len_tokens,
                on_progress=self.bench.reporter.load,
                should_stop=server.failure,
                keep_text=is_first,
                watch=watch,
            )
        )
        self.count += 1
        self.load_s += run.duration_s
        self.warmup_s += max(0.0, self.bench.clock() - began - run.duration_s)
        if is_first:
            self.outputs = outputs_of(run, requests, plan, server)
            run = without_text(run)
        failure = death(server, run) or request_failure(run)
        if failure is None and not run.cut:
            failure = contamination(run, requests, plan, server.effective)
        return run, failure


class PutsLoad(Protocol):
    """Puts the load of a trial on its server."""

    def __call__(
        self, replays: Replays, requests: Sequence[Request], watch: Watch | None
    ) -> Loaded:
        """What came of it; `watch` may cut the first replay, which ends the trial."""


def undisturbed(
    replays: Replays, requests: Sequence[Request], plan: LoadPlan, *, watch: Watch | None = None
) -> tuple[LoadRun, Failure | None]:
    """Replay a load; where the machine changed during it, one other replay counts in its place."""
    from kvtune.profilers.drift import drift_warning

    run, failure = replays.replay(requests, plan, watch=watch)
    if failure is None and not run.cut and (changed := drift_warning(run.records)):
        replays.bench.reporter.note(f"{changed}; the load is replayed once more")
        return replays.replay(requests, plan)
    return run, failure


def fixed_load(replays: Replays, requests: Sequence[Request], watch: Watch | None) -> Loaded:
    """Replay the load as the plan says, as often as the trial has repeats."""
    plan = replays.bench.plan
    runs: list[LoadRun] = []
    for repeat in range(replays.trial.repeats):
        run, failure = undisturbed(replays, requests, plan, watch=None if repeat else watch)
        if failure is not None:
            return Loaded(tuple(runs), failure)
        runs.append(run)
        if run.cut:
            longest = replays.server.effective.max_model_len_tokens
            sent = sent_requests(requests, plan, max_model_len_tokens=longest)
            share = len(run.records) / len(sent)
            known = {"status": Status.CUT, "share": share, "cut": run.cut, "outputs": None}
            return Loaded(tuple(runs), known=known)
    return Loaded(tuple(runs))


def outputs_of(
    run: LoadRun, requests: Sequence[Request], plan: LoadPlan, server: RunningServer
) -> OutputHealth:
    """What the answers of a replay that kept their text look like."""
    sent = sent_requests(requests, plan, max_model_len_tokens=server.effective.max_model_len_tokens)
    return health(
        ((sent[record.index], record) for record in run.records),
        block_tokens=server.effective.block_size_tokens,
    )


def death(server: RunningServer, run: LoadRun | None = None) -> Failure | None:
    """What the server died of. One that cut connections may take a moment until it is gone."""
    is_silent = run is None or not (run.records or run.cut)
    suspect = is_silent or (run is not None and any(not record.ok for record in run.records))
    until_s = time.monotonic() + (DYING_S if suspect else 0.0)
    while (failure := server.failure()) is None and time.monotonic() < until_s:
        time.sleep(0.05)
    return failure


def silence(error: OSError) -> Failure:
    """The failure that an unanswered question is where the server itself seems fine."""
    hangs = str(error).startswith(("stalled", "timeout"))
    return Failure(
        failure=FailureClass.HANG_UNDER_LOAD if hangs else FailureClass.REQUEST_ERRORS,
        message=f"the server stopped answering: {error}",
        fix="read the server's log",
    )


def salt_of(trial: Trial, replay: int) -> int:
    """What makes the prompts of this replay differ from every other one's of the study."""
    return int(fingerprint_of([trial.seed, trial.number, trial.repeats, replay])[:7], 16)


def request_failure(run: LoadRun) -> Failure | None:
    """The failure that a replay's request errors amount to, if they do."""
    if not run.records and not run.cut:
        return Failure(
            failure=FailureClass.HANG_UNDER_LOAD,
            message="; ".join(run.warnings) or "the server answered no request of the warm-up",
            fix="read the server's log",
        )
    failed = [record for record in run.records if not record.ok]
    if len(failed) <= TOLERATED_ERROR_SHARE * len(run.records):
        return None
    stalled = sum("stalled" in (record.error or "") for record in failed)
    kind = (
        FailureClass.HANG_UNDER_LOAD if stalled > len(failed) / 2 else FailureClass.REQUEST_ERRORS
    )
    return Failure(
        failure=kind,
        message=f"{len(failed)} of {len(run.records)} requests failed; the first: "
        f"{failed[0].error or 'no token came back'}",
        fix="read the server's log; lower the load or raise the request timeout",
    )
