"""Look at a server that somebody else runs. Only reads; never sends it work, never signals it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from kvtune.engines.vllm.effective import read_effective
from kvtune.errors import BadInput, EngineError
from kvtune.types import EffectiveConfig, Endpoint, FailureClass

TIMEOUT_S = 10.0


def attach(url: str) -> tuple[Endpoint, EffectiveConfig | None]:
    """Find out what serves at `url`. The configuration is None when it is no vLLM server.

    Raises:
        BadInput: `url` is no http address.
        EngineError: nothing answers there, or it is no OpenAI-compatible server.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise BadInput(f"{url!r} is no address", fix="write it like http://localhost:8000")
    models = _json(f"{base}/v1/models")
    listed = models.get("data") if isinstance(models, dict) else None
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
        raise EngineError(
            FailureClass.WRONG_MODEL,
            f"{base}/v1/models lists no model, so this is no OpenAI-compatible server",
            fix="give the address of the server's API, without /v1",
        )
    entry = listed[0]
    metrics = _optional_text(f"{base}/metrics")
    is_vllm = "vllm:" in metrics
    endpoint = Endpoint(url=base, model=str(entry.get("id")), is_vllm=is_vllm)
    if not is_vllm:
        return endpoint, None
    version = _optional_json(f"{base}/version").get("version")
    effective = read_effective(
        server_info=_optional_json(f"{base}/server_info?config_format=json"),
        metrics_text=metrics,
        log_text="",
        version=version,
        start_kind="attached",
    )
    if effective.max_model_len_tokens is None and isinstance(entry.get("max_model_len"), int):
        effective = effective.model_copy(update={"max_model_len_tokens": entry["max_model_len"]})
    return endpoint, effective


def _json(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        hint = " (it asks for an API key)" if error.code in (401, 403) else ""
        raise EngineError(
            FailureClass.REQUEST_ERRORS,
            f"{url} answers with HTTP {error.code}{hint}",
            fix="give the address of the server's API, without /v1",
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineError(
            FailureClass.REQUEST_ERRORS,
            f"{url} cannot be read: {reason}",
            fix="check the address, and that the server is up",
        ) from error


def _optional_json(url: str) -> dict[str, Any]:
    try:
        found = _json(url)
    except EngineError:
        return {}
    return found if isinstance(found, dict) else {}


def _optional_text(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except OSError:
        return ""
