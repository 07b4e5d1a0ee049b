"""How a profile is taken: on a server that runs already, or on one that is started for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvtune.autotune.cli.console import TerminalReporter
    from kvtune.autotune.profiling import Subject
    from kvtune.autotune.report.view import ProfileView
    from kvtune.engines.base import Engine
    from kvtune.policies.method_stack import MethodStack
    from kvtune.profilers.measure import LoadPlan
    from kvtune.profilers.probe import ProbeResult
    from kvtune.store.database import Store
    from kvtune.types import (
        Ceilings,
        EffectiveConfig,
        Endpoint,
        Failure,
        Forecast,
        Goal,
        LoadRun,
        Profile,
        Workload,
    )


_WITHOUT_CEILINGS = (
    "weight reads and overhead are then not told apart, while a lack of KV or of sequence slots, "
    "prefixes that are lost and idle time are named all the same"
)


@dataclass(frozen=True, slots=True)
class Load:
    """The workload to send and how to send it."""

    workload: Workload
    plan: LoadPlan


@dataclass(frozen=True, slots=True)
class Known:
    """What the user says of a server that runs already: its checkpoint and its arguments."""

    model: str | None
    arguments: options.Arguments | None


@dataclass(frozen=True, slots=True)
class Profiled:
    """A profile, and the run of the subject that it was judged by."""

    profile: Profile
    run: LoadRun
    subject: Subject
    is_load_ours: bool


def attached(
    address: Endpoint,
    known: Known,
    load: Load | None,
    watch_s: float,
    probe_s: float | None,
    goal: Goal,
    history: Store,
    reporter: TerminalReporter,
) -> Profiled:
    """Profile a server that runs already: send it the load, or only watch it for `watch_s`.

    The profile of one that goes away meanwhile is of what was seen until then; the run's `lost`
    says so.

    Raises:
        EngineError: it cannot be reached, or requests failed and nothing else is known of it.
    """
    from kvtune.autotune.profiling import Subject, as_told, profile_of
    from kvtune.autotune.replays import request_failure
    from kvtune.engines.vllm.attach import attach
    from kvtune.errors import EngineError
    from kvtune.profilers.load import runtime
    from kvtune.profilers.watch import watch

    reporter.phase(f"Attaching to {address.url}")
    endpoint, effective = attach(address)
    effective = as_told(effective, known.arguments)
    ceilings = _known_ceilings(endpoint.url, history, reporter)
    if known.model is not None and known.arguments is None:
        reporter.note(
            "the weights are taken to be on one device; if they are not, say so with "
            '--engine-args "--tensor-parallel-size N"'
        )
    if load is None:
        told = f"watching {endpoint.model} for {watch_s:g} s; nothing is sent"
        run = runtime.run(
            watch(
                endpoint,
                watch_s,
                on_start=lambda: reporter.note(told),
                on_second=reporter.watched,
            )
        )
    else:
        run = _replayed(endpoint, effective, load, reporter)
        if (failure := request_failure(run)) is not None:
            if not run.lost or not run.counters:
                raise EngineError(failure.failure, failure.message, failure.fix)
            run = replace(run, warnings=(*run.warnings, failure.message))
    probed = None
    if probe_s is not None and not run.lost:
        probed = _probed(endpoint, effective, probe_s, known.model, reporter, is_ours=False)
    subject = Subject(
        model=known.model,
        served_name=endpoint.model,
        arguments=known.arguments,
        endpoint_url=endpoint.url,
        effective=effective,
        fingerprint=None if load is None else load.workload.fingerprint,
    )
    profile = profile_of(subject, run, goal, is_load_ours=False, ceilings=ceilings, probed=probed)
    return Profiled(profile, run, subject, is_load_ours=False)


def launched(
    runner: Engine,
    model: str,
    served_model_name: str | None,
    arguments: options.Arguments,
    start_timeout_s: float,
    log_directory: Path,
    load: Load,
    probe_s: float | None,
    goal: Goal,
    history: Store,
    reporter: TerminalReporter,
) -> Profiled:
    """Start a server, profile it under the load, and stop it.

    The profile of one that dies meanwhile is of what was seen until then; the run's `lost` says so.

    Raises:
        EngineError: it does not start, or requests failed and nothing else is known of it.
    """
    from kvtune.autotune.profiling import Subject, device_ceilings, profile_of
    from kvtune.autotune.replays import death, request_failure
    from kvtune.engines.base import ServerSpec
    from kvtune.errors import EngineError
    from kvtune.kernels.device import detect_device

    info, device = runner.describe(), detect_device()
    ceilings = device_ceilings(info, device, history, reporter)
    reporter.phase(f"Starting {info.name} {info.version} with {model}")
    server = runner.launch(
        ServerSpec(model=model, served_model_name=served_model_name, arguments=arguments),
        log_path=log_directory / "server.log",
        start_timeout_s=start_timeout_s,
        on_log=reporter.server_log,
    )
    with server:
        reporter.ready(server.start_s)
        run = _replayed(
            server.endpoint, server.effective, load, reporter, should_stop=server.failure
        )
        died = death(server, run)
        failure = died or request_failure(run)
        probed = None
        if failure is None and probe_s is not None:
            probed = _probed(
                server.endpoint,
                server.effective,
                probe_s,
                model,
                reporter,
                is_ours=True,
                should_stop=server.failure,
            )
    if failure is not None:
        if died is None or not run.counters:
            raise EngineError(failure.failure, failure.message, failure.fix, failure.log_excerpt)
        _say_death(died, reporter)
        run = replace(run, lost=died.message, warnings=(*run.warnings, died.message))
    subject = Subject(
        model=model,
        served_name=server.endpoint.model,
        arguments=arguments,
        endpoint_url=server.endpoint.url,
        effective=server.effective,
        engine=info,
        device=device,
        fingerprint=load.workload.fingerprint,
    )
    profile = profile_of(subject, run, goal, is_load_ours=True, ceilings=ceilings, probed=probed)
    return Profiled(profile, run, subject, is_load_ours=True)


def _say_death(died: Failure, reporter: TerminalReporter) -> None:
    """Say what a server died of as an error would; what was seen until then follows it."""
    if died.log_excerpt:
        reporter.note(f"from the server's log:\n{died.log_excerpt.rstrip()}")
    reporter.note(f"the server died: {died.message}; the profile is of what was seen until then")
    if died.fix:
        reporter.note(f"fix: {died.fix}")


def told_of(
    profile: Profile,
    run: LoadRun,
    load: Load | None,
    goal: Goal,
    model: str | None,
    arguments: options.Arguments,
    stacks: Sequence[MethodStack],
    history: Store,
    reporter: TerminalReporter,
) -> tuple[Forecast, ...]:
    """What each lever and stack would change; kept until a search measures it.

    Without a load it is what follows by formula; no search measures that.
    """
    from kvtune.autotune.forecast.experience import experience_of
    from kvtune.autotune.forecast.tell import capacities_of, forecasts_of

    if load is None:
        told = capacities_of(profile, run, model=model, arguments=arguments, stacks=stacks)
    else:
        reporter.note("forecasting what each lever would change")
        experience = None
        if profile.device is not None and profile.engine is not None:
            experience = experience_of(history, profile.device, profile.engine)
        told = forecasts_of(
            profile,
            run,
            load.workload.requests,
            load.plan,
            goal,
            model=model,
            arguments=arguments,
            stacks=stacks,
            experience=experience,
        )
    if told.missing:
        reporter.note(f"nothing is forecast: {told.missing}")
    for note in told.notes:
        reporter.note(note)
    if told.subject:
        history.save_forecasts(told.subject, told.forecasts)
    return told.forecasts


def view_of(profiled: Profiled, load: Load | None, forecasts: tuple[Forecast, ...]) -> ProfileView:
    """What the terminal and a page show of a profile beside its verdict."""
    from kvtune.autotune.report.view import profile_view

    return profile_view(
        profiled.profile,
        profiled.run,
        profiled.subject,
        is_load_ours=profiled.is_load_ours,
        workload_name="" if load is None else load.workload.name,
        forecasts=forecasts,
    )


def _known_ceilings(url: str, history: Store, reporter: TerminalReporter) -> Ceilings | None:
    """What the history holds of this machine, if the server runs on it.

    Nothing is measured beside a server at work: it would disturb it, and be disturbed.
    """
    from kvtune.autotune.profiling import runs_here
    from kvtune.kernels.device import detect_device

    if not runs_here(url):
        reporter.note(
            f"what the server's device reaches is not known here: {_WITHOUT_CEILINGS}. To know it, "
            "run `kvtune doctor --measure` on the server's machine while it is idle, and then this "
            "command there, with --url http://127.0.0.1:PORT"
        )
        return None
    if (known := history.ceilings(detect_device().key)) is None:
        reporter.note(
            f"what this device reaches is not known: {_WITHOUT_CEILINGS}. To know it, stop the "
            "load, run `kvtune doctor --measure` once (some seconds), and then this command again"
        )
    else:
        reporter.note("the server has a local address, so it is taken to run on this device")
    return known


def _probed(
    endpoint: Endpoint,
    effective: EffectiveConfig | None,
    probe_s: float,
    model: str | None,
    reporter: TerminalReporter,
    *,
    is_ours: bool,
    should_stop: Callable[[], Failure | None] | None = None,
) -> ProbeResult:
    from kvtune.policies.checkpoint import vocab_size
    from kvtune.profilers.load import runtime
    from kvtune.profilers.measure import UNKNOWN_VOCAB_SIZE
    from kvtune.profilers.probe import probe
    from kvtune.profilers.probe_plan import plan_probe

    plan = plan_probe(effective, budget_s=probe_s)
    if not plan.problem:
        reporter.note(f"probing decode steps: {plan.cost()}; Ctrl-C ends the probe only")
    known = None if model is None else vocab_size(model)
    return runtime.run(
        probe(
            endpoint,
            effective,
            budget_s=probe_s,
            salt=options.fresh_salt(),
            vocab_size=known or UNKNOWN_VOCAB_SIZE,
            resets_cache=is_ours,
            on_progress=reporter.load,
            should_stop=should_stop,
        )
    )


def _replayed(
    endpoint: Endpoint,
    effective: EffectiveConfig | None,
    load: Load,
    reporter: TerminalReporter,
    *,
    should_stop: Callable[[], Failure | None] | None = None,
) -> LoadRun:
    from kvtune.profilers.load import runtime
    from kvtune.profilers.measure import replay_workload

    reporter.note(f"replaying {len(load.workload.requests)} requests of {load.workload.name}")
    return runtime.run(
        replay_workload(
            endpoint,
            load.workload.requests,
            load.plan,
            salt=options.fresh_salt(),
            max_model_len_tokens=None if effective is None else effective.max_model_len_tokens,
            on_progress=reporter.load,
            should_stop=should_stop,
        )
    )
