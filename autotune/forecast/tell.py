"""The forecasts of a profile: every lever on the server that was profiled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from pydantic import JsonValue

from kvtune.autotune.forecast.counted import (
    counted_ratio,
    sequences_in,
    start_problem,
    system_with,
)
from kvtune.autotune.forecast.experience import Experience
from kvtune.autotune.forecast.foresight import subject_key
from kvtune.autotune.forecast.levers import NOT_SERVED, Lever, levers, stack_lever
from kvtune.autotune.forecast.predict import CAPACITY, SEQUENCES, SIMULATED, make_forecaster
from kvtune.autotune.forecast.replay import System
from kvtune.autotune.forecast.system import NAME_CHECKPOINT, as_reported, system_of
from kvtune.autotune.profiling import PARALLEL_SIZES, runs_here
from kvtune.errors import BadInput
from kvtune.kernels.device import detect_detail, detect_device
from kvtune.policies.base import Context
from kvtune.policies.checkpoint import model_shape, weight_bytes
from kvtune.policies.method import History
from kvtune.policies.method_stack import MethodStack, parse_stack
from kvtune.policies.model_cache import ModelCache, read_model_cache
from kvtune.policies.model_config import load_config
from kvtune.policies.settings import max_model_len_tokens, read_count
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.scrape import ENGINES
from kvtune.profilers.server_lengths import ANSWERS, PROMPTS, server_lengths
from kvtune.types import Device, EngineInfo, Forecast, Goal, LoadRun, Profile, Request

NEEDS_LOAD = "step time, TTFT and goodput need a workload: add --workload"
NEEDS_LIMITS = (
    "step time, TTFT and goodput depend on how many sequences and tokens a step takes, which this "
    'server does not tell: say it with --engine-args "--max-num-seqs N --max-num-batched-tokens N"'
)
IS_ELSEWHERE = (
    "the server is not on this machine, so that levers which depend on its device are not "
    "forecast: other blocks, number formats, offload; to forecast them, run this command there"
)
ELSEWHERE = Device(kind="cuda", name="not known", count=1, memory_bytes=None)
"""Stands for the device of a server on another machine. Nothing that is told depends on it."""

_ANYWHERE = {"enable-prefix-caching", "kv-cache-memory-bytes", "num-gpu-blocks-override"}
_LIMITS = {"max-num-seqs", "max-num-batched-tokens"}
"""Arguments that mean the same on every device once both are known; their defaults do not."""


@dataclass(frozen=True, slots=True)
class Told:
    """Forecasts, and what they are for; `missing` says why there are none.

    `subject` is empty where no later trial could measure them. `notes` are for the user.
    """

    subject: str
    forecasts: tuple[Forecast, ...]
    missing: str = ""
    notes: tuple[str, ...] = ()


def forecasts_of(
    profile: Profile,
    run: LoadRun,
    requests: Sequence[Request],
    plan: LoadPlan,
    goal: Goal,
    *,
    model: str | None,
    arguments: Mapping[str, JsonValue],
    stacks: Sequence[MethodStack] = (),
    experience: Experience | None = None,
) -> Told:
    """Forecast every lever, and `stacks`, from a profile and the `run` of `requests` behind it.

    `model` is the checkpoint on this disk, if it is known, and `arguments` the engine arguments of
    the server. `experience` is that of its device. Of a server on another machine only that is
    forecast which does not depend on its device.
    """
    context = _context(profile, model, arguments)
    if not _knows_limits(context):
        return capacities_of(
            profile, run, model=model, arguments=arguments, stacks=stacks, why=NEEDS_LIMITS
        )
    subject = subject_key(
        model=profile.model,
        engine=context.engine,
        device=context.device,
        workload_digest=profile.fingerprint.digest if profile.fingerprint else "",
        plan=plan,
        goal=goal,
    )
    try:
        forecaster = make_forecaster(
            requests, plan, run, goal, context, profile.step_time, experience=experience
        )
    except BadInput as error:
        return Told(subject, (), error.message)
    known = _levers(forecaster.context, model, forecaster.mean, stacks, forecaster.experience)
    return Told(
        "" if context.device is ELSEWHERE else subject,
        tuple(told for lever in known for told in forecaster.forecast(lever)),
        notes=_notes(context, "" if model else profile.model),
    )


def capacities_of(
    profile: Profile,
    run: LoadRun,
    *,
    model: str | None,
    arguments: Mapping[str, JsonValue],
    stacks: Sequence[MethodStack] = (),
    why: str = NEEDS_LOAD,
) -> Told:
    """Tell by formula what every lever makes of the pool, for a server that was only watched.

    The other metrics have no figure, and `why` as their reason. Sequences are as long as those that
    the server counted meanwhile, else as long as it takes them. The rest is as in `forecasts_of`.
    """
    context = as_reported(_context(profile, model, arguments))
    base = system_of(context.base_arguments, context)
    if run.gauges.get(ENGINES):
        return Told("", (), f"requests are spread over several engines; {why}")
    if base is None:
        return Told("", (), f"the size of the pool is not known; {why}")
    mean = _counted_mean(profile) or _longest(context)
    if mean is None:
        return Told("", (), f"how long a request may be is not known; {why}")
    known = _levers(context, model, mean, stacks, Experience())
    return Told(
        "",
        tuple(
            told
            for lever in known
            for told in _capacity_of(lever, base, context, mean, arguments, why)
        ),
        notes=_notes(context),
    )


def _context(profile: Profile, model: str | None, arguments: Mapping[str, JsonValue]) -> Context:
    device = profile.device
    if device is None and runs_here(profile.endpoint_url):
        device = detect_device()
    return Context(
        engine=profile.engine or _unknown_engine(profile),
        device=device or ELSEWHERE,
        detail=None if device is None else detect_detail(),
        model=None if model is None else model_shape(model),
        baseline=profile.effective,
        base_arguments=arguments,
        fingerprint=profile.fingerprint,
        verdict=profile.verdict,
    )


def _unknown_engine(profile: Profile) -> EngineInfo:
    version = profile.effective.engine_version if profile.effective else None
    return EngineInfo(
        name="vllm", version=version or "", distribution="vllm", platform="unknown", python=None
    )


def _cache(model: str | None) -> tuple[ModelCache | None, str]:
    """What a checkpoint on this disk caches, or why that is not known."""
    if model is None:
        return None, NAME_CHECKPOINT
    if not Path(model).exists():
        return None, f"{model} is not on this disk: {NAME_CHECKPOINT}"
    try:
        return read_model_cache(*load_config(Path(model))), ""
    except BadInput as error:
        return None, error.message


def _weight_bytes(model: str | None, arguments: Mapping[str, JsonValue]) -> int:
    """Bytes of weights on each device, 0 where they are not known."""
    total = None if model is None else weight_bytes(model)
    return (total or 0) // prod(read_count(arguments.get(name)) or 1 for name in PARALLEL_SIZES)


def _levers(
    ctx: Context,
    model: str | None,
    mean: History,
    stacks: Sequence[MethodStack],
    experience: Experience,
) -> list[Lever]:
    """All levers, and last the stacks that the user asked for, each in the place of its like."""
    cache, unread = _cache(model)
    asked = [stack_lever(stack, ctx, cache, mean, experience, unread=unread) for stack in stacks]
    taken = [_what_it_does(lever) for lever in asked]
    every = levers(
        ctx,
        cache,
        mean,
        experience,
        weight_bytes=_weight_bytes(model, ctx.base_arguments),
        unread=unread,
    )
    found = [lever for lever in every if _what_it_does(lever) not in taken]
    if ctx.device is not ELSEWHERE:
        return [*found, *asked]
    return [
        *(lever for lever in found if _is_same_anywhere(lever, ctx)),
        *(
            lever if _is_same_anywhere(lever, ctx) else replace(lever, problem=IS_ELSEWHERE)
            for lever in asked
        ),
    ]


def _what_it_does(lever: Lever) -> tuple[Mapping[str, JsonValue], str]:
    """The arguments and the stack of a lever, the latter as the user's is written."""
    return lever.arguments, str(parse_stack(lever.stack)) if lever.stack else ""


def _is_same_anywhere(lever: Lever, ctx: Context) -> bool:
    """Whether what a lever does is the same on every device."""
    if not lever.arguments:
        # Which number formats an engine serves, and what reads of them cost, depend on the device.
        return lever.not_served == NOT_SERVED and not lever.read_source
    allowed = _ANYWHERE | _LIMITS if _knows_limits(ctx) else _ANYWHERE
    return set(lever.arguments) <= allowed


def _knows_limits(ctx: Context) -> bool:
    """Whether the limits of a step are those of the server and no guess from another device."""
    if ctx.device is not ELSEWHERE:
        return True
    seen = ctx.baseline
    return (
        seen is not None
        and seen.max_num_seqs is not None
        and seen.max_num_batched_tokens is not None
    )


def _notes(ctx: Context, served_name: str = "") -> tuple[str, ...]:
    """What to know of forecasts; `served_name` is what the model is called if only a server did."""
    if ctx.device is ELSEWHERE:
        return (IS_ELSEWHERE,)
    if not served_name:
        return ()
    return (
        f"a search measures these forecasts if its model is called {served_name} too; with --model "
        "here it does so whatever the server calls it",
    )


def _counted_mean(profile: Profile) -> History | None:
    """The mean request that the server counted; None where none ended."""
    prompts = server_lengths(profile.counters, PROMPTS)
    answers = server_lengths(profile.counters, ANSWERS)
    if prompts is None or answers is None or not prompts.mean or answers.mean is None:
        return None
    return History(math.ceil(prompts.mean), math.ceil(answers.mean))


def _longest(ctx: Context) -> History | None:
    """A request as long as the server takes them, the last token of it generated."""
    longest = max_model_len_tokens(ctx.base_arguments, ctx)
    return None if longest is None else History(max(longest - 1, 1), 1)


def _capacity_of(
    lever: Lever,
    base: System,
    ctx: Context,
    mean: History,
    arguments: Mapping[str, JsonValue],
    why: str,
) -> tuple[Forecast, ...]:
    """A lever's two counts, and the metrics that have no figure without a load."""
    system = None if lever.problem else system_with(lever, base, ctx)
    problem = lever.problem or start_problem(system, ctx)

    def blank(metric: str, unit: str, reason: str) -> Forecast:
        return Forecast(
            lever=lever.name,
            stack=lever.stack,
            arguments={**arguments, **lever.arguments},
            served_by="reference" if lever.not_served else "engine",
            metric=metric,
            unit=unit,
            reason=problem or reason,
        )

    limits = why if _knows_limits(ctx) else NEEDS_LIMITS
    counts = [blank(CAPACITY, "tokens", ""), blank(SEQUENCES, "sequences", limits)]
    if not problem and system is not None:
        tokens = base.capacity_tokens, system.capacity_tokens
        sequences = sequences_in(base, mean), sequences_in(system, mean)
        changes = [_change(*tokens, "KV tokens")]
        known = [tokens]
        if _knows_limits(ctx):
            changes.append(_change(*sequences, f"sequences of {mean.tokens:,} tokens"))
            known.append(sequences)
        is_felt = any(before != after for before, after in known)
        reason = f"{lever.says}: {', '.join(changes)}" if is_felt else ", ".join(changes)
        for place, pair in enumerate(known):
            counts[place] = _counted(counts[place], *pair, reason)
    return (*counts, *(blank(metric, unit, why) for metric, unit in SIMULATED.items()))


def _change(before: int, after: int, what: str) -> str:
    return f"still {after:,} {what}" if before == after else f"{before:,} to {after:,} {what}"


def _counted(told: Forecast, before: int, after: int, reason: str) -> Forecast:
    ratio = counted_ratio(before, after)
    values = {"baseline": before, "predicted": after, "ratio": ratio, "reason": reason}
    return told.model_copy(update=values)
