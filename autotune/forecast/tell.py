"""The forecasts of a profile: every lever on the server that was profiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from kvtune.autotune.forecast.experience import Experience
from kvtune.autotune.forecast.foresight import subject_key
from kvtune.autotune.forecast.levers import levers
from kvtune.autotune.forecast.predict import make_forecaster
from kvtune.errors import BadInput
from kvtune.kernels.device import detect_detail, detect_device
from kvtune.policies.base import Context
from kvtune.policies.checkpoint import model_shape
from kvtune.policies.model_cache import ModelCache, read_model_cache
from kvtune.policies.model_config import load_config
from kvtune.profilers.measure import LoadPlan
from kvtune.types import EngineInfo, Forecast, Goal, LoadRun, Profile, Request


@dataclass(frozen=True, slots=True)
class Told:
    """Forecasts, and what they are for; `missing` says why there are none."""

    subject: str
    forecasts: tuple[Forecast, ...]
    missing: str = ""


def forecasts_of(
    profile: Profile,
    run: LoadRun,
    requests: Sequence[Request],
    plan: LoadPlan,
    goal: Goal,
    *,
    model: str | None,
    arguments: Mapping[str, JsonValue],
    experience: Experience | None = None,
) -> Told:
    """Forecast every lever from a profile and the `run` of `requests` behind it.

    `model` is the checkpoint on this disk, if it is known, and `arguments` the engine arguments of
    the server. `experience` is that of its device. A server that kvtune did not start is taken to
    run on a device like the one here.
    """
    context = Context(
        engine=profile.engine or _unknown_engine(profile),
        device=profile.device or detect_device(),
        detail=detect_detail(),
        model=None if model is None else model_shape(model),
        baseline=profile.effective,
        base_arguments=arguments,
        fingerprint=profile.fingerprint,
        verdict=profile.verdict,
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
    known = levers(forecaster.context, _cache(model), forecaster.mean, forecaster.experience)
    return Told(subject, tuple(told for lever in known for told in forecaster.forecast(lever)))


def _unknown_engine(profile: Profile) -> EngineInfo:
    version = profile.effective.engine_version if profile.effective else None
    return EngineInfo(
        name="vllm", version=version or "", distribution="vllm", platform="unknown", python=None
    )


def _cache(model: str | None) -> ModelCache | None:
    if model is None or not Path(model).exists():
        return None
    try:
        return read_model_cache(*load_config(Path(model)))
    except BadInput:
        return None
