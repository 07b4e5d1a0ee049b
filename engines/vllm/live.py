"""Change a running server instead of starting another one: which options, and how it is asked.

The far side is `plugin.live_changes`, or the simulated server, which answers the same.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from kvtune.engines.base import CannotChange
from kvtune.engines.vllm.arguments import normal_name
from kvtune.engines.vllm.effective import number_of
from kvtune.engines.vllm.plugin.live_changes import METHOD
from kvtune.policies.plugin_arguments import asked_by
from kvtune.types import EffectiveConfig

# What the scheduler alone goes by, with the value that vLLM 0.32 gives it by default.
_PLAIN: dict[str, JsonValue] = {
    "long-prefill-token-threshold": 0,
    "max-num-active-seqs": None,
    "scheduler-reserve-full-isl": True,
    "watermark": 0.0,
}
# What shapes buffers too; a server can go below what it was started with.
_SIZES = ("max-num-batched-tokens", "max-num-seqs")
# A server that runs with one of these keeps or plans more than its scheduler's six values say.
_BARRIERS = frozenset(
    {
        "data-parallel-size",
        "disaggregated-prefill",
        "ec-transfer-config",
        "kv-offloading-size",
        "kv-transfer-config",
        "max-num-scheduled-tokens",
        "scheduler-cls",
        "speculative-config",
    }
)
_PINS = frozenset({"kv-cache-memory-bytes", "num-gpu-blocks-override"})

_ANSWER_LIMIT_S = 10.0
_IDLE_LIMIT_S = 5.0
_POLL_S = 0.05


def live_arguments(arguments: Mapping[str, JsonValue], *, keeps_sizes: bool) -> frozenset[str]:
    """The options that can be changed exactly on a server that runs with `arguments`.

    `keeps_sizes`: sizes shape nothing but buffers on this platform once the mode is eager and the
    size of the pool is said. Elsewhere graphs, kernels or the pool would be other ones.
    """
    given = {normal_name(name): value for name, value in arguments.items()}
    if _BARRIERS & given.keys() or asked_by(given).is_asked:
        return frozenset()
    is_pinned = any(given.get(name) is not None for name in _PINS)
    chunks = given.get("enable-chunked-prefill") is not False
    if keeps_sizes and given.get("enforce-eager") is True and is_pinned and chunks:
        return frozenset({*_PLAIN, *_SIZES})
    return frozenset(_PLAIN)


def wanted_values(
    started: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """What to ask a server that was `started` so for, to run as one started with `arguments`.

    Raises:
        CannotChange: another option differs, or the default of a size is not known.
    """
    before = {normal_name(name): value for name, value in started.items() if value is not None}
    after = {normal_name(name): value for name, value in arguments.items() if value is not None}
    changeable = {*_PLAIN, *_SIZES}
    for name in sorted((before.keys() | after.keys()) - changeable):
        if before.get(name) != after.get(name):
            raise CannotChange(f"--{name} is set when a server starts")
    wanted: dict[str, JsonValue] = {}
    for name in sorted(changeable):
        if name in after:
            wanted[name] = _value(name, after[name])
        elif name in before and name in _SIZES:
            raise CannotChange(f"the default of --{name} was overridden at the start")
        else:
            wanted[name] = _PLAIN[name] if name in before else None
    return wanted


def _value(name: str, given: JsonValue) -> JsonValue:
    if isinstance(given, bool):
        found: JsonValue = given
    else:
        number = number_of(given)
        found = int(number) if number is not None and number.is_integer() else number
    if found is None or isinstance(found, bool) != (name == "scheduler-reserve-full-isl"):
        raise CannotChange(f"--{name} {given!r} is for vLLM's parser to judge")
    return found


def ask(host: str, port: int, wanted: Mapping[str, JsonValue]) -> dict[str, Any]:
    """Change an idle server, and return what it says that it goes by now, by option.

    Raises:
        CannotChange: it refuses, is not idle within seconds, or does not answer.
    """
    body = json.dumps({"method": METHOD, "args": [json.dumps(dict(wanted))]}).encode()
    until_s = time.monotonic() + _IDLE_LIMIT_S
    while True:
        answer = _post(host, port, "/collective_rpc", body)
        if "set" in answer:
            return dict(answer["set"])
        if "refused" in answer:
            raise CannotChange(str(answer["refused"]))
        if "busy" not in answer:
            raise CannotChange("its engine does not know how to be changed")
        if time.monotonic() > until_s:
            raise CannotChange(f"it is still at work {_IDLE_LIMIT_S:.0f} s after its last load")
        time.sleep(_POLL_S)


def _post(host: str, port: int, path: str, body: bytes) -> dict[str, Any]:
    """The first result of a remote call; empty when the server knows no such call."""
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_LIMIT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise CannotChange(f"it does not answer: {error or type(error).__name__}") from error
    finally:
        connection.close()
    with contextlib.suppress(ValueError, LookupError, TypeError):
        result = json.loads(text)["results"][0]
        return result if isinstance(result, dict) else {}
    return {}


def changed_config(
    before: EffectiveConfig, wanted: Mapping[str, JsonValue], holds: Mapping[str, Any]
) -> EffectiveConfig:
    """The effective configuration after a change, read back from what the scheduler goes by.

    Raises:
        CannotChange: it goes by something else than was asked for.
    """
    capped = wanted["max-num-active-seqs"]
    expected = {name: value for name, value in wanted.items() if value is not None}
    if capped is None:
        expected["max-num-active-seqs"] = holds.get("max-num-seqs", -1)
    for name, value in expected.items():
        if holds.get(name) != value:
            raise CannotChange(f"--{name} reads back as {holds.get(name)!r}, not {value!r}")
    return before.model_copy(
        update={
            "max_num_seqs": holds["max-num-seqs"],
            "max_num_active_seqs": capped,
            "max_num_batched_tokens": holds["max-num-batched-tokens"],
            "long_prefill_token_threshold_tokens": holds["long-prefill-token-threshold"],
            "scheduler_reserve_full_isl": holds["scheduler-reserve-full-isl"],
            "watermark_ratio": holds["watermark"],
            "start_kind": "live",
            "source": tuple(dict.fromkeys(("scheduler", *before.source))),
        }
    )
