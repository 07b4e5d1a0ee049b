"""The key of a point: two measurements with the same key measured the same thing."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from kvtune.policies.plugin_arguments import OPTION
from kvtune.types import Device, EngineInfo, fingerprint_of


def point_key(
    *,
    model: str,
    engine: EngineInfo,
    device: Device,
    workload_digest: str,
    arguments: Mapping[str, JsonValue],
    settings: Mapping[str, JsonValue],
) -> str:
    """Identify a point by everything that its figures depend on; 16 hex digits.

    `workload_digest` is the digest of the workload's fingerprint, `arguments` are all engine
    arguments of the trial and `settings` say how it is measured (repeats, requests, load shape).
    The order of names does not matter. Which plugin is there counts where one may be asked for.
    """
    asks = any(name.partition(".")[0] == OPTION for name in arguments)
    return fingerprint_of(
        {
            "model": model,
            "engine": [engine.name, engine.version, engine.distribution],
            "device": device.key,
            "workload": workload_digest,
            "arguments": dict(arguments),
            "settings": dict(settings),
            **({"plugin": engine.plugin} if asks else {}),
        }
    )
