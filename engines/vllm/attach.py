"""Look at a server that somebody else runs. Only reads; never sends it work, never signals it."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

from kvtune.engines.vllm.effective import read_effective
from kvtune.engines.vllm.secret_names import API_KEY_VARIABLE, KEY_FIX, REFUSED, key_problem
from kvtune.errors import BadInput, EngineError
from kvtune.types import EffectiveConfig, Endpoint, FailureClass

TIMEOUT_S = 10.0
_UNREADABLE = (OSError, ValueError, http.client.HTTPException)


def attach(url: str) -> tuple[Endpoint, EffectiveConfig | None]:
    """Find out what serves at `url`. The configuration is None when it is no vLLM server.

    A key in the environment variable `KVTUNE_API_KEY` is sent as a bearer token.

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


def _read(url: str) -> bytes:
    request = urllib.request.Request(url)
    if key := os.environ.get(API_KEY_VARIABLE):
        # Not redirected: the key is for this server, and not for where it may point to.
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        error.close()
        raise


def _json(url: str) -> Any:
    try:
        return json.loads(_read(url))
    except urllib.error.HTTPError as error:
        if error.code in REFUSED:
            raise EngineError(
                FailureClass.REQUEST_ERRORS,
                f"{url} answers with HTTP {error.code}: {key_problem()}",
                fix=KEY_FIX,
            ) from error
        raise EngineError(
            FailureClass.REQUEST_ERRORS,
            f"{url} answers with HTTP {error.code}",
            fix="give the address of the server's API, without /v1",
        ) from error
    except _UNREADABLE as error:
        raise EngineError(
            FailureClass.REQUEST_ERRORS,
            f"{url} cannot be read: {getattr(error, 'reason', error)}",
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
        return _read(url).decode("utf-8", "replace")
    except _UNREADABLE:
        return ""
