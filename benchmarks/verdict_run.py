"""Run one regime: profile its baseline as `kvtune profile` does, then measure its arms in turns."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue
from verdict_parts import Arm, Load, Regime
from verdict_results import CAPACITY, FIRST_TOKEN, GOODPUT, STEP, ArmResult, RegimeResult, Told

from kvtune.autotune.cli.options import make_plan
from kvtune.autotune.forecast.tell import forecasts_of
from kvtune.autotune.profiling import Subject, profile_of
from kvtune.autotune.replays import death, request_failure
from kvtune.engines.base import RunningServer, ServerSpec
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.errors import EngineError
from kvtune.policies.checkpoint import vocab_size
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.goal import parse_goal
from kvtune.profilers.load import runtime
from kvtune.profilers.measure import LoadPlan, replay_workload
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.probe import probe
from kvtune.types import (
    Ceilings,
    Device,
    EngineInfo,
    Forecast,
    Goal,
    LoadRun,
    Profile,
    Verdict,
    Workload,
    fingerprint_of,
)

PROBE_S = 30.0
"""The default of `kvtune profile`."""

WARMUP_REQUESTS = 1
START_TIMEOUT_S = 300.0
SETTLE_S = 3.0
"""After servers have started: what is measured right then is some per cent slower."""

KEPT = (GOODPUT, STEP, FIRST_TOKEN, "output_tokens_per_s", "failed_requests")


@dataclass(frozen=True, slots=True)
class Bench:
    """What all regimes have in common; `models` are folders by the regimes' names for them."""

    engine: VllmEngine
    device: Device
    ceilings: Ceilings
    models: Mapping[str, Path]
    logs: Path
    rounds: int
    seed: int


@dataclass(frozen=True, slots=True)
class _Judged:
    """What came of profiling the baseline."""

    profile: Profile
    unprobed: Verdict
    counters_only: Verdict
    told: Sequence[Forecast]
    forecast_problem: str
    run: LoadRun
    probe_s: float
    verdict_s: float


def run_regime(regime: Regime, bench: Bench) -> RegimeResult:
    """Profile the baseline, then send its load and those of the arms in turns.

    The baseline and every arm of the engine have a server of their own; those that have no load are
    idle, which takes no CPU. All of them are fresh: one that was profiled and probed took 13% more
    time for a step with long contexts than others with the same settings. A server that does not
    start is the arm's problem, not the regime's.

    Raises:
        EngineError: the baseline's server did not start or did not carry its load.
    """
    began_s = time.monotonic()
    load_average = os.getloadavg()[0]
    goal = parse_goal(regime.goal)
    with _launch(regime, Arm("profiled", "open"), bench) as profiled:
        judged = _judge(regime, profiled, goal, bench)
    verdict = judged.profile.verdict
    _say(f"{regime.name}: {verdict.bottleneck} ({verdict.confidence}), {verdict.summary}")
    with ExitStack() as running:
        base = Arm("baseline", "open")
        server = running.enter_context(_launch(regime, base, bench))
        twin = Arm("baseline again", "open")
        arms = [(base, server), (twin, running.enter_context(_launch(regime, twin, bench)))]
        results: dict[str, ArmResult] = {}
        for arm in regime.arms:
            result = ArmResult(name=arm.name, expected=arm.expected, is_engine=arm.is_engine)
            its = server
            if arm.load is None:
                try:
                    its = running.enter_context(_launch(regime, arm, bench))
                except EngineError as error:
                    results[arm.name] = result.model_copy(update={"problem": error.message})
                    continue
            if arm.is_engine:
                result = result.model_copy(
                    update={
                        "told": _told(judged.told, arm.on(regime.arguments)),
                        "kv_tokens": its.effective.kv_cache_size_tokens,
                    }
                )
            results[arm.name] = result
            arms.append((arm, its))
        time.sleep(SETTLE_S)
        rounds: dict[str, list[dict[str, float]]] = {arm.name: [] for arm, _ in arms}
        for number in range(bench.rounds):
            first = number % len(arms)
            for arm, its in arms[first:] + arms[:first]:
                load = arm.load or regime.load
                figures = _send(regime, load, its, goal, number, arm.name, bench)
                rounds[arm.name].append(figures)
    return RegimeResult(
        name=regime.name,
        truth=regime.truth,
        built=regime.built,
        goal=regime.goal,
        arguments={name: str(value) for name, value in regime.arguments.items()},
        verdict=verdict,
        unprobed=judged.unprobed,
        counters_only=judged.counters_only,
        step_time=judged.profile.step_time,
        load_s=judged.run.duration_s,
        probe_s=judged.probe_s,
        verdict_s=judged.verdict_s,
        warnings=judged.profile.warnings,
        forecast_problem=judged.forecast_problem,
        counters={name: value for name, value in judged.run.counters.items() if value},
        baseline=tuple(rounds[base.name]),
        twin=tuple(rounds[twin.name]),
        arms=tuple(
            result.model_copy(update={"rounds": tuple(rounds.get(name, ()))})
            for name, result in results.items()
        ),
        load_average=load_average,
        wall_s=time.monotonic() - began_s,
    )


def _launch(regime: Regime, arm: Arm, bench: Bench) -> RunningServer:
    model = str(bench.models[arm.model or regime.model])
    return bench.engine.launch(
        ServerSpec(model, served_model_name="m", arguments=arm.on(regime.arguments)),
        log_path=bench.logs / f"{regime.name}-{arm.name.replace(' ', '-')}.log",
        start_timeout_s=START_TIMEOUT_S,
    )


def _judge(regime: Regime, server: RunningServer, goal: Goal, bench: Bench) -> _Judged:
    """Do what `kvtune profile` does with a server that it launched."""
    model, info = str(bench.models[regime.model]), bench.engine.describe()
    requests = regime.load.make()
    workload = Workload(regime.name, "verdicts", requests, (), fingerprint(requests))
    plan = _plan(regime.load, model)
    start_s = time.monotonic()
    run = _replayed(server, regime.load, plan, _salt(regime, -1, "profile", bench))
    probed = runtime.run(
        probe(
            server.endpoint,
            server.effective,
            budget_s=PROBE_S,
            salt=_salt(regime, -1, "probe", bench),
            vocab_size=vocab_size(model) or plan.vocab_size,
            resets_cache=True,
            should_stop=server.failure,
        )
    )
    subject = _subject(regime, server, model, info, workload, bench)
    profile = profile_of(
        subject, run, goal, is_load_ours=True, ceilings=bench.ceilings, probed=probed
    )
    verdict_s = time.monotonic() - start_s
    told = forecasts_of(profile, run, requests, plan, goal, model=model, arguments=regime.arguments)
    unprobed = profile_of(subject, run, goal, is_load_ours=True, ceilings=bench.ceilings)
    watched = replace(run, records=())
    stranger = replace(subject, fingerprint=None, engine=None, device=None)
    return _Judged(
        profile=profile,
        unprobed=unprobed.verdict,
        counters_only=profile_of(stranger, watched, goal, is_load_ours=False).verdict,
        told=told.forecasts,
        forecast_problem=told.missing,
        run=run,
        probe_s=probed.wall_s,
        verdict_s=verdict_s,
    )


def _subject(
    regime: Regime,
    server: RunningServer,
    model: str,
    info: EngineInfo,
    workload: Workload,
    bench: Bench,
) -> Subject:
    return Subject(
        model=model,
        served_name=server.endpoint.model,
        arguments=regime.arguments,
        endpoint_url=server.endpoint.url,
        effective=server.effective,
        engine=info,
        device=bench.device,
        fingerprint=workload.fingerprint,
    )


def _plan(load: Load, model: str) -> LoadPlan:
    requests = load.make()
    plan = make_plan(
        Workload("verdicts", "verdicts", requests, (), fingerprint(requests)),
        model=model,
        concurrency=load.concurrency,
        time_scale=1.0,
        natural_stop=False,
        output_tokens=load.output_tokens,
    )
    return replace(plan, warmup_requests=WARMUP_REQUESTS)


def _told(forecasts: Sequence[Forecast], arguments: Mapping[str, JsonValue]) -> dict[str, Told]:
    """What was forecast for the engine with these arguments, by metric."""
    return {
        found.metric: Told(ratio=found.ratio, predicted=found.predicted, reason=found.reason)
        for found in forecasts
        if found.served_by == "engine"
        and found.arguments == arguments
        and found.metric in (*KEPT, CAPACITY)
    }


def _send(
    regime: Regime,
    load: Load,
    server: RunningServer,
    goal: Goal,
    number: int,
    name: str,
    bench: Bench,
) -> dict[str, float]:
    """Send a load of fresh prompts and return its figures."""
    plan = _plan(load, str(bench.models[regime.model]))
    run = _replayed(server, load, plan, _salt(regime, number, name, bench))
    found = measure(run, goal)
    _say(f"  round {number + 1}, {name}: {found[GOODPUT]:.3f} requests/s in {run.duration_s:.1f} s")
    return {metric: found[metric] for metric in KEPT if metric in found}


def _replayed(server: RunningServer, load: Load, plan: LoadPlan, salt: int) -> LoadRun:
    run = runtime.run(
        replay_workload(
            server.endpoint,
            load.make(),
            plan,
            salt=salt,
            max_model_len_tokens=server.effective.max_model_len_tokens,
            should_stop=server.failure,
        )
    )
    failure = death(server, run) or request_failure(run)
    if failure is not None:
        raise EngineError(failure.failure, failure.message, failure.fix, failure.log_excerpt)
    return run


def _salt(regime: Regime, number: int, name: str, bench: Bench) -> int:
    """Prompts that no other round and no other arm has."""
    return int(fingerprint_of([bench.seed, regime.name, number, name])[:7], 16)


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
