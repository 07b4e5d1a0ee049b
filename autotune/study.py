"""Which study a search belongs to: the same command on the same things continues the same one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import JsonValue

from kvtune.errors import BadInput
from kvtune.profilers.measure import LoadPlan
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import Device, EngineInfo, Goal, Workload, fingerprint_of


def open_study(
    store: Store,
    *,
    name: str | None,
    model: str,
    served_model_name: str | None,
    engine: EngineInfo,
    device: Device,
    workload: Workload,
    plan: LoadPlan,
    goal: Goal,
    base_arguments: Mapping[str, JsonValue],
    environment: Mapping[str, str],
    repeats: int,
    seed: int,
    server: Mapping[str, JsonValue] | None = None,
    quality: Mapping[str, JsonValue] | None = None,
    max_host_bytes: int | None = None,
) -> StudyRow:
    """The study of exactly this search, begun when there is none.

    Budgets are no part of what a study is, so a larger budget goes on where a smaller one ended.
    `repeats` and `seed` are: with others every trial would be another measurement. So are what
    servers are handed over with (`environment`) and what else shapes them here (`server`: the
    command and all of the environment that matters), what answers may lose (`quality`), and how
    much host memory a setting may take: trials that took more are not to be recommended.

    Raises:
        BadInput: `name` is that of a study of something else.
    """
    settings: dict[str, JsonValue] = {
        **plan.key(),
        "served_model_name": served_model_name,
        "environment": dict(environment),
        "server": dict(server or {}),
        "heldout": len(workload.heldout),
        "repeats": repeats,
        "seed": seed,
    }
    if quality is not None:  # Without, it is what it was before there were rules of quality.
        settings["quality"] = dict(quality)
    if max_host_bytes is not None:  # The same.
        settings["max_host_bytes"] = max_host_bytes
    identity = {
        "model": model,
        "engine": [engine.name, engine.version, engine.distribution],
        "device": device.key,
        "workload": workload.fingerprint.digest,
        "tuned": len(workload.requests),
        "goal": goal.model_dump(mode="json"),
        "base": dict(base_arguments),
        "settings": settings,
    }
    made = f"{_slug(model)}-{_slug(workload.name)}-{fingerprint_of(identity)[:6]}"
    found = store.study(name or made)
    if found is None:
        return store.create_study(
            name or made,
            goal=goal,
            model=model,
            engine=engine,
            device=device,
            workload_name=workload.name,
            fingerprint=workload.fingerprint,
            base_arguments=base_arguments,
            settings={**settings, "identity": fingerprint_of(identity), "load": _load(plan)},
        )
    if found.settings.get("identity") != fingerprint_of(identity):
        raise BadInput(
            f"study {found.name!r} is about another model, engine, device, workload, goal, "
            "rule of quality or setting",
            fix="choose another --study name, or repeat the command that began it",
        )
    return found


def _load(plan: LoadPlan) -> dict[str, JsonValue]:
    """How requests are sent, in numbers that another study's can be compared with."""
    return {"kind": type(plan.arrivals).__name__, **asdict(plan.arrivals)}


def _slug(text: str) -> str:
    name = Path(text).name if "/" in text else text
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "unnamed"
